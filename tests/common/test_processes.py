"""Child processes end with their parent, whatever ends the parent, and leave no zombie."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.processes import Child, Lifeline, describe_exit, spawn, stop_all

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a command as a child; whatever is left at the end of the test is killed."""
    children = []
    with Lifeline() as lifeline:

        def start_one(*command: str, name: str = "child") -> Child:
            child = spawn(name, command, log=tmp_path / "logs" / f"{name}.out", lifeline=lifeline)
            children.append(child)
            return child

        yield start_one
        stop_all(children, 0)


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    """No process, or a dead one that some other parent has yet to reap."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_ends_is_reaped_with_its_exit_code(start: Callable[..., Child]) -> None:
    child = start("sh", "-c", "exit 7")
    assert eventually(lambda: child.exit_code() == 7)
    assert not psutil.pid_exists(child.process.pid)


def test_the_last_lines_are_those_of_this_process_and_not_of_an_earlier_one(
    start: Callable[..., Child],
) -> None:
    first = start("sh", "-c", "echo earlier; echo also earlier >&2")
    assert eventually(lambda: first.exit_code() == 0)
    second = start("sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done; printf '\\377\\n'")
    assert eventually(lambda: second.exit_code() == 0)
    assert second.last_lines(2) == "line 5 | �"
    assert "earlier" not in second.last_lines(99)
    assert len(second.last_lines(99, limit=10)) == 10


def test_a_child_has_a_group_of_its_own_that_ends_with_it(start: Callable[..., Child]) -> None:
    child = start("sh", "-c", "sleep 60 & echo $!; wait")
    assert os.getpgid(child.process.pid) == child.process.pid != os.getpgid(0)
    assert eventually(lambda: child.last_lines().isdigit())
    grandchild = int(child.last_lines())
    assert stop_all([child], 5) == []
    assert eventually(lambda: gone(grandchild))


def test_a_child_that_will_not_leave_is_killed_after_the_grace(start: Callable[..., Child]) -> None:
    stubborn = start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done", name="stubborn")
    polite = start("sleep", "60", name="polite")
    assert eventually(lambda: stubborn.last_lines() == "ready")
    began = time.monotonic()
    assert stop_all([stubborn, polite], 0.3) == ["stubborn"]
    assert 0.3 <= time.monotonic() - began < 5
    assert stubborn.exit_code() == -signal.SIGKILL and polite.exit_code() == -signal.SIGTERM


def test_a_stopped_child_is_woken_to_leave(start: Callable[..., Child]) -> None:
    child = start("sleep", "60")
    child.signal(signal.SIGSTOP)
    assert stop_all([child], 5) == []
    assert child.exit_code() == -signal.SIGTERM


def test_a_hurry_cuts_the_grace_short(start: Callable[..., Child]) -> None:
    stubborn = start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    assert eventually(lambda: stubborn.last_lines() == "ready")
    hurry = threading.Event()
    threading.Timer(0.2, hurry.set).start()
    began = time.monotonic()
    assert stop_all([stubborn], 60, hurry=hurry) == ["child"]
    assert time.monotonic() - began < 10


PARENT = """
    import sys, time
    from pathlib import Path
    from common import processes
    if sys.argv[1] == "without the kernel's help":
        processes._prctl = None
    child = "from common import processes; import time; processes.follow_parent(); print('up', flush=True); time.sleep(60)"
    with processes.Lifeline() as lifeline:
        command = [sys.executable, "-c", child] if processes._prctl is None else ["sleep", "60"]
        children = [processes.spawn(f"c{i}", command, log=Path(f"c{i}.out"), lifeline=lifeline) for i in range(2)]
        while processes._prctl is None and any(c.last_lines() != "up" for c in children):
            time.sleep(0.02)
        print(*[c.process.pid for c in children], flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["with the kernel's help", "without the kernel's help"])
def test_children_are_gone_after_kill_9_of_their_parent(how: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), how],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: all(gone(pid) for pid in pids), 10)


def test_an_exit_code_is_put_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL, by hand or for want of memory"
