"""Watch the child processes of a run: restart what may be restarted, end the run when something else dies.

    start ─▶ running ─▶ exited 0 ─▶ done                      (a task: warm start, evaluation, learner …)
                  │
                  └──▶ crashed ─▶ wait (back-off) ─▶ running   (Fate.RESTART, Fate.RESUME, Fate.WARN)
                            └───▶ RoleLost: the run stops      (Fate.STOP, or too many restarts)

consumes: exits of children, signals to this process. produces: restarts, `RoleLost`, `Interrupted`.
waits for: nothing longer than `TICK_S`. unblocked by: the clock.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from common.errors import PeerLost
from common.processes import Child, Lifeline, describe_exit, spawn, stop_all

TICK_S = 0.1
BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
LEFT_BY_ITSELF_S = 5.0
"""An actor that exits 0 was asked to; if the run is still on after this long, it is started again."""
GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""
TREEWARD_CODES = (2, 3, 4, 5)
"""Exit codes that trying again does not cure: configuration, security, storage, protocol."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Fate(enum.Enum):
    """What is done when a child crashes."""

    STOP = "stop"
    RESTART = "restart"
    RESUME = "resume"
    """Restart, and it goes on where it was. Exit 0 is its end, and it is believed when it says that it cannot
    go on."""
    WARN = "warn"
    """Restart; when that has failed too often, go on without it."""


class RoleLost(PeerLost):
    """A child that the run cannot go on without has crashed; carries the child's own exit code if it has a
    meaning (configuration, storage, …)."""

    def __init__(self, message: str, exit_code: int = PeerLost.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Exception):
    """This process was asked to stop by `signal_number`."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


FINAL = {Fate.RESTART: TREEWARD_CODES, Fate.RESUME: (*TREEWARD_CODES, PeerLost.exit_code)}
"""Exit codes after which a child is not started again."""


@dataclass(slots=True)
class Watched:
    """A child with what is needed to start it again."""

    command: Sequence[str]
    fate: Fate
    cwd: Path | None
    niceness: int
    child: Child
    restarts: int = 0
    restart_at: float | None = None
    """Monotonic time of the next start, while it waits for one."""
    done: bool = False
    retired: bool = False
    """Its exit is expected from now on."""


@dataclass(slots=True)
class Supervisor:
    """A context manager: on leaving it, however that happens, every child is ended and reaped.

    Use it in the main thread: it takes over SIGINT, SIGTERM and SIGHUP while it is open.
    """

    logs: Path
    max_restarts: int
    say: Callable[[str], None]
    grace_s: float = GRACE_S
    environment: Mapping[str, str] = field(default_factory=dict)
    watched: dict[str, Watched] = field(default_factory=dict)
    _lifeline: Lifeline = field(default_factory=Lifeline)
    _asked: list[int] = field(default_factory=list)
    _hurry: threading.Event = field(default_factory=threading.Event)
    _before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Supervisor:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*self.watched)
        self._lifeline.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal itself returned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The second one means now: children that are still draining are killed.
        if self._asked:
            self._hurry.set()
        self._asked.append(number)

    # ----------------------------------------------------------------------------------------- children

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        fate: Fate = Fate.STOP,
        cwd: Path | None = None,
        niceness: int = 0,
    ) -> Child:
        """Start a child under `name`, its output going to `logs/<name>.out`."""
        child = self._spawn(name, command, cwd, niceness)
        self.watched[name] = Watched(command, fate, cwd, niceness, child)
        return child

    def _spawn(self, name: str, command: Sequence[str], cwd: Path | None, niceness: int) -> Child:
        return spawn(
            name,
            command,
            log=self.logs / f"{name}.out",
            lifeline=self._lifeline,
            cwd=cwd,
            niceness=niceness,
            environment=self.environment,
        )

    def retire(self, *names: str) -> None:
        """From now on these may exit with any code and are not started again."""
        for name in names:
            self.watched[name].retired = True

    def stop(self, *names: str, grace_s: float | None = None) -> list[str]:
        """End these children; returns the names of those that had to be killed."""
        self.retire(*names)
        children = [self.watched[name].child for name in names]
        return stop_all(children, self.grace_s if grace_s is None else grace_s, hurry=self._hurry)

    def is_running(self, name: str) -> bool:
        return name in self.watched and self.watched[name].child.exit_code() is None

    def is_done(self, name: str) -> bool:
        """Whether it has ended for good: with exit 0, or in any way once retired."""
        return self.watched[name].done

    # ------------------------------------------------------------------------------------------ the loop

    def wait(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        every_tick: Callable[[], None] | None = None,
    ) -> bool:
        """Watch everything until `condition()` holds; False when `timeout_s` passed first.

        Raises:
            RoleLost: a child crashed that the run cannot go on without.
            Interrupted: this process was asked to stop.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.tick(time.monotonic())
            if condition():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            if every_tick is not None:
                every_tick()
            time.sleep(TICK_S)

    def tick(self, now: float) -> None:
        """One look at every child."""
        if self._asked:
            raise Interrupted(self._asked[0])
        for name, watched in list(self.watched.items()):
            if watched.restart_at is not None:
                if watched.retired:
                    watched.restart_at, watched.done = None, True
                elif now >= watched.restart_at:
                    watched.restart_at = None
                    watched.child = self._spawn(name, watched.command, watched.cwd, watched.niceness)
            elif not watched.done:
                code = watched.child.exit_code()
                if code is not None:
                    self._ended(name, watched, code, now)

    def _ended(self, name: str, watched: Watched, code: int, now: float) -> None:
        if watched.retired or (code == 0 and watched.fate in (Fate.STOP, Fate.RESUME)):
            watched.done = True
        elif code == 0 and watched.restarts < self.max_restarts:
            watched.restarts += 1
            watched.restart_at = now + LEFT_BY_ITSELF_S
        elif watched.fate is Fate.STOP or code in FINAL.get(watched.fate, ()):
            raise self._lost(name, watched, code)
        elif watched.restarts < self.max_restarts:
            delay = min(MAX_BACKOFF_S, BACKOFF_S * 2**watched.restarts)
            watched.restarts += 1
            watched.restart_at = now + delay
            self.say(
                f"{name} stopped ({describe_exit(code)}): restart {watched.restarts} of {self.max_restarts} "
                f"in {delay:g} s; {self._why(watched)}"
            )
        elif watched.fate is Fate.WARN:
            watched.done = True
            how = describe_exit(code)
            self.say(f"{name} stopped again ({how}): going on without it; {self._why(watched)}")
        else:
            raise self._lost(name, watched, code, f" after {watched.restarts} restarts")

    def _lost(self, name: str, watched: Watched, code: int, how: str = "") -> RoleLost:
        return RoleLost(
            f"{name} stopped{how} ({describe_exit(code)}), so the run stops; {self._why(watched)}",
            code if code in TREEWARD_CODES else PeerLost.exit_code,
        )

    def _why(self, watched: Watched) -> str:
        last = watched.child.last_lines()
        said = f"it said: {last}; " if last else ""
        return f"{said}log: {watched.child.log}"
