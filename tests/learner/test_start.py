"""Where a run starts from: which version, and what it knows of the lineages before it."""

from pathlib import Path

import msgpack
import msgspec
import pytest

from common.audit_books import read_learner
from common.config import Config, config_hash
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter, read_journal
from common.nouns import Version
from common.rundir import RunDir
from learner.backend.alone import alone
from learner.checkpoint import save_checkpoint
from learner.policy import build_model, model_files
from learner.rows import Clock
from learner.start import left_behind, origin_of, resumed_at, start_run
from learner.state import Origin, RunState, capture_random, decode_state, encode_state
from learner.warmstart import save_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, learner_config

CONFIG = Config(learner=learner_config())


def state(lineage: int, step: int, resumed: tuple[int, ...] = (), origin: Origin = Origin()) -> RunState:  # noqa: B008 - immutable
    return RunState(
        lineage=lineage, step=step, trained=[], config_hash=config_hash(CONFIG), random=capture_random(),
        resumed=list(resumed), origin=origin,
    )  # fmt: skip


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir.create(tmp_path, "run")
    save_model(found.warmstart_model, model_files(build_model(SMALL_MODEL, TOKENIZER, seed=1), TOKENIZER))
    return found


def write_down(rundir: RunDir, *starts: tuple[int, int]) -> None:
    """Starts of the learner, as (lineage, step), in its journal."""
    with JournalWriter(rundir.learner_journal) as journal:
        for lineage, step in starts:
            journal.append("start", incarnation="learner/x", lineage=lineage, step=step)


def save(rundir: RunDir, saved: RunState) -> None:
    model = build_model(SMALL_MODEL, TOKENIZER, seed=2)
    files = {**model_files(model, TOKENIZER), **alone(model, CONFIG.learner).state_files()}
    save_checkpoint(rundir.checkpoints, saved, files, keep=2)


def test_a_fresh_run_begins_lineage_0_at_0(rundir: RunDir) -> None:
    start = start_run(CONFIG, rundir)
    assert (start.version, start.resumed_at) == (Version(0, 0), (0,))


def test_starts_that_saved_nothing_took_their_lineage_with_them(rundir: RunDir) -> None:
    write_down(rundir, (0, 0), (1, 0))
    start = start_run(CONFIG, rundir)
    assert (start.version, start.resumed_at) == (Version(2, 0), (0, 0, 0))


def test_a_second_restart_knows_where_the_first_one_began(rundir: RunDir) -> None:
    write_down(rundir, (0, 0), (1, 5))
    save(rundir, state(1, 8, (0, 5)))
    start = start_run(CONFIG, rundir)
    assert (start.version, start.resumed_at) == (Version(2, 8), (0, 5, 8))
    clock = Clock(start.version, 4, start.resumed_at)
    assert clock.lag(Version(0, 7)) > 1 << 32, "lineage 0 was left behind at step 5"
    assert (clock.lag(Version(0, 5)), clock.lag(Version(1, 7))) == (3, 1)


def test_a_lineage_that_saved_nothing_is_known_from_the_journal() -> None:
    starts = {0: 0, 1: 8}
    assert resumed_at(state(0, 8, (0,)), Version(2, 8), starts) == (0, 8, 8)


def test_a_checkpoint_from_before_lineages_were_kept_trusts_the_journal_and_nothing_else() -> None:
    assert resumed_at(state(1, 8), Version(2, 8), {0: 0, 1: 5}) == (0, 5, 8)
    assert resumed_at(state(1, 8), Version(2, 8), {}) == (0, 0, 8)


def test_a_checkpoint_put_back_by_hand_is_not_taken_for_a_later_lineage_that_began_below_it() -> None:
    # Lineage 0 saved step 10; lineage 1 began at 8 without it; then the copy of step 10 was put back.
    clock = Clock(Version(2, 10), 9, resumed_at(state(0, 10, (0,)), Version(2, 10), {0: 0, 1: 8}))
    assert clock.lag(Version(1, 9)) > 1 << 32
    assert clock.lag(Version(0, 8)) == 2


def test_a_state_keeps_its_lineages_and_one_without_them_is_read() -> None:
    kept = state(1, 8, (0, 5))
    assert decode_state(encode_state(kept)).resumed == [0, 5]
    plain = msgspec.to_builtins(kept, builtin_types=(bytes,))
    del plain["resumed"]
    assert decode_state(msgpack.packb(plain)).resumed == []


# ------------------------------------------------------------------------------- what is said, and refused


def write(rundir: RunDir, *entries: tuple[str, dict[str, object]]) -> None:
    with JournalWriter(rundir.learner_journal) as journal:
        for kind, fields in entries:
            journal.append(kind, **fields)


def consumed(trees: list[int], step: int) -> tuple[str, dict[str, object]]:
    return "consumed", dict(trees=trees, lineage=0, step=step, tokens_trained=1, tokens_context=0)


def test_what_was_beyond_the_checkpoint_is_counted_by_whether_it_comes_again(rundir: RunDir) -> None:
    write(
        rundir,
        ("start", dict(incarnation="learner/x", lineage=0, step=0)),
        *(("received", dict(tree=tree, tokens=1)) for tree in range(8)),
        consumed([0, 1], 1),
        ("committed", dict(lineage=0, step=1)),
        consumed([2, 3], 2),
        ("committed", dict(lineage=0, step=2)),
        consumed([4, 5], 3),
        ("dropped", dict(tree=6, reason="stale", tokens=1)),
    )
    book = read_learner(read_journal(rundir.learner_journal))
    assert left_behind(book, 2) == (3, 0), "trees 4 and 5 of an update that was not saved, and 7 that waited"
    assert left_behind(book, 1) == (3, 2), "2 and 3 were in the checkpoint that is gone"


def test_resuming_says_in_one_line_where_and_what_comes_again(rundir: RunDir, caplog) -> None:
    write_down(rundir, (0, 0))
    write(rundir, ("received", dict(tree=0, tokens=1)))
    save(rundir, state(0, 8, (0,)))
    start_run(CONFIG, rundir)
    # As a set: where another test has set up the logs of a role, two handlers hear the same record.
    said = {record.getMessage() for record in caplog.records if record.name == "treeward.learner"}
    assert said == {
        "resumed at step 8 as lineage 1 from step-00000008 (of an earlier release), 0 trees inside: "
        "1 trees to be replayed, 0 dropped"
    }


def test_the_origin_names_settings_packages_and_the_mlflow_run(rundir: RunDir) -> None:
    rundir.write_json_atomic(
        rundir.tracking / "mlflow.json", {"run_id": "abc", "uri": "u", "experiment": "e"}
    )
    origin = origin_of(CONFIG, rundir)
    assert origin.mlflow_run == "abc" and origin.config["learner"]["batch_trees"] == 4
    assert {"python", "torch"} <= origin.packages.keys()
    save(rundir, state(0, 8, (0,), origin))
    assert start_run(CONFIG, rundir).version == Version(1, 8), "as it was saved, so it is taken up"


def test_settings_that_a_checkpoint_was_not_made_with_are_all_named(rundir: RunDir) -> None:
    begun = Config(seed=3, learner=learner_config(batch_trees=8, steps=9, checkpoint_every=7))
    save(rundir, state(0, 8, (0,), origin_of(begun, rundir)))
    with pytest.raises(ConfigError) as raised:
        start_run(CONFIG, rundir)
    said = str(raised.value)
    assert "seed must be 3, got 0; learner.steps must be 9 or more, got 3; " in said
    assert "learner.batch_trees must be 8, got 4" in said and "checkpoint_every" not in said


def test_a_checkpoint_of_another_run_is_refused_and_left_where_it_lies(
    tmp_path: Path, rundir: RunDir
) -> None:
    other = RunDir.create(tmp_path / "elsewhere", "other")
    save(rundir, state(0, 8, (0,), origin_of(CONFIG, other)))
    with pytest.raises(StorageError, match=r"is of another run \(other of .*; this one is run of ") as raised:
        start_run(CONFIG, rundir)
    assert raised.value.exit_code == 4 and (rundir.checkpoints / "step-00000008").is_dir()


def test_a_run_that_was_renamed_keeps_its_checkpoints(tmp_path: Path, rundir: RunDir) -> None:
    save(rundir, state(0, 8, (0,), origin_of(CONFIG, rundir)))
    moved = RunDir.open(rundir.path.rename(tmp_path / "moved"))
    assert moved.born == origin_of(CONFIG, moved).run != ""
    assert start_run(CONFIG, moved).version == Version(1, 8)
