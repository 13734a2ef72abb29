"""`kill -9` of the learner at many moments: is it always back where it was, and is the end the same?

    python -m benchmarks.learner_kills [kills] [--seed N] [--work DIR]

    undisturbed run ─▶ SHA-256 of the weights after each update
    rounds of a run in which the learner is killed again and again ─▶ the same hashes? audit ─▶ a row per kill

All are real processes over real sockets, in deterministic mode: K = 0, a checkpoint after every update, so
that a restart may leave no trace. A kill is aimed at one of four moments and lands where it lands, which is
read afterwards from what was left on disk:

    waiting   nothing is in hand that the newest checkpoint lacks
    step      an update was under way or done, and not saved
    save      a checkpoint is half written
    saved     a checkpoint is whole, and the allocator has not been told of it

The last line is `learner_kills: kills=… resumed=… lost=… trained_twice=… hash_equal=…`: kills; how many were
followed by a start from the newest checkpoint that was whole at the kill; ids that `role=audit` finds lost,
and duplicated, over all rounds; rounds whose checkpoints all equal the undisturbed run's, as a share. It goes
on after an interruption. Results go to `results/learner_kills.json` (fewer than 50: `…-quick.json`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.children import say
from benchmarks.cli import fresh_run, guarded
from benchmarks.forked import Roles
from benchmarks.partial import Partial
from common.audit import audit_run
from common.audit_findings import DUPLICATED, LOST
from common.journal import Record, read_journal
from common.manifest import is_whole, read_manifest
from common.rundir import RunDir

KILLS = 50
ROUND = 10
"""Kills of one run, unless it ends before."""
STEPS = 12
BATCH = 2
ACTORS = 2
AIMS = ("anywhere", "step", "save", "saved")
TIGHT_S = 0.0003
"""Between two looks at the disk when a moment of milliseconds is waited for."""
MOST_PULSES = 2_000
NEVER_S = 20.0
"""An aimed kill that found nothing to aim at for so long happens anyway."""
WORDS = [
    "experiment=deterministic", "tracking=none", "allocator/rule=random", "allocator.rule.chains=1",
    "allocator.rule.expansions=1", "allocator.budget.continuations=4", f"learner.steps={STEPS}",
    f"learner.batch_trees={BATCH}", "learner.loss.minibatches=1", f"learner.keep_checkpoints={STEPS + 1}",
    "learner.optimizer.lr=0.003", "env.max_turns=4", "warmstart.demonstrations=64", "warmstart.noise=0.2",
    "warmstart.steps=60", "cluster.heartbeat_s=0.5", "cluster.dead_after_s=3",
]  # fmt: skip
ANY_PORT = "tcp://127.0.0.1:0"


@dataclass(slots=True)
class Kill:
    """One kill, and what came of it."""

    aim: str
    moment: str
    """Where it landed."""
    checkpoint: int
    """Newest that was whole then; −1 = there was none yet."""
    resumed: int = -1
    """Where the next start began."""
    back_s: float = 0.0
    """From the kill to that."""

    @property
    def right(self) -> bool:
        """Whether the next start began there; without any checkpoint, at the beginning."""
        return self.resumed == max(0, self.checkpoint)

    def row(self, number: int) -> dict[str, Any]:
        return {
            "round": number, "aim": self.aim, "moment": self.moment, "checkpoint": self.checkpoint,
            "resumed": self.resumed, "right": self.right, "back_s": round(self.back_s, 3),
        }  # fmt: skip


class Ring:
    """A run under way. Its learner may be killed and started again."""

    def __init__(self, path: Path, model: Path, roles: Roles) -> None:
        self.path, self.roles, self.starts = path, roles, 0
        self.words = [*WORDS, f"model.path={model}"]

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.path)

    def begin(self) -> None:
        """Allocator, actors, learner."""
        self.roles.start(
            "allocator", ["role=allocator", f"run={self.path}", *self.words, f"cluster.allocator={ANY_PORT}"]
        )
        self.roles.wait(
            lambda: self.path.is_dir() and self.rundir.endpoint("allocator") is not None, "the allocator"
        )
        self.allocator = f"cluster.allocator={self.rundir.endpoint('allocator')}"
        for number in range(ACTORS):
            name = f"actor-{number}"
            mine = [f"actor.name={name}", f"actor.dir={self.rundir.actor_dir(name)}"]
            self.roles.start(name, ["role=actor", *self.words, self.allocator, *mine])
        self.start_learner()

    def start_learner(self) -> None:
        """Until it has written down where it begins."""
        words = ["role=learner", f"run={self.path}", self.allocator]
        self.roles.start("learner", [*words, f"cluster.weights={ANY_PORT}", f"cluster.hints={ANY_PORT}"])
        self.starts += 1
        self.roles.wait(lambda: len(self.written("start")) >= self.starts, "the learner's start")

    def written(self, kind: str) -> list[Record]:
        """Records of one kind in the learner's journal."""
        path = self.rundir.learner_journal
        records = read_journal(path) if path.is_file() and path.stat().st_size > 8 else ()
        return [record for record in records if record.kind == kind]

    def checkpoints(self) -> dict[int, str]:
        """Step -> SHA-256 of the weights, of every checkpoint that is whole."""
        found = [path for path in self.rundir.checkpoints.glob("step-*") if is_whole(path)]
        manifests = [read_manifest(path) for path in found]
        return {each.step: each.files["model.safetensors"].sha256 for each in manifests}

    @property
    def over(self) -> bool:
        """Whether the last checkpoint is there: from then on the run is about to end."""
        return (self.rundir.checkpoints / f"step-{STEPS:08d}").is_dir()

    def in_hand(self) -> bool:
        """Whether a batch is there that was not trained: an update is under way, or about to be."""
        received = {record.fields["tree"] for record in self.written("received")}
        consumed = {tree for record in self.written("consumed") for tree in record.fields["trees"]}
        return len(received - consumed) >= BATCH

    def moment(self) -> str:
        """What the learner was at when it died."""
        newest = max(self.checkpoints(), default=-1)
        if any(self.rundir.checkpoints.glob(".tmp-*")):
            return "save"
        batches = {record.fields["step"]: record.fields["trees"] for record in self.written("consumed")}
        if max(batches, default=-1) > newest:
            return "step"
        if not set(batches.get(newest, ())) <= self.known_as_committed():
            return "saved"
        return "step" if self.in_hand() else "waiting"

    def known_as_committed(self) -> set[int]:
        """Trees that the allocator was told to be in a checkpoint."""
        records = read_journal(self.rundir.allocator_journal)
        return {record.fields["tree"] for record in records if record.kind == "tree_committed"}


class Killer:
    """Chooses moments and waits for them."""

    def __init__(self, ring: Ring, draw: random.Random) -> None:
        self._ring, self._draw = ring, draw

    def strike(self) -> Kill | None:
        """Kill the learner at a moment of its choice; None where the run came to its end first."""
        aim, ring = self._draw.choice(AIMS), self._ring
        self._await(aim)
        if ring.over:
            return None
        began = time.monotonic()
        ring.roles.kill("learner")
        kill = Kill(aim, ring.moment(), max(ring.checkpoints(), default=-1))
        ring.start_learner()
        kill.resumed, kill.back_s = ring.written("start")[-1].fields["step"], time.monotonic() - began
        return kill

    def _await(self, aim: str) -> None:
        folder = self._ring.rundir.checkpoints
        before = {path.name for path in folder.glob("step-*")}
        match aim:
            case "anywhere":
                self._until(lambda: False, self._draw.uniform(0.0, 1.5))
            case "save":
                self._until(lambda: any(folder.glob(".tmp-*")))
                pulses = self._draw.randrange(6)
                self._creep(lambda done: done == pulses)
            case "saved":
                self._until(lambda: any(folder.glob(".tmp-*")))
                self._creep(lambda done: any(path.name not in before for path in folder.glob("step-*")))
            case _:
                self._until(self._ring.in_hand)
                time.sleep(self._draw.uniform(0.0, 0.05))

    def _creep(self, condition: Callable[[int], bool]) -> None:
        """Let the learner run in pulses until `condition(pulses)`, looked at while it stands still."""
        learner = self._ring.roles.running["learner"].pid
        assert learner is not None
        os.kill(learner, signal.SIGSTOP)
        for done in range(MOST_PULSES):
            if condition(done):
                return
            os.kill(learner, signal.SIGCONT)
            time.sleep(TIGHT_S)
            os.kill(learner, signal.SIGSTOP)

    def _until(self, condition: Callable[[], bool], limit_s: float = NEVER_S) -> None:
        deadline = time.monotonic() + limit_s
        while not (condition() or self._ring.over) and time.monotonic() < deadline:
            time.sleep(TIGHT_S)


def warm_start(folder: Path) -> Path:
    """Starting weights for all rounds; made once."""
    path = folder / "start"
    model = RunDir(path).path / "warmstart" / "model"
    if not (model / "config.json").is_file():
        with Roles(folder / "logs") as roles:
            roles.start("warmstart", ["role=warmstart", f"run={fresh_run(path)}", *WORDS])
            roles.join()
    return model


def run_round(path: Path, model: Path, kills: int, seed: str) -> tuple[list[Kill], dict[str, Any]]:
    """A whole run with at most so many kills; (what came of each, what the run left).

    Raises:
        BenchmarkFailed: a role failed for another cause.
    """
    draw, found = random.Random(seed), list[Kill]()
    with Roles(path.with_name(f"{path.name}-logs")) as roles:
        ring = Ring(path, model, roles)
        ring.begin()
        killer = Killer(ring, draw)
        while len(found) < kills and (kill := killer.strike()) is not None:
            found.append(kill)
        roles.join()
    report = audit_run(ring.rundir)
    return found, {
        "hashes": {str(step): sha for step, sha in sorted(ring.checkpoints().items())},
        "findings": [f"{each.kind}: {each.id}: {each.what}" for each in report.findings],
        "lost": report.count(LOST), "trained_twice": report.count(DUPLICATED),
        "lineages": ring.starts, "audit": report.last_line(),
    }  # fmt: skip


def measure(kills: int, seed: int, work: Path) -> dict[str, Any]:
    """All rounds; what was finished before an interruption is taken over."""
    model = warm_start(work)
    settings = {"words": WORDS, "seed": seed, "round": ROUND, "commit": results.git_state()["commit"]}
    partial = Partial(work / "partial.json", settings)
    if (kept := partial.get(0, "undisturbed")) is None:
        _, left = run_round(fresh_run(work / "undisturbed"), model, 0, "")
        partial.keep(0, "undisturbed", kept := [left])
    rounds, rows, number = [], list[dict[str, Any]](), 0
    while len(rows) < kills:
        number += 1
        entry = partial.get(number, "round")
        if entry is None:
            wanted = min(ROUND, kills - len(rows))
            found, left = run_round(fresh_run(work / f"round-{number}"), model, wanted, f"{seed}/{number}")
            entry = [{**left, "kills": [kill.row(number) for kill in found]}]
            partial.keep(number, "round", entry)
        rounds.append(entry[0])
        rows += entry[0]["kills"]
        moments = Counter(row["moment"] for row in entry[0]["kills"])
        say(f"round {number}: {dict(moments)}, {entry[0]['audit']}")
    partial.remove()
    return {"undisturbed": kept[0], "rounds": rounds, "rows": rows}


def headline(found: dict[str, Any]) -> dict[str, float]:
    """The figures of the last line."""
    rounds, rows = found["rounds"], found["rows"]
    equal = [each["hashes"] == found["undisturbed"]["hashes"] for each in rounds]
    return {
        "kills": len(rows),
        "resumed": sum(row["right"] for row in rows),
        "lost": sum(each["lost"] for each in rounds),
        "trained_twice": sum(each["trained_twice"] for each in rounds),
        "hash_equal": sum(equal) / len(equal),
    }


def main(words: list[str]) -> int:
    """Kill, audit, write, print; 1 if anything was lost, repeated or different."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner_kills")
    parser.add_argument("kills", type=int, nargs="?", default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/learner_kills"), help="the runs go there")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    args = parser.parse_args(words)
    session = results.begin("learner_kills", words, quick=args.kills < KILLS)
    found = measure(args.kills, args.seed, args.work.absolute())
    figures = headline(found)
    line = results.finish(
        session, figures, found["rows"], args.results,
        rounds=found["rounds"], undisturbed=found["undisturbed"],
        moments=Counter(row["moment"] for row in found["rows"]),
    )  # fmt: skip
    tables.update_if_committed(args.results)
    print(line, flush=True)
    clean = figures["resumed"] == figures["kills"] and not figures["lost"] + figures["trained_twice"]
    return (
        0 if clean and figures["hash_equal"] == 1 and not any(e["findings"] for e in found["rounds"]) else 1
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
