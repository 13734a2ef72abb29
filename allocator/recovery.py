"""Taking up a run whose allocator died, or was stopped: its books come back from its journal.

    newest sound snapshot ─▶ thaw ─▶ replay the journal's tail ─▶ Recovery ─▶ the loop: begin ─▶ serve
        damaged, or no way from it to where the journal goes? said loudly, then the one before, then the
        whole journal; that failing, the run is not taken up

What was confirmed as durable is in the journal, and what was sent was written before; so the books after the
last record are those of the dead process, but for what it had read and not written, which its senders repeat.
`begin` writes what the last input still led to (the journal may break off within that), then `start`, then
`recovered`, then what comes of the restart: every live lease fenced (`door.restart`). A replay of the whole
journal meets `recovered` where this process did, and does the same. All of it is synced before anyone is
spoken to.

A run that was complete is over, unless the checkpoint that it was complete by is damaged or gone: the learner
would go back to the one before it, and the two must agree where the run is. Then the run goes on. It is noted
in `start`, as all that a replay must know; the rest is what any learner brings about that comes back from an
older checkpoint (`Delivery.rejoin`): its hello names the update, the trees of later ones, which the allocator
has forgotten, are dropped as `checkpoint_lost`, and other trees are grown in their slots. So none is lost
without a reason, and none that is inside the surviving weights is trained again. To refuse would leave the
work of the sound checkpoint to new runs only. What lies on disk here decides: where no checkpoint is seen at
all (they are another machine's), a complete run stays complete.

The core's clock goes on: monotonic time is one for all processes of a machine until it is booted; where it is
behind the journal's, as after that, it is shifted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allocator.core import AllocatorCore
from allocator.replay import Replay
from allocator.settings import CHANGEABLE, Settings, code_of_decisions
from allocator.snapshot import thaw
from allocator.snapshots import Snapshot, newest_first, read_snapshot
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter, Record, read_journal
from common.logs import fields
from common.manifest import last_step
from common.opening import already_trained
from common.rundir import RunDir

LOG = logging.getLogger("treeward.allocator")


@dataclass(slots=True)
class Recovery:
    """The books of a run at the end of its journal, and what is known about them."""

    core: AllocatorCore
    wanted: Settings = field(default_factory=Settings)
    """Of this process. What may change of them counts from `begin` on."""
    boot: int = 0
    """Which process of the allocator goes on with them: the first is 0."""
    inputs: int = 0
    """In the whole journal."""
    replayed: int = 0
    """Of those, behind the snapshot."""
    snapshot: str = ""
    """File it began with; empty = with the first record."""
    sound_to: int = 0
    """Where the journal's last sound record ends."""
    now: float = 0.0
    """The core's clock there."""
    unwritten: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """What the last input led to and the journal lacks."""
    over: bool = False
    """Whether the run is complete, and the journal closed."""
    fell_back: bool = False
    """Whether it was complete, by a checkpoint that is damaged or gone: it goes on, and is not over."""
    began: float = field(default_factory=time.perf_counter)

    def begin(self, journal: JournalWriter, now: float, **start: Any) -> None:
        """Write that another process goes on, fence what was out, and sync.

        Args:
            journal: of the run, opened at `sound_to`.
            now: the core's clock.
            start: fields of the `start` record.
        """
        for kind, values in self.unwritten:
            journal.append(kind, **values)
        core = self.core
        core.adopt(self.wanted.decisive, fell_back=self.fell_back)
        decided_by = {"settings": core.state.settings.decisive, "code": code_of_decisions()}
        again = {"fell_back": True} if self.fell_back else {}
        journal.append("start", boot=self.boot, now=now, **decided_by, **again, **start)
        if self.boot:
            live = core.live_leases
            core.restart(self.boot, now)
            seconds = time.perf_counter() - self.began
            journal.append(
                "recovered",
                boot=self.boot, now=now, seconds=seconds, inputs=self.inputs, replayed=self.replayed,
                snapshot=self.snapshot, fenced=live,
            )  # fmt: skip
            for kind, values in core.take_records():
                journal.append(kind, **values)
            LOG.info(
                "taken up after %d inputs in %.2f s, %d of them replayed: %d leases fenced, %d trees open",
                self.inputs, seconds, self.replayed, live, core.open_trees, extra=fields("recovered"),
            )  # fmt: skip
        journal.flush(sync=True)


def recover(fresh: Callable[[], AllocatorCore], rundir: RunDir) -> Recovery:
    """The books that the journal of a run leads to; fresh ones where nothing was written yet.

    Args:
        fresh: makes a core of the run's settings that nothing has happened to.
        rundir: of the run; nobody else may write there.

    Raises:
        StorageError: the run is over, or its journal is damaged, cut, or leads elsewhere under this release.
        ConfigError: it was begun with other settings.
    """
    began = time.perf_counter()
    journal = rundir.allocator_journal
    _refuse_cut(rundir)
    if not journal.is_file() or next(read_journal(journal), None) is None:
        return Recovery(fresh(), began=began)
    for snapshot in _snapshots(rundir):
        try:
            found = _follow(fresh(), journal, snapshot)
        except StorageError as error:
            if snapshot is None:
                raise
            LOG.error("%s; an older snapshot is used", error, extra=fields("snapshot_refused"))
            continue
        _look_for_its_last_checkpoint(found, rundir)
        if found.over:
            raise already_trained(rundir.path)
        _refuse_fewer(found)
        found.began = began
        return found
    raise AssertionError("the whole journal comes last")


def _refuse_cut(rundir: RunDir) -> None:
    """A journal is synced before a snapshot of it is taken: one that is shorter has lost what was promised.

    Raises:
        StorageError: it is shorter, or gone.
    """
    journal, newest = rundir.allocator_journal, next(iter(newest_first(rundir.allocator_snapshots)), None)
    held = journal.stat().st_size if journal.is_file() else 0
    if newest is not None and int(newest.stem) > held:
        raise StorageError(
            f"{journal} must hold at least the {int(newest.stem)} bytes that it held when the snapshot "
            f"{newest.name} was taken, got {held}: it was cut or removed; put it back from a copy, or begin "
            "a new run"
        )


def _look_for_its_last_checkpoint(found: Recovery, rundir: RunDir) -> None:
    """A run that is complete goes on if the learner will come back from an earlier update."""
    ending, steps = found.core.ending, found.core.state.settings.steps
    if ending is None or ending.code:
        return
    reached = last_step(rundir.checkpoints)
    if reached is not None and reached < steps:
        found.fell_back, found.over = True, False
        LOG.error(
            "the run was complete, but its newest sound checkpoint is of update %d of %d: it goes on from "
            "there, with other trees for the updates that are lost",
            reached, steps, extra=fields("fell_back", reached=reached),
        )  # fmt: skip


def _snapshots(rundir: RunDir) -> Iterator[Snapshot | None]:
    """Those that can be read, newest first, then None: begin with the first record."""
    for left in rundir.allocator_snapshots.glob(".*.tmp"):
        left.unlink()  # of a process that died while it wrote one
    for path in newest_first(rundir.allocator_snapshots):
        try:
            snapshot = read_snapshot(path)
            if snapshot.run != rundir.id:
                whose = f"run {snapshot.run!r}, in the directory of {rundir.id!r}: was it renamed?"
                raise StorageError(f"the snapshot {path} is of {whose}")
            yield snapshot
        except StorageError as error:
            LOG.error("%s; what came before it is used", error, extra=fields("snapshot_refused"))
    yield None


def _follow(core: AllocatorCore, journal: Path, snapshot: Snapshot | None) -> Recovery:
    """From a snapshot to the end of the journal.

    Raises:
        StorageError: the journal is damaged, or records other decisions than are made.
        ConfigError: the run was begun with other settings.
    """
    wanted = core.state.settings
    found = Recovery(core, wanted, boot=1)
    if snapshot is not None:
        check_settings(core, snapshot.settings)
        thaw(core, snapshot.books)
        core.adopt(snapshot.settings)
        found.snapshot = f"{snapshot.offset:016d}"
        found.boot, found.inputs, found.now = snapshot.boot + 1, snapshot.inputs, snapshot.now
    replay, record = Replay(core), None
    found.sound_to = snapshot.offset if snapshot is not None else 0
    for record in read_journal(journal, found.sound_to):
        _feed(replay, record)
        if record.kind == "start":
            found.boot = record.fields.get("boot", 0) + 1
        found.now = max(found.now, record.fields.get("now", 0.0) if record.kind != "usage" else 0.0)
        found.sound_to = record.end
    more = wanted.steps > core.state.settings.steps
    complete = core.ending is not None and not core.ending.code and not more
    found.over = complete and record is not None and record.kind == "end"
    found.unwritten = replay.outstanding()
    found.replayed = replay.inputs
    found.inputs += replay.inputs
    return found


def _feed(replay: Replay, record: Record) -> None:
    if record.kind == "start" and "settings" in record.fields:
        check_settings(replay.core, record.fields["settings"])
    try:
        replay.feed(record)
    except RuntimeError as error:
        raise StorageError(
            f"the run cannot be taken up: at byte {record.offset} of its journal the allocator fails: {error}"
        ) from error
    if replay.differing:
        raise StorageError(
            "the run cannot be taken up: under this release its journal leads to other decisions than it "
            f"records; use the release that began it ({replay.differences[0]})"
        )


def _refuse_fewer(found: Recovery) -> None:
    """Raise `ConfigError` where the run was begun for more updates: their trees may be open."""
    here, begun = found.wanted.steps, found.core.state.settings.steps
    if here < begun:
        raise ConfigError(f"learner.steps must be {begun} or more, for which this run was begun, got {here}")


def check_settings(core: AllocatorCore, begun: dict[str, str]) -> None:
    """Raise `ConfigError` naming the first setting that decisions depend on and that has changed, though it
    must not. Updates may only become more."""
    here = core.state.settings.decisive
    for key in sorted({*begun, *here}):
        if begun.get(key) != here.get(key) and key not in CHANGEABLE:
            was, now = begun.get(key, "missing"), here.get(key, "missing")
            raise ConfigError(
                f"{key} must be {was}, with which this run was begun, got {now}: decisions were made under it"
            )
