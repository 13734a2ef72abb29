"""The house laws that a machine can check: who may import whom, what is never called, how large things get.

One-way imports: run.py → roles → envs (actors only) → common. The law is held twice: by reading every
import statement (also under TYPE_CHECKING and inside functions, where Python itself would not look), and
by importing the light rooms in a fresh interpreter and looking at what else came in with them.

The checks are functions from a source text to findings, so the last tests here can show that each check
finds what it is for; a check that finds nothing in an empty room would otherwise prove nothing.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("actors", "allocator", "learner")
ROOMS = (*ROLES, "envs", "common")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

FORBIDDEN_PACKAGES: dict[str, tuple[str, ...]] = {
    # file or folder: first-party packages that it never imports
    "common": (*ROLES, "envs", "run", "benchmarks", "tests"),
    "envs": (*ROLES, "run", "benchmarks", "tests"),
    "allocator": ("actors", "learner", "envs", "run", "benchmarks", "tests"),
    "actors": ("allocator", "learner", "run", "benchmarks", "tests"),
    "learner": ("allocator", "actors", "envs", "run", "benchmarks", "tests"),
    "run.py": ("benchmarks", "tests"),
}

HOMES: dict[str, tuple[str, ...]] = {
    # heavy library: the only places that import it (a folder, a file, or a file's beginning with *)
    "torch": ("actors/engines/", "learner/"),
    "transformers": ("actors/engines/", "learner/"),
    "vllm": ("actors/engines/",),
    "deepspeed": ("learner/backend/deepspeed_backend.py",),
    "peft": ("learner/lora.py",),
    "ray": (),  # no role uses it yet; the first file that does is named here
    "gymnasium": ("envs/",),
    "mlflow": ("common/tracking*",),
    "hydra": ("run.py",),
    "omegaconf": ("run.py",),
}

ALLOCATOR_SHELL = tuple(f"allocator/{name}.py" for name in ("loop", "serve", "recovery", "snapshots"))
"""What runs the core: sockets, clocks, files and threads are here, decisions are not."""
SOCKETS = ("allocator/loop.py", "allocator/serve.py")
CORE_NEVER_IMPORTS = ("zmq", "asyncio", "socket", "selectors", "threading", "time", "datetime", "secrets")
"""The allocator decides without I/O: time and seeds come as arguments, messages come and go as values."""

NEVER_IMPORTED = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
NEVER_CALLED = ("eval", "exec", "compile", "__import__")
NEVER_CALLED_ON = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen")}
NEVER_CALLED_METHODS = ("send_pyobj", "recv_pyobj")
NEVER_PASSED_TRUE = ("shell", "allow_pickle")

LIGHT_ROOMS = ("common", "allocator", "envs")
HEAVY = ("torch", "vllm", "ray", "deepspeed", "peft")
HEAVY_FOR_RUN = (*HEAVY, "transformers", "mlflow", "gymnasium")

EVERYWHERE = [*FORBIDDEN_PACKAGES, "benchmarks"]

Finding = tuple[int, str]
Check = Callable[[str, ast.AST], Iterator[Finding]]


# ------------------------------------------------------------------------------------------- reading


def source_files(place: str) -> list[Path]:
    """Every Python file of a room, or the one file named."""
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(where: str, tree: ast.AST) -> Iterator[Finding]:
    """(line, dotted name) of everything imported, by statement or by a literal import_module call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = Path(where).parent.parts
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{origin}.{alias.name}".lstrip(".")) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def within(name: str, packages: tuple[str, ...]) -> bool:
    return name.partition(".")[0] in packages


def at_home(where: str, homes: tuple[str, ...]) -> bool:
    return any(where.startswith(home.rstrip("*")) if home[-1] in "/*" else where == home for home in homes)


# -------------------------------------------------------------------------------------------- checks


def upward_imports(where: str, tree: ast.AST) -> Iterator[Finding]:
    room = where.partition("/")[0]
    for line, name in imports(where, tree):
        if within(name, FORBIDDEN_PACKAGES[room]):
            yield line, f"imports {name}: {room} must not know it (run.py → roles → envs → common)"


def homeless_libraries(where: str, tree: ast.AST) -> Iterator[Finding]:
    for line, name in imports(where, tree):
        library = name.partition(".")[0]
        if library in HOMES and not at_home(where, HOMES[library]):
            homes = ", ".join(HOMES[library]) or "no place yet"
            yield line, f"imports {name}: {library} is imported only in {homes}"


def input_and_output_in_the_core(where: str, tree: ast.AST) -> Iterator[Finding]:
    for line, name in imports(where, tree):
        if where not in ALLOCATOR_SHELL and within(name, CORE_NEVER_IMPORTS):
            yield line, f"imports {name}: the core has no socket, clock or thread; {ALLOCATOR_SHELL[0]} has"


def forbidden_calls(where: str, tree: ast.AST) -> Iterator[Finding]:
    for line, name in imports(where, tree):
        dotted = tuple(name.split(".")[:2])
        if within(name, NEVER_IMPORTED) or dotted in NEVER_CALLED_ON:
            yield line, f"imports {name}: nothing is pickled, and no string is run as a program"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NEVER_CALLED:
            yield node.lineno, f"uses {node.id}: no string is run as a program"
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in NEVER_CALLED_METHODS or (owner, node.attr) in NEVER_CALLED_ON:
                yield node.lineno, f"uses {owner}.{node.attr}: it pickles, or runs a string as a program"
        if isinstance(node, ast.keyword) and node.arg in NEVER_PASSED_TRUE:
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            if not refused:
                yield node.value.lineno, f"passes {node.arg}: no shell and no pickle behind a library's back"


def long_functions(where: str, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines: {MAX_FUNCTION_LINES} at most, split it"


def violations(check: Check, place: str) -> list[str]:
    found = []
    for path in source_files(place):
        where = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=where)
        found += [f"{where}:{line}: {rule}" for line, rule in sorted(set(check(where, tree)))]
    return found


def assert_none(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


# ------------------------------------------------------------------------- the law, by reading imports


@pytest.mark.parametrize("place", FORBIDDEN_PACKAGES)
def test_a_room_imports_only_what_lies_below_it(place: str) -> None:
    assert_none(violations(upward_imports, place))


@pytest.mark.parametrize("place", FORBIDDEN_PACKAGES)
def test_a_heavy_library_is_imported_only_in_its_home(place: str) -> None:
    assert_none(violations(homeless_libraries, place))


def test_the_allocator_core_imports_no_socket_clock_or_thread() -> None:
    assert_none(violations(input_and_output_in_the_core, "allocator"))


# ----------------------------------------------------------------------------- the law, by importing

PROBE = """
import importlib, json, sys
modules, unwanted = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
    came = sorted(name for name in unwanted if name in sys.modules)
    if came:
        sys.exit("brings in " + json.dumps([module, came]))
"""


def brought_in(modules: list[str], unwanted: tuple[str, ...]) -> str:
    """Import the modules in a fresh interpreter; '' or a sentence naming the first that brings one in."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, unwanted])],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if not done.returncode:
        return ""
    _, found, said = done.stderr.rpartition("brings in ")
    if not found:
        return f"importing {', '.join(modules)} failed:\n{done.stderr}"
    module, came = json.loads(said)
    return f"{module}: importing it brings in {', '.join(came)}, directly or through another module"


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_importing_a_light_room_brings_in_no_heavy_library(room: str) -> None:
    sentence = brought_in([module_name(path) for path in source_files(room)], HEAVY)
    assert_none([sentence] if sentence else [])


def test_importing_the_allocator_core_brings_in_no_zmq() -> None:
    sockets = [ROOT / place for place in SOCKETS]
    core = [module_name(path) for path in source_files("allocator") if path not in sockets]
    sentence = brought_in(core, ("zmq",))
    assert_none([sentence] if sentence else [])


def test_importing_run_brings_in_nothing_heavy() -> None:
    sentence = brought_in([module_name(path) for path in source_files("run.py")], HEAVY_FOR_RUN)
    assert_none([sentence] if sentence else [])


# ------------------------------------------------------------------------------- never, and not more


@pytest.mark.parametrize("place", EVERYWHERE)
def test_nothing_is_pickled_and_no_string_is_run_as_a_program(place: str) -> None:
    assert_none(violations(forbidden_calls, place))


@pytest.mark.parametrize("place", EVERYWHERE)
def test_no_function_is_too_long_to_read_at_once(place: str) -> None:
    assert_none(violations(long_functions, place))


@pytest.mark.parametrize("place", EVERYWHERE)
def test_no_file_is_too_long_to_read_at_one_sitting(place: str) -> None:
    found = []
    for path in source_files(place):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(
                f"{path.relative_to(ROOT)}:{lines}: over {MAX_FILE_LINES} lines, split it by what it owns"
            )
    assert_none(found)


UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME")) + r")\b")
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".cfg", ".html", ""}
TEXT_PLACES = (*ROOMS, "configs", "tests", "benchmarks", "docs", ".ci", "")
"""Folders read with everything in them; '' stands for the files of the top folder alone."""


@pytest.mark.parametrize("place", TEXT_PLACES)
def test_no_file_leaves_a_note_about_work_not_done(place: str) -> None:
    found = []
    for path in sorted((ROOT / place).rglob("*") if place else ROOT.glob("*")):
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            for number, line in enumerate(text.splitlines(), start=1):
                if UNFINISHED.search(line):
                    found.append(
                        f"{path.relative_to(ROOT)}:{number}: do it, or file an issue and drop the note"
                    )
    assert_none(found)


# --------------------------------------------------------------- each check finds what it is meant for

CAUGHT: list[tuple[Check, str, str]] = [
    (upward_imports, "common/x.py", "import learner.queue"),
    (upward_imports, "common/deep/x.py", "from envs import base"),
    (upward_imports, "envs/x.py", "if TYPE_CHECKING:\n    from actors.loop import Loop"),
    (upward_imports, "allocator/x.py", "def f():\n    import envs.frozenlake"),
    (upward_imports, "actors/x.py", "importlib.import_module('learner.loss')"),
    (upward_imports, "learner/x.py", "from envs.base import Task"),
    (upward_imports, "run.py", "import tests.oracle"),
    (homeless_libraries, "actors/loop.py", "import torch"),
    (homeless_libraries, "common/tree.py", "from torch.nn import functional"),
    (homeless_libraries, "allocator/core.py", "from transformers import AutoTokenizer"),
    (homeless_libraries, "learner/loop.py", "import mlflow"),
    (homeless_libraries, "common/config.py", "from omegaconf import MISSING"),
    (homeless_libraries, "run.py", "def f():\n    import ray"),
    (input_and_output_in_the_core, "allocator/core.py", "import zmq.asyncio"),
    (input_and_output_in_the_core, "allocator/rules/flat.py", "from time import monotonic"),
    (forbidden_calls, "common/x.py", "import pickle as p"),
    (forbidden_calls, "learner/x.py", "torch.load('weights.pt')"),
    (forbidden_calls, "learner/x.py", "from torch import save"),
    (forbidden_calls, "common/x.py", "socket.recv_pyobj()"),
    (forbidden_calls, "envs/x.py", "eval(action)"),
    (forbidden_calls, "envs/x.py", "run = exec"),
    (forbidden_calls, "run.py", "subprocess.run(line, shell=True)"),
    (forbidden_calls, "envs/x.py", "np.load(path, allow_pickle=flag)"),
    (long_functions, "common/x.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (long_functions, "common/x.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
]  # fmt: skip

LEFT_ALONE: list[tuple[Check, str, str]] = [
    (upward_imports, "actors/x.py", "from envs.base import Environment\nfrom common.nouns import Tree"),
    (upward_imports, "learner/credit/x.py", "from . import grpo\nfrom ..queue import Queue"),
    (upward_imports, "run.py", "def f():\n    from learner.loop import main"),
    (homeless_libraries, "actors/engines/embedded.py", "import torch\nfrom transformers import AutoModelForCausalLM"),
    (homeless_libraries, "common/tracking_writer.py", "import mlflow"),
    (input_and_output_in_the_core, ALLOCATOR_SHELL[0], "import time, zmq"),
    (forbidden_calls, "learner/x.py", "model.eval()\nre.compile('a')\nasyncio.create_subprocess_exec('python')"),
    (forbidden_calls, "learner/x.py", "'''No pickle, no torch.load, no eval().'''"),
    (forbidden_calls, "envs/x.py", "np.load(path, allow_pickle=False)"),
    (forbidden_calls, "common/config.py", "class Config:\n    eval: EvalConfig\nconfig.eval.maps"),
    (long_functions, "common/x.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
]  # fmt: skip


@pytest.mark.parametrize("check, where, source", CAUGHT)
def test_a_check_finds_what_it_is_meant_for(check: Check, where: str, source: str) -> None:
    assert list(check(where, ast.parse(source))), f"{check.__name__} overlooks in {where}: {source}"


@pytest.mark.parametrize("check, where, source", LEFT_ALONE)
def test_a_check_leaves_good_code_alone(check: Check, where: str, source: str) -> None:
    assert not list(check(where, ast.parse(source))), f"{check.__name__} complains about {where}: {source}"


def test_a_heavy_library_that_comes_in_through_another_module_is_noticed() -> None:
    assert "json: importing it brings in re" in brought_in(["json"], ("re",))
    assert brought_in(["json"], ("torch",)) == ""
    assert "failed" in brought_in(["no_such_module_anywhere"], ())
