"""Where a run starts from: which version, and what it knows of the lineages before it."""

from pathlib import Path

import msgpack
import msgspec
import pytest

from common.config import Config, config_hash
from common.journal import JournalWriter
from common.nouns import Version
from common.rundir import RunDir
from learner.checkpoint import save_checkpoint
from learner.policy import build_model, model_files
from learner.rows import Clock
from learner.start import resumed_at, start_run
from learner.state import RunState, capture_random, decode_state, encode_state
from learner.update import make_optimizer
from learner.warmstart import save_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, learner_config

CONFIG = Config(learner=learner_config())


def state(lineage: int, step: int, resumed: tuple[int, ...] = ()) -> RunState:
    return RunState(
        lineage=lineage, step=step, trained=[], config_hash=config_hash(CONFIG), random=capture_random(),
        resumed=list(resumed),
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
    optimizer = make_optimizer(model, CONFIG.learner.optimizer)
    save_checkpoint(rundir.checkpoints, saved, model, optimizer, TOKENIZER, keep=2)


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
