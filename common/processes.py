"""Child processes that are always reaped and never outlive the process that started them.

Two independent ties hold a child to its parent, so that even `kill -9` of the parent leaves nothing running:

    kernel     PR_SET_PDEATHSIG: Linux kills the child when the thread that started it dies. Start children
               from the main thread, since the tie is to the thread.
    lifeline   a pipe whose write end only the parent holds; `follow_parent` in the child reads its end and
               leaves at end of file. It serves where the kernel has no such signal.

Each child leads a process group of its own: Ctrl-C reaches the parent alone, which then ends the children in
order, and whatever a child started goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

LIFELINE = "TREEWARD_LIFELINE"
"""Environment variable: file descriptor of the child's end of the lifeline."""
LEAVE_S = 5.0
"""How long a child that lost its parent may take to leave by itself: the promise is 10 s in all."""
POLL_S = 0.05
PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


@dataclass(slots=True)
class Child:
    """A started process and the file that has what it printed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0
    """Size of the log when this process began: an earlier one of the same name wrote what is before."""
    started: float = field(default_factory=time.monotonic)

    def exit_code(self) -> int | None:
        """None while it runs; negative = the signal that ended it. Reaps."""
        return self.process.poll()

    def last_lines(self, count: int = 3, limit: int = 600) -> str:
        """The end of what it printed, on one line of at most `limit` characters."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log.stat().st_size - 8192))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-count:])[-limit:]

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Lifeline:
    """The pipe that tells children when this process has died."""

    def __init__(self) -> None:
        self.child_end, self._own_end = os.pipe()  # neither is inherited unless passed on purpose

    def close(self) -> None:
        os.close(self.child_end)
        os.close(self._own_end)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spawn(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    lifeline: Lifeline,
    cwd: Path | None = None,
    niceness: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start `command` with its output appended to `log`. Call it from the main thread.

    Raises:
        OSError: the program, the directory or the log cannot be opened.
    """
    parent = os.getpid()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        log_start = output.tell()  # before the child shares this position and moves it
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env={**os.environ, **(environment or {}), LIFELINE: str(lifeline.child_end)},
            pass_fds=(lifeline.child_end,),
            process_group=0,
            preexec_fn=lambda: _tie_to(parent, niceness),  # noqa: PLW1509 - no thread runs in this process
        )
        return Child(name, process, log, log_start)


def _tie_to(parent: int, niceness: int) -> None:
    """Runs in the child, between fork and exec."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the tie was made
    if niceness:
        os.nice(niceness)


def follow_parent() -> None:
    """In a child of `spawn`: leave soon after the parent has died. Elsewhere it does nothing."""
    word = os.environ.pop(LIFELINE, "")  # popped: what this process starts has no such descriptor
    if not word.isdigit():
        return
    descriptor = int(word)
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
    except OSError:
        return
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_leave_at_end, args=(descriptor,), name="lifeline", daemon=True).start()


def _leave_at_end(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os._exit(128 + signal.SIGTERM)


def stop_all(children: Sequence[Child], grace_s: float, *, hurry: threading.Event | None = None) -> list[str]:
    """SIGTERM to all at once, SIGKILL to those still there after `grace_s` (or as soon as `hurry` is set).

    Returns the names of those that had to be killed. All are reaped when it returns.
    """
    running = [child for child in children if child.exit_code() is None]
    for child in running:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # a stopped process sees SIGTERM only when it goes on
    deadline = time.monotonic() + grace_s
    while any(child.exit_code() is None for child in running):
        if time.monotonic() > deadline or (hurry is not None and hurry.is_set()):
            break
        time.sleep(POLL_S)
    killed = [child for child in running if child.exit_code() is None]
    for child in killed:
        child.signal(signal.SIGKILL)
    for child in killed:
        child.process.wait()
    return [child.name for child in killed]


def describe_exit(code: int) -> str:
    """The exit code in words, for a sentence."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = ", by hand or for want of memory" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
