"""The command line of `run.py`, without Hydra: what the words mean, and the help text.

    python run.py [--help] [--cfg job] [--role ROLE] [group=option …] [setting=value …]

Reading the words here, before anything is composed, is what lets every mistake be answered in one sentence
and `--help` in a blink. The help is made from the first comment of each file in `configs/`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config import Role
from common.errors import ConfigError, nearest

OPTIONS = ("--help", "--cfg", "--role")
SHORT = {"node": "replay.node"}
"""Settings that may be typed without their section."""
ON_ITS_OWN = ("role", "experiment")
"""Groups whose options may write anywhere, shown first and last in the help."""


@dataclass(slots=True)
class CommandLine:
    """What was asked for. `choices` maps a group to its option, `values` a dotted key to its text."""

    help: bool = False
    show: bool = False
    """`--cfg job`: print the composed configuration and stop."""
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def groups(configs: Path) -> dict[str, dict[str, str]]:
    """Group -> option -> its one-line description, from the files under `configs`."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(configs.rglob("*.yaml")):
        group = path.parent.relative_to(configs).as_posix()
        if group != ".":
            found.setdefault(group, {})[path.stem] = _description(path)
    found["role"] = {role.value: found["role"][role.value] for role in Role}
    return found


def _description(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((text for text in comments if not text.startswith("@")), "")


def default_choices(configs: Path) -> dict[str, str]:
    """Group -> option of the defaults list in `config.yaml`."""
    lines = (configs / "config.yaml").read_text(encoding="utf-8").splitlines()
    pairs = (line.strip()[2:].split(": ", 1) for line in lines if line.startswith("  - ") and ": " in line)
    return {group: option for group, option in pairs}


def parse(words: Sequence[str], available: dict[str, dict[str, str]]) -> CommandLine:
    """Sort the words of the command line.

    Args:
        words: without the program's name.
        available: what `groups` returned.

    Raises:
        ConfigError: a word that is neither an option nor `key=value`, an option that a group lacks, or a
            setting or group given twice with different values.
    """
    line = CommandLine()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            line.help = True
        elif word.startswith("-"):
            _read_option(line, word, rest, available)
        else:
            _read_assignment(line, word, available)
    return line


def _read_option(line: CommandLine, word: str, rest: list[str], available: dict[str, dict[str, str]]) -> None:
    name, equals, value = word.partition("=")
    name = "--cfg" if name == "-c" else name
    if name not in ("--cfg", "--role"):
        plain = name.lstrip("-")
        close = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"unknown option {name}{hint}: the options are --help, --cfg job and --role; "
            f"settings are written without dashes, {plain}={value or '…'}"
        )
    if not equals:
        value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if name == "--cfg":
        if value != "job":
            raise ConfigError(f"--cfg must be job, got {value!r}: it prints the composed configuration")
        line.show = True
    else:
        _read_assignment(line, f"role={value}", available)


def _read_assignment(line: CommandLine, word: str, available: dict[str, dict[str, str]]) -> None:
    key, equals, value = word.partition("=")
    if not equals:
        example = f"role={word}" if word in available["role"] else "seed=3"
        raise ConfigError(f"cannot read {word!r}: write group=option or setting=value, as in {example}")
    if key.startswith(("+", "~")):
        plain = key.lstrip("+~")
        raise ConfigError(f"cannot read {word!r}: settings are only changed, write {plain}=value")
    if key in available:
        _check_option(key, value, available[key])
        _set_once(line.choices, key, value)
        return
    key = SHORT.get(key, key)
    group = key.replace(".", "/").removesuffix("/name")
    if group in available and (group != key or key.endswith(".name")):
        raise ConfigError(f"{key} is chosen as a group: write {group}={value or '…'} instead of {word!r}")
    _set_once(line.values, key, value)


def latest(words: Sequence[str]) -> list[str]:
    """For programs that lay settings over others: of the words with one key, the last."""
    return list({word.partition("=")[0]: word for word in words}.values())


def _set_once(found: dict[str, str], key: str, value: str) -> None:
    """Which of two values is meant nobody can know: the first may be the one that matters."""
    if found.setdefault(key, value) != value:
        raise ConfigError(
            f"{key} is given twice, as {key}={found[key]} and as {key}={value}: leave one of them out"
        )


def _check_option(group: str, option: str, valid: dict[str, str]) -> None:
    if option not in valid:
        hint = nearest(option, valid)
        raise ConfigError(f"{group} must be one of {', '.join(valid)}, got {option!r}{hint}")


EXAMPLES = """\
Examples
  python run.py                                            train on this machine, everything at its default
  python run.py learner/credit=grpo learner.steps=100      another credit, more updates
  python run.py resume=runs/mine                           go on where that run was interrupted
  python run.py role=actor cluster.allocator=tcp://10.0.0.7:5555    one more actor, from another machine
  python run.py role=replay run=runs/mine node=tree=5/node=17       why that node is where it is
"""


def help_text(configs: Path) -> str:
    """What `--help` prints: the roles, the groups with their options, and examples."""
    available, chosen = groups(configs), default_choices(configs)
    parts = [
        "Treeward trains LLM agents with reinforcement learning over rollout trees.",
        "\nUsage: python run.py [--help] [--cfg job] [role=ROLE] [group=option …] [setting=value …]",
        "\nRoles (role=local is the default; --role ROLE is the same as role=ROLE)",
        *(f"  {option:<12}{text}" for option, text in available["role"].items()),
        "\nGroups (one option each; * is the default)",
        *_group_lines(available, chosen),
        "\nSettings",
        "  python run.py --cfg job   prints every setting with its value, as the command line leaves it;",
        "  run=runs/<id>             takes the settings recorded in that run, with the command line on top;",
        "  resume=runs/<id>          goes on with an interrupted run, under its settings. Places, waits, the",
        "                            number of actors and what is kept may differ, and learner.steps may be",
        "                            larger: that goes on with a complete run too.",
        f"\n{EXAMPLES}",
        "Exit codes: 0 done, 1 audit or replay found something, 2 configuration, 3 security, 4 storage,",
        "5 protocol, 6 a role was lost for good, 70 a bug or a broken engine, 128 + n ended by signal n",
        "(130: Ctrl-C).",
    ]
    return "\n".join(parts)


def _group_lines(available: dict[str, dict[str, str]], chosen: dict[str, str]) -> list[str]:
    order = [group for group in available if group not in ON_ITS_OWN] + ["experiment"]
    lines = []
    for group in order:
        lines.append(f"  {group}")
        for option, text in available[group].items():
            star = "*" if chosen.get(group) == option else " "
            lines.append(f"   {star} {option:<22}{text}")
    return lines
