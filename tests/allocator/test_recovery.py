"""From a journal to the books: wherever it breaks off, and what is refused instead of guessed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Exit
from allocator.recovery import recover
from allocator.replay import replay
from allocator.rules.base import Decision, TreeView
from allocator.rules.random import RandomRule
from common.config_allocator import BudgetConfig, RuleConfig
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter, read_journal
from common.manifest import MANIFEST_FILE, Manifest, encode_manifest, entries_of, step_name
from common.messages import Bye, Committed, Heartbeat, TreeReady
from common.nouns import Version
from tests.allocator.harness import LEARNER, Rig, small
from tests.allocator.mortal import Mortal, maker, rig_of

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


# ----------------------------------------------------------------------------------- where it breaks off


def test_a_journal_cut_at_any_byte_is_taken_up(mortal: Mortal) -> None:
    """Cuts at, before and behind every record; whoever takes it up completes what the last input led to."""
    mortal.journal.close()
    journal = mortal.rundir.allocator_journal
    whole = journal.read_bytes()
    ends = [record.end for record in mortal.records()]
    for keep in sorted({end + by for end in ends for by in (-1, 0, 1, 9, 40) if end + by <= len(whole)}):
        journal.write_bytes(whole[:keep] + (b"\0" * 40 if keep % 3 == 0 else b""))
        found = recover(mortal.fresh, mortal.rundir)
        assert found.sound_to <= keep + 40 and found.boot == (found.sound_to > 8)
        with JournalWriter(journal, found.sound_to) as writer:
            found.begin(writer, found.now, run="run")
        assert found.core.audit() == [] and found.core.live_leases == 0
        assert replay(mortal.fresh(), read_journal(journal)) == []


def test_what_the_journal_lacks_of_the_last_input_is_written_before_anything_else(mortal: Mortal) -> None:
    records = mortal.records()
    ready = next(i for i, record in enumerate(records) if record.kind == "tree_ready")
    mortal.kill(keep=records[ready].offset)
    again = mortal.records()
    assert again[: ready + 1] == records[: ready + 1]
    assert [r.kind for r in again[ready : ready + 2]] == ["tree_ready", "tree_delivered"]
    begun = next(i for i, record in enumerate(again) if record.kind == "start" and i > 0)
    assert [r.kind for r in again[begun : begun + 2]] == ["start", "recovered"]


# ------------------------------------------------------------------------------------ damage and refusal


def test_damage_in_the_journal_behind_the_snapshot_stops_with_its_place(mortal: Mortal) -> None:
    mortal.snapshot()
    for _ in range(3):
        mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
    record = mortal.records("input")[-3]
    with mortal.rundir.allocator_journal.open("r+b") as file:
        file.seek(record.offset + 20)
        file.write(b"\xff\xff")
    with pytest.raises(StorageError, match=f"is damaged at byte {record.offset}"):
        mortal.kill()


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    mortal = Mortal(maker(small(decisive={"learner.batch_trees": "3", "seed": "0"})), tmp_path)
    mortal.fresh = maker(small(decisive={"learner.batch_trees": "4", "seed": "0"}))
    with pytest.raises(ConfigError, match=r"batch_trees must be 3, with which this run was begun, got 4"):
        mortal.kill(1.0)


def test_a_journal_that_leads_elsewhere_now_is_refused_with_the_place(mortal: Mortal) -> None:
    mortal.fresh = maker(small(steps=3), RuleConfig(), continuations=4)
    with pytest.raises(StorageError, match=r"use the release that began it \(at byte \d+"):
        mortal.kill()


def test_an_input_that_breaks_the_core_is_named_and_not_tried_for_ever(mortal: Mortal) -> None:
    class Stubborn(RandomRule):
        def decide(self, view: TreeView) -> Decision:
            raise RuntimeError("rule 'random' is at a loss")

    core = mortal.core
    mortal.fresh = lambda: AllocatorCore(
        core.state.settings, Stubborn(2, 1), make_budget(BudgetConfig(continuations=4))
    )
    with pytest.raises(
        StorageError, match=r"at byte \d+ of its journal the allocator fails: rule 'random' is at a loss"
    ):
        mortal.kill(core.state.now)


# -------------------------------------------------------------------------------- a run that is complete


def test_a_run_that_is_over_is_not_taken_up(mortal: Mortal, caplog: pytest.LogCaptureFixture) -> None:
    mortal.snapshot()
    mortal.handle(LEARNER, Bye(0, "done"), mortal.core.state.now)
    mortal.kill()
    assert mortal.core.ending == Exit(0, "the run is complete") and mortal.core.live_leases == 0
    mortal.end()
    with pytest.raises(StorageError, match="run has been trained already: resume="):
        mortal.kill()
    assert "snapshot" not in caplog.text, "it knows that from the newest one"


def to_the_end(folder: Path, steps: int) -> tuple[Rig, Mortal]:
    """A run of `steps` updates of two trees each, complete."""
    mortal = Mortal(maker(small(steps=steps, decisive={"learner.steps": str(steps)})), folder)
    rig = rig_of(mortal)
    train(rig, 0, steps)
    return rig, mortal


def train(rig: Rig, done: int, steps: int, process: str = "1") -> None:
    """The updates from `done` to `steps`, and the learner's goodbye; each process under another name."""
    learner = rig.learner(step=done, lineage=int(process) - 1, incarnation=process)
    rig.actor(actor := f"a/{process}")
    for step in range(done + 1, steps + 1):
        rig.work(actor)
        trees = [message.tree.id for message in rig.take(learner, TreeReady)]
        assert trees == [2 * step - 2, 2 * step - 1]
        rig.consume(trees, step, int(process) - 1, learner)
        rig.say(learner, Committed(Version(int(process) - 1, step), trees))
    rig.work(actor)
    rig.say(learner, Bye(0, "all steps are done"))


@pytest.mark.parametrize("snapshots", [0, 5])
def test_a_complete_run_goes_on_when_it_is_to_make_more_updates(tmp_path: Path, snapshots: int) -> None:
    rig, mortal = to_the_end(tmp_path, 2)
    assert mortal.core.ending is not None and mortal.core.state.delivery.opened == 4
    mortal.end()
    with pytest.raises(StorageError, match="has been trained already"):
        recover(mortal.fresh, mortal.rundir)
    begun = mortal.fresh
    for steps in (3, 5):
        more = begun().state.settings.changed({"learner.steps": str(steps)})
        mortal.fresh = maker(more)
        mortal.snapshot_every = snapshots
        saved(mortal, {3: 2, 5: 3}[steps])
        mortal.kill()
        assert mortal.core.ending is None and not mortal.recoveries[-1].fell_back
        train(rig, {3: 2, 5: 3}[steps], steps, process=str(steps))
        assert mortal.core.audit() == []
        assert mortal.core.state.delivery.committed == 2 * steps
    # A replay, under whichever number of updates, meets the changes where the processes made them.
    assert replay(begun(), mortal.records()) == replay(mortal.fresh(), mortal.records()) == []


def saved(mortal: Mortal, *steps: int) -> None:
    """The learner's checkpoints of these updates."""
    for step in steps:
        folder, files = mortal.rundir.checkpoints / step_name(step), {"model": bytes([step] * 9)}
        folder.mkdir(exist_ok=True)
        (folder / "model").write_bytes(files["model"])
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(2, step, entries_of(files))))


def damage(mortal: Mortal, step: int, how: str) -> None:
    folder = mortal.rundir.checkpoints / step_name(step)
    if how == "gone":
        shutil.rmtree(folder)
    else:
        (folder / "model").write_bytes(b"x" * (9 if how == "another byte" else 3))


@pytest.mark.parametrize("how", ["another byte", "too short", "gone"])
@pytest.mark.parametrize("snapshots, orderly", [(0, True), (5, True), (5, False)])
def test_a_complete_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    tmp_path: Path, how: str, snapshots: int, orderly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The learner falls back to update 2, and so does the allocator: trees 4 and 5 are lost with the
    checkpoint of update 3 and no others; 6 and 7 take their slots. It is killed once more on the way."""
    rig, mortal = to_the_end(tmp_path, 3)
    mortal.snapshot_every = snapshots
    saved(mortal, 1, 2, 3)
    if orderly:
        mortal.end()
        with pytest.raises(StorageError, match="has been trained already"):
            recover(mortal.fresh, mortal.rundir)
    damage(mortal, 3, how)
    mortal.kill()
    assert mortal.core.ending is None and "newest sound checkpoint is of update 2 of 3" in caplog.text
    rig.learner(step=2, lineage=1, incarnation="2")
    mortal.kill()  # it knows where it was, without asking the disk again
    assert mortal.core.ending is None and not mortal.recoveries[-1].fell_back
    learner = rig.learner(step=2, lineage=1, incarnation="2")
    rig.actor("a/2")
    rig.work("a/2")
    assert [message.tree.id for message in rig.take(learner, TreeReady)] == [6, 7]
    rig.consume([6, 7], 3, 1, learner)
    rig.say(learner, Committed(Version(1, 3), [6, 7]))
    rig.work("a/2")
    rig.say(learner, Bye(0, "all steps are done"))
    assert mortal.core.audit() == [] and mortal.core.state.delivery.committed == 6
    records = mortal.records()
    lost = [r.fields for r in records if r.kind == "tree_dropped"]
    assert [(f["tree"], f["reason"]) for f in lost] == [(4, "checkpoint_lost"), (5, "checkpoint_lost")]
    assert [r.fields.get("fell_back", False) for r in records if r.kind == "start"] == [False, True, False]
    assert replay(mortal.fresh(), records) == []
    saved(mortal, 3)
    mortal.end()
    with pytest.raises(StorageError, match="has been trained already"):
        recover(mortal.fresh, mortal.rundir)


@pytest.mark.parametrize("steps", [(), (2,)], ids=["none is seen here", "all that are here are damaged"])
def test_a_complete_run_without_any_sound_checkpoint_stays_complete(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    """They may be on another machine; and from damaged ones nobody can go on."""
    _, mortal = to_the_end(tmp_path, 2)
    mortal.end()
    saved(mortal, *steps)
    for step in steps:
        damage(mortal, step, "too short")
    with pytest.raises(StorageError, match="has been trained already"):
        recover(mortal.fresh, mortal.rundir)


def test_a_run_is_not_taken_up_with_fewer_updates(tmp_path: Path) -> None:
    _, mortal = to_the_end(tmp_path, 2)
    mortal.fresh = maker(mortal.core.state.settings.changed({"learner.steps": "1"}))
    with pytest.raises(ConfigError, match=r"learner\.steps must be 2 or more.*got 1"):
        mortal.kill(1.0)


def test_waits_may_change_between_two_processes(tmp_path: Path) -> None:
    settings = small(decisive={"cluster.dead_after_s": "10.0"})
    mortal = Mortal(maker(settings), tmp_path)
    mortal.fresh = maker(settings.changed({"cluster.dead_after_s": "25.0"}))
    mortal.kill(1.0)
    assert mortal.core.state.settings.dead_after_s == mortal.core.state.delivery.settings.dead_after_s == 25.0
    starts = [record.fields["settings"] for record in mortal.records("start")]
    assert [each["cluster.dead_after_s"] for each in starts] == ["10.0", "25.0"]
