"""`role=local`: everything on one machine, as child processes of this one.

    tracker ─▶ warm start ─┬▶ evaluation of the starting weights ──────────────────┐
                           └▶ allocator ─▶ learner, actors 0..N ─▶ learner exits 0 ─┴▶ evaluation ─▶ audit

consumes: exits of children, their endpoints and logs in the run directory. produces: a line every 5 s, and
at the end the success before and after. waits for: the learner's exit. unblocked by: any child's exit, a
signal. The actors share nothing with the others: each works in an empty directory of its own and is told
one endpoint and the settings, on its command line.

`resume=` goes on with a run after any end, that of all processes at once included: the allocator takes up its
journal, the learner its newest sound checkpoint, the tracker its MLflow run; what was done already is left
out. A run that was complete and whose last checkpoint was damaged since goes on from the one before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import spool, tracking
from common.audit import audit_run
from common.config import Config, Role
from common.errors import PeerLost, StorageError, TreewardError
from common.metrics import MetricsClient
from common.opening import (
    is_complete,
    open_run,
    record,
    refuse_trained,
    shown,
    step_to_go_on_from,
    wait_until_free,
)
from common.progress import Progress, Tail, duration, success_on
from common.rundir import RunDir
from common.settings import overrides
from common.supervisor import Fate, Interrupted, Supervisor

RUN = Path(__file__).resolve().parent.parent / "run.py"
ANY_PORT = "tcp://127.0.0.1:0"
PROGRESS_S = 5.0
DRAIN_S = 30.0
"""How long the allocator may take to leave after the learner has."""
ACTOR_DRAIN_S = 10.0
"""The same for actors, after the allocator."""
TRACKER_START_S = 30.0
TRACKER_GRACE_S = 20.0
"""The tracker hands what it has to MLflow before it leaves, for at most half of this."""
EVALUATION_NICENESS = 5
"""The evaluation of the starting weights runs beside the training and must not slow it much."""

Command = Callable[[str, Sequence[str]], list[str]]
"""(role, settings) -> command line of a child."""


def role_command(role: str, words: Sequence[str]) -> list[str]:
    """The command line of a role of this installation."""
    return [sys.executable, str(RUN), f"role={role}", *words]


def run_local(config: Config, command: Command = role_command) -> int:
    """Train on this machine and report; returns the exit code.

    Raises:
        ConfigError, StorageError: the run directory cannot be made, is in use, or was trained before.
        RoleLost: a child crashed that the run cannot go on without.
    """
    rundir = open_run(config)
    done = 0
    with rundir.lock("local"):
        if not config.resume:
            refuse_trained(rundir)
        elif is_complete(rundir, config.learner.steps):
            what = f"its {config.learner.steps} updates are trained and evaluated"
            say(f"{shown(rundir.path)} is complete, {what}: a larger learner.steps= goes on from there")
            return 0
        else:
            wait_until_free(rundir)
            done = step_to_go_on_from(rundir)
        record(rundir, config)
        supervisor = Supervisor(rundir.path / "logs", config.cluster.max_restarts, say)
        try:
            with supervisor:
                return LocalRun(config, rundir, supervisor, command, done).run_to_end()
        except Interrupted as interrupted:
            say(f"stopped by {interrupted}: all processes have ended, run {shown(rundir.path)}")
            return 128 + interrupted.signal_number


def say(line: str) -> None:
    """Print a line; a reader that has gone away must not end the run."""
    try:
        print(line, flush=True)
    except (BrokenPipeError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open to the end


@dataclass(slots=True)
class LocalRun:
    """One run from warm start to the last line."""

    config: Config
    rundir: RunDir
    supervisor: Supervisor
    command: Command
    done: int
    """Updates inside the checkpoint that it goes on from."""
    tracker: str = ""
    """Endpoint of the tracker; empty = none."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of each part."""
    tails: dict[str, Tail] = field(default_factory=dict)
    """What the roles log from the start of this process on."""

    def run_to_end(self) -> int:
        """`run`, with word to the tracker when it does not get to its end."""
        try:
            return self.run()
        except Interrupted as interrupted:
            self.tell_tracker(128 + interrupted.signal_number, f"stopped by {interrupted}")
            raise
        except TreewardError as error:
            self.tell_tracker(error.exit_code, str(error))
            raise

    def tell_tracker(self, code: int, reason: str) -> None:
        """MLflow must not show a run as finished that was not."""
        if self.tracker:
            with MetricsClient(self.tracker, "local", "local", run=self.rundir.id) as metrics:
                metrics.goodbye(code, reason[:2000])

    def run(self) -> int:
        """The stages, in order."""
        began = time.monotonic()
        if self.config.resume:
            say(f"resuming {shown(self.rundir.path)} at step {self.done}/{self.config.learner.steps}")
        say(f"run {shown(self.rundir.path)}: {self.config.cluster.actors} actors, logs in logs/")
        self.tails = {r: Tail.from_here(self.rundir.log_file(r)) for r in ("learner", "allocator", "tracker")}
        self.start_tracker()
        self.warm_start()
        warm = time.monotonic()
        self.evaluate_before()
        if self.done < self.config.learner.steps:
            # Of a run that was complete it speaks of weights that are no longer the last ones.
            (self.rundir.path / "summary.json").unlink(missing_ok=True)
            self.start_ring()
            self.train(began)
            self.drain()
        learnt = time.monotonic()
        self.supervisor.wait(lambda: all(map(self.supervisor.is_done, self.evaluations)))
        self.start_evaluation("after", "")
        self.supervisor.wait(lambda: self.supervisor.is_done("eval-after"))
        self.times = {
            "warm start": warm - began,
            "training": learnt - warm,
            "evaluation": time.monotonic() - learnt,
        }
        self.stop_tracker()
        return self.report(learnt - began)

    # ------------------------------------------------------------------------------------------ children

    def start(self, name: str, role: str, words: Sequence[str], **how: Any) -> None:
        """Start a role that works on the run directory."""
        common = [f"run={self.rundir.path}", f"cluster.tracker={self.tracker or self.config.cluster.tracker}"]
        self.supervisor.start(name, self.command(role, [*common, *words]), **how)

    def start_tracker(self) -> None:
        """The tracker is no condition for anything: if it does not come, the run goes on without it."""
        if not self.config.tracking.enabled:
            return
        self.forget_endpoint("tracker")
        words = [f"run={self.rundir.path}", f"cluster.tracker={ANY_PORT}"]
        self.supervisor.start("tracker", self.command("tracker", words), fate=Fate.WARN)
        here = "tracker"
        if self.supervisor.wait(lambda: self.rundir.endpoint(here) is not None, timeout_s=TRACKER_START_S):
            self.tracker = self.rundir.endpoint(here) or ""
        else:
            say(f"the tracker is not ready after {TRACKER_START_S:g} s: going on without it")

    def stop_tracker(self) -> None:
        if "tracker" in self.supervisor.watched:
            if self.supervisor.is_done("tracker"):
                self.tracker = ""  # given up long ago: nobody has recorded since
            self.supervisor.stop("tracker", grace_s=TRACKER_GRACE_S)

    def warm_start(self) -> None:
        """Train the starting weights, unless the run has some or is told where they are."""
        if self.config.model.path or (self.rundir.warmstart_model / "config.json").is_file():
            return
        say("warm start: a few supervised steps on noisy expert demonstrations")
        self.start("warmstart", "warmstart", [])
        self.supervisor.wait(lambda: self.supervisor.is_done("warmstart"))

    def starting_model(self) -> str:
        return self.config.model.path or str(self.rundir.warmstart_model)

    @property
    def evaluations(self) -> list[str]:
        """Those that were started."""
        return [name for name in self.supervisor.watched if name.startswith("eval-")]

    def evaluate_before(self) -> None:
        """Of the starting weights, unless an earlier process of this run did."""
        if not (self.config.resume and self.rundir.eval_file("before").is_file()):
            self.start_evaluation("before", self.starting_model())

    def start_evaluation(self, when: str, checkpoint: str) -> None:
        niceness = EVALUATION_NICENESS if when == "before" else 0
        words = [f"eval.checkpoint={checkpoint}", f"eval.name={when}"]
        self.start(f"eval-{when}", "eval", words, niceness=niceness)

    def start_ring(self) -> None:
        """Allocator first, on any free port; the others are told where it is, also when it is restarted. So
        is the learner, which finds its checkpoint."""
        self.forget_endpoint("allocator")
        self.start("allocator", "allocator", [f"cluster.allocator={ANY_PORT}"], fate=Fate.RESUME)
        allocator = self.endpoint("allocator")
        words = [f"cluster.allocator={allocator}", f"cluster.weights={ANY_PORT}", f"cluster.hints={ANY_PORT}"]
        self.start("learner", "learner", words, fate=Fate.RESUME)
        for number in range(self.config.cluster.actors):
            name = f"actor-{number}"
            command = self.command("actor", self.actor_words(name, allocator))
            self.supervisor.start(name, command, fate=Fate.RESTART, cwd=self.rundir.actor_dir(name))

    def actor_words(self, name: str, allocator: str) -> list[str]:
        """All that an actor is told: no run directory, no file of another role."""
        cluster = dataclasses.replace(
            self.config.cluster, allocator=allocator, tracker=self.tracker or self.config.cluster.tracker
        )
        actor = dataclasses.replace(self.config.actor, name=name, dir=".")
        config = dataclasses.replace(
            self.config, role=Role.ACTOR, run="", resume="", cluster=cluster, actor=actor
        )
        return [word for word in overrides(config) if not word.startswith("role=")]

    def forget_endpoint(self, role: str) -> None:
        """An endpoint left by an earlier process must not be taken for the new one's."""
        (self.rundir.path / "endpoints" / f"{role}.json").unlink(missing_ok=True)

    def endpoint(self, role: str) -> str:
        timeout_s = self.config.cluster.connect_timeout_s
        if not self.supervisor.wait(lambda: self.rundir.endpoint(role) is not None, timeout_s=timeout_s):
            log = self.supervisor.watched[role].child.log
            raise PeerLost(f"the {role} did not say where it listens within {timeout_s:g} s; log: {log}")
        return self.rundir.endpoint(role) or ""

    # ---------------------------------------------------------------------------------------- the stages

    @property
    def actors(self) -> list[str]:
        return [f"actor-{number}" for number in range(self.config.cluster.actors)]

    def train(self, began: float) -> None:
        """Until the learner has done its last step."""
        progress, due = Progress(self.config.learner.steps, self.tails), time.monotonic() + PROGRESS_S

        def show() -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + PROGRESS_S
                for warning in progress.update():
                    say(warning)
                alive = sum(self.supervisor.is_running(name) for name in self.actors)
                say(progress.line(time.monotonic() - began, alive, len(self.actors)))

        self.supervisor.wait(lambda: self.supervisor.is_done("learner"), every_tick=show)
        for warning in progress.update():
            say(warning)
        say(f"{progress.line(time.monotonic() - began, 0, 0).rpartition('  ')[0]}  trained")

    def drain(self) -> None:
        """Let the allocator end by itself, then the actors it said goodbye to; end those that do not."""
        self.supervisor.retire(*self.actors)
        self.leave(["allocator"], DRAIN_S)
        self.leave(self.actors, ACTOR_DRAIN_S)

    def leave(self, names: list[str], timeout_s: float) -> None:
        """Wait until these have ended by themselves; end those that have not in time."""
        if self.supervisor.wait(lambda: all(map(self.supervisor.is_done, names)), timeout_s=timeout_s):
            return
        late = [name for name in names if self.supervisor.is_running(name)]
        say(f"{', '.join(late)} did not leave within {timeout_s:g} s: ended")
        self.supervisor.stop(*late)

    # ---------------------------------------------------------------------------------------- the report

    def report(self, total_s: float) -> int:
        """The last lines; 1 if the audit found something."""
        before, after = (read_result(self.rundir.eval_file(when)) for when in ("before", "after"))
        audit = audit_run(self.rundir)
        for line in audit.lines() if not audit.ok else ():
            say(line)
        say(", ".join(f"{part} {duration(seconds)}" for part, seconds in self.times.items()))
        if audit.given_up:
            say(f"{audit.given_up} continuations were given up after failed attempts: see logs/allocator.log")
        say(audit.last_line())
        greedy = f"{interval(before['greedy'])} -> {interval(after['greedy'])}"
        say(f"greedy success {greedy}; {self.where_measured()}")
        path = shown(self.rundir.path)
        rates = f"{before['sampled']['success']:.2f} -> {after['sampled']['success']:.2f}"
        maps = after["sampled"]["tasks"]
        self.write_summary(before, after, total_s)
        success = success_on(self.config.eval.split)
        say(f"{success} {rates} ({maps} maps) in {duration(total_s)}, run {path}")
        return 0 if audit.ok else 1

    def where_measured(self) -> str:
        """Where the numbers of the run are: with MLflow, or still in the spool."""
        if not self.config.tracking.enabled:
            return "metrics were not recorded (tracking.enabled=false)"
        to, run = self.shown_uri(), shown(self.rundir.path)
        if (self.rundir.tracking / spool.FILE_NAME).exists():
            return (
                f"not all metrics have reached {to} (see {run}/logs/tracker.log): "
                f"python run.py role=tracker run={run} sends the rest"
            )
        if not self.tracker or not (self.rundir.tracking / tracking.ID_FILE).exists():
            return f"metrics were not all recorded in {to}: see {run}/logs/tracker.out"
        if self.config.tracking.uri or Path(self.config.runs_dir) != Path(Config().runs_dir):
            return f"everything measured is in {to}"
        return "everything measured is shown by: make mlflow"

    def shown_uri(self) -> str:
        """Where MLflow records, without the password that may stand in it."""
        uri = tracking.destination(self.config, self.rundir.id, self.rundir.tracking).uri
        here = Path(self.config.runs_dir)
        uri = uri.replace(f"sqlite:///{here.absolute()}/", f"sqlite:///{here}/")
        return re.sub(r"://[^/@]*@", "://", uri)

    def write_summary(self, before: dict[str, Any], after: dict[str, Any], total_s: float) -> None:
        """`summary.json`, for benchmarks."""
        value = {
            "before": before, "after": after, "total_s": total_s, "parts_s": self.times,
            "steps": self.config.learner.steps,
        }  # fmt: skip
        self.rundir.write_json_atomic(self.rundir.path / "summary.json", value)


def interval(result: dict[str, Any]) -> str:
    """`0.55 [0.48, 0.62]`."""
    return f"{result['success']:.2f} [{result['low']:.2f}, {result['high']:.2f}]"


def read_result(path: Path) -> dict[str, Any]:
    """An evaluation's result. Raises `StorageError` where it is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    raise StorageError(
        f"the evaluation left no result at {path}: see its log in {path.parent.parent / 'logs'}"
    )
