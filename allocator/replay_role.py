"""`role=replay`: would the allocator decide again as it did, and why was an anchor chosen?

    journal ─▶ replay (a fresh core) ─▶ differences ─▶ last line: replay: inputs=… decisions=… differences=…
                 └─ node= ─▶ Explainer ─▶ Explanation ─▶ table

It only reads: the run may still be going, or be kept on a disk that cannot be written.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from allocator.core import AllocatorCore
from allocator.explain import Explainer
from allocator.explain_text import lines
from allocator.explanation import Explanation
from allocator.replay import Replay
from allocator.settings import CHANGEABLE, GC_THRESHOLD, code_of_decisions
from common.config import Config, to_plain
from common.errors import ConfigError, StorageError
from common.journal import Record, read_journal
from common.nouns import NodeId
from common.opening import shown
from common.rundir import RunDir, write_json_atomic

SHOWN = 5
"""Differences that are printed: behind the first one, most others follow from it."""
RANGES = 12
"""Runs of tree numbers that a sentence lists."""


@dataclass(slots=True)
class Report:
    """What a replay found."""

    replay: Replay
    notes: list[str] = field(default_factory=list)
    """What else the person should know before they believe it."""
    explanation: Explanation | None = None
    failure: str = ""
    """Why the replay could not go on."""

    @property
    def differences(self) -> int:
        return self.replay.differing + bool(self.failure)

    def last_line(self) -> str:
        replay = self.replay
        return f"replay: inputs={replay.inputs} decisions={replay.decisions} differences={self.differences}"

    def sentences(self) -> list[str]:
        """The first differences, how many more there are, and what stopped the replay."""
        found = self.replay.differences[:SHOWN]
        more = self.replay.differing - len(found)
        return [*found, *([f"and {more} more"] if more else []), *([self.failure] if self.failure else [])]


def run_replay(config: Config, rundir: RunDir) -> int:
    """Print what the replay found; 0 if it decided as the allocator did, else 1.

    Raises:
        ConfigError: `node=` names no node of a finished tree.
        StorageError: the journal is missing, damaged, or of another release.
    """
    gc.set_threshold(*GC_THRESHOLD)
    # Not `rundir.allocator_journal`, which makes the folder where there is none.
    path = rundir.path / "allocator" / "journal.tw"
    if not path.is_file():
        raise StorageError(
            f"there is no {shown(path)}: the run has no allocator journal, so nothing to replay"
        )
    if next(read_journal(path), None) is None:
        raise StorageError(
            f"{shown(path)} holds no record: nothing was decided yet, or the journal was emptied"
        )
    wanted = config.replay.wanted()
    core = AllocatorCore.from_config(config, rundir.id)
    report = explain_node(core, path, wanted) if wanted else replay_all(core, path)
    _print(config, rundir, report)
    if config.replay.json:
        write_json_atomic(Path(config.replay.json), as_json(config, rundir, report))
    return 1 if report.differences else 0


def replay_all(core: AllocatorCore, path: Path) -> Report:
    """The whole journal."""
    report = Report(Replay(core))
    for record in read_journal(path):
        if not _feed(report, record):
            return report
    report.replay.finish()
    if report.replay.unwritten:
        report.notes.append(
            f"the journal breaks off: {report.replay.unwritten} records that its last input leads to are not "
            "in it"
        )
    return report


def explain_node(core: AllocatorCore, path: Path, wanted: tuple[int, int]) -> Report:
    """The journal up to the end of the tree whose node is to be explained.

    Raises:
        ConfigError: there is no such node, or its tree is not finished.
    """
    tree, node = wanted
    check_tree(fates(read_journal(path)), tree)
    explainer, report = Explainer(core.state.forest, {tree}), Report(Replay(core))
    for record in read_journal(path):
        explainer.starting(*_started(record))
        if not _feed(report, record) or _closes(record, tree):
            report.notes.append(f"the journal was replayed up to the end of tree {tree}, not beyond")
            break
    size = explainer.finished(tree)
    if size is None:
        report.failure = report.failure or f"tree {tree} was finished in the run, and is not in the replay"
    elif node >= size:
        got = NodeId(tree, node)
        raise ConfigError(f"replay.node must be one of nodes 0 to {size - 1} of tree {tree}, got {got}")
    else:
        report.explanation = explainer.explain(tree, node)
    if report.differences:
        report.notes.append("the replay left the path of the run: what it explains may not be what happened")
    return report


def _feed(report: Report, record: Record) -> bool:
    """False when the core cannot go on: it met what its rule or books call impossible."""
    if record.kind == "start":
        notes = differing_start(report.replay.core, record)
        report.notes += [note for note in notes if note not in report.notes]
    try:
        report.replay.feed(record)
    except RuntimeError as error:
        report.failure = f"at byte {record.offset} the replay fails: {error}"
    return not report.failure


def _started(record: Record) -> tuple[int, int]:
    """(tree, continuation) that an actor says it begins with; no such ones for any other record."""
    message = record.fields.get("message") if record.kind == "input" else None
    lease = message.get("lease") if isinstance(message, dict) and message.get("type") == "Starting" else None
    return (lease.get("tree", -1), lease.get("number", -1)) if isinstance(lease, dict) else (-1, -1)


def _closes(record: Record, tree: int) -> bool:
    return record.kind == "tree_ready" and record.fields.get("tree") == tree


def differing_start(core: AllocatorCore, record: Record) -> list[str]:
    """Whether the allocator that wrote this start had other settings, or other code, than this replay."""
    was, now = record.fields.get("settings"), core.state.settings.decisive
    if was is None:
        return ["the journal does not say with which settings it was made: another release wrote it"]
    found = [
        f"{key} is {now.get(key, 'missing')} here and was {was.get(key, 'missing')} when the allocator ran"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key) and key not in CHANGEABLE
    ]
    if record.fields.get("code") != code_of_decisions():
        found.append("the code of allocator/ and common/ is not what it was when the allocator ran")
    return found


# ------------------------------------------------------------------------------------- which node is meant


def fates(records: Iterable[Record]) -> dict[int, str]:
    """What became of each tree: `open`, `finished`, or why it was dropped before it was."""
    found: dict[int, str] = {}
    for record in records:
        tree = record.fields.get("tree", -1)
        match record.kind:
            case "tree_opened":
                found[tree] = "open"
            case "tree_ready":
                found[tree] = "finished"
            case "tree_dropped" if found.get(tree) == "open":
                found[tree] = f"dropped ({record.fields.get('reason')})"
    return found


def check_tree(found: Mapping[int, str], tree: int) -> None:
    """Raise `ConfigError` unless the tree is finished in the journal."""
    fate = found.get(tree)
    if fate == "finished":
        return
    what = {None: "is not in the journal", "open": "is not finished in the journal"}.get(fate, f"was {fate}")
    finished = [number for number in sorted(found) if found[number] == "finished"]
    valid = f"the finished trees are {ranges(finished)}" if finished else "none is finished yet"
    raise ConfigError(f"replay.node must be in a finished tree: tree {tree} {what}; {valid}")


def ranges(numbers: Iterable[int]) -> str:
    """`0 to 4, 6, 8 to 9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [f"{first} to {last}" if last > first else str(first) for first, last in runs]
    return ", ".join(told if len(told) <= RANGES else [*told[: RANGES - 1], "…", told[-1]])


# ----------------------------------------------------------------------------------------------- what is said


def header(config: Config, rundir: RunDir) -> str:
    """The choices of the run that decide, on one line."""
    chosen = config.allocator
    return (
        f"run {rundir.id}: rule {described(chosen.rule)}, budget {described(chosen.budget)}, "
        f"predictor {chosen.predictor.name}, D = {chosen.max_score_staleness}"
    )


def described(section: Any) -> str:
    """`random (chains 2, expansions 2)`."""
    values = dict(to_plain(section))
    name = values.pop("name")
    settings = ", ".join(f"{key} {value}" for key, value in values.items())
    return f"{name} ({settings})" if settings else str(name)


def _print(config: Config, rundir: RunDir, report: Report) -> None:
    print(header(config, rundir))
    if report.explanation is not None:
        print()
        for line in lines(report.explanation):
            print(line)
        print()
    for note in report.notes:
        print(f"note: {note}")
    for sentence in report.sentences():
        print(f"difference: {sentence}")
    print(report.last_line(), flush=True)


def as_json(config: Config, rundir: RunDir, report: Report) -> dict[str, Any]:
    """The same for programs. Numbers that are not finite are told by name, as in "inf"."""
    allocator = to_plain(config.allocator)
    found = {
        "run": rundir.id,
        **{section: allocator[section] for section in ("rule", "budget", "predictor")},
        "inputs": report.replay.inputs,
        "decisions": report.replay.decisions,
        "differing": report.differences,
        "differences": report.sentences(),
        "notes": report.notes,
        "explanation": msgspec.to_builtins(report.explanation),
    }
    return dict(_finite(found))


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
