"""The whole learner over real sockets, against a tiny allocator that feeds synthetic trees."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import ClusterConfig, Config, EngineConfig, TrackingConfig, config_hash
from common.config_learner import CreditConfig, LossConfig, OptimizerConfig
from common.errors import PeerLost, ProtocolError, StorageError
from common.journal import read_journal
from common.messages import Bye, Committed, Consumed, Credit
from common.nouns import Tree, Version
from common.rundir import RunDir
from learner import main as module
from learner.backend.alone import alone
from learner.checkpoint import list_checkpoints, newest_checkpoint, save_checkpoint
from learner.main import run_learner
from learner.policy import build_model, load_model, model_files
from learner.state import RunState, capture_random, from_ranges
from learner.warmstart import save_model
from tests.learner.fake_allocator import FakeAllocator
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, flat_tree, learner_config

BATCH = 2
NOWHERE = "tcp://127.0.0.1:9"


def make(tree_id: int, version: Version) -> Tree:
    return flat_tree(tree_id, np.random.default_rng(tree_id), version=version, rewards=[1.0, 0.0, 0.0, 1.0])


@pytest.fixture
def rundir(tmp_path) -> RunDir:
    found = RunDir.create(tmp_path, "run")
    save_model(found.warmstart_model, model_files(build_model(SMALL_MODEL, TOKENIZER, seed=1), TOKENIZER))
    return found


def config(allocator: str, **learner) -> Config:
    settings = dict(steps=3, batch_trees=BATCH, max_policy_lag=1, checkpoint_every=2)
    return Config(
        cluster=ClusterConfig(
            allocator=allocator, weights="tcp://127.0.0.1:0", hints="tcp://127.0.0.1:0",
            heartbeat_s=0.2, dead_after_s=2.0, connect_timeout_s=15.0,
        ),
        tracking=TrackingConfig(enabled=False),
        engine=EngineConfig(temperature=0.9),
        learner=learner_config(**{**settings, **learner}),
    )  # fmt: skip


def run(settings: Config, rundir: RunDir, **allocator):
    """One run to its end: (exit code, the allocator with what it was told)."""
    with FakeAllocator(make, **{"ahead": 2 * BATCH, "run": rundir.id, **allocator}) as fake:
        settings.cluster.allocator = fake.endpoint
        return run_learner(settings, rundir), fake


def test_a_learner_of_another_run_leaves_the_allocator_alone(rundir):
    with pytest.raises(ProtocolError, match="serves run 'elsewhere', this learner belongs to 'run'"):
        run(config(NOWHERE, steps=1), rundir, run="elsewhere")


def weights(path: Path) -> list[torch.Tensor]:
    return list(load_model(path).parameters())


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def records(rundir: RunDir, kind: str) -> list[dict]:
    return [record.fields for record in read_journal(rundir.learner_journal) if record.kind == kind]


def test_a_run_trains_its_steps_and_accounts_for_every_tree(rundir):
    code, allocator = run(config(NOWHERE), rundir)
    assert code == 0
    # Every update is told once, in order, with the version it made.
    told = allocator.of(Consumed)
    assert [message.version for message in told] == [Version(lineage=0, step=step) for step in (1, 2, 3)]
    assert [len(message.trees) for message in told] == [BATCH] * 3
    assert max(allocator.consumed.values()) == max(allocator.committed.values()) == 1
    assert set(allocator.consumed) == set(allocator.committed)
    assert allocator.of(Bye) == [Bye(0, "all 3 steps are done")]
    # The weights changed, and the newest checkpoint holds them with the trees inside.
    assert [path.name for path in list_checkpoints(rundir.checkpoints)] == ["step-00000002", "step-00000003"]
    found = newest_checkpoint(rundir.checkpoints)
    assert not same(found.path, rundir.warmstart_model)
    assert set(from_ranges(found.state.trained)) == set(allocator.consumed)


def test_the_journal_accounts_for_trees_and_tokens(rundir):
    _, allocator = run(config(NOWHERE), rundir)
    received = {record["tree"]: record["tokens"] for record in records(rundir, "received")}
    consumed = records(rundir, "consumed")
    trained = [tree for record in consumed for tree in record["trees"]]
    dropped = {record["tree"] for record in records(rundir, "dropped")}
    (end,) = records(rundir, "end")
    assert (
        sorted([*trained, *dropped, *end["queued"]]) == sorted(received) == sorted(allocator.times_delivered)
    )
    for record in consumed:
        tokens = sum(received[tree] for tree in record["trees"])
        parts = record["tokens_trained"], record["tokens_no_contrast"], record["tokens_context"]
        assert sum(parts) == tokens
    assert [record["step"] for record in records(rundir, "committed")] == [0, 2, 3]
    assert records(rundir, "start")[0]["step"] == 0


def test_tokens_of_trees_without_contrast_are_on_record_as_such_and_not_as_trained(rundir):
    def make_some_uniform(tree_id: int, version: Version) -> Tree:
        rewards = [1.0] * 4 if tree_id % 2 else [1.0, 0.0, 0.0, 1.0]
        return flat_tree(tree_id, np.random.default_rng(tree_id), version=version, rewards=rewards)

    with FakeAllocator(make_some_uniform, ahead=2 * BATCH) as allocator:
        settings = config(allocator.endpoint, steps=2, credit=CreditConfig(name="grpo"))
        assert run_learner(settings, rundir) == 0
    received = {record["tree"]: record["tokens"] for record in records(rundir, "received")}
    for record in records(rundir, "consumed"):
        uniform = sum(received[tree] for tree in record["trees"] if tree % 2)
        mixed = sum(received[tree] for tree in record["trees"] if tree % 2 == 0)
        assert (record["tokens_no_contrast"], record["tokens_trained"]) == (uniform, mixed)


def test_a_gradient_that_is_not_finite_in_one_part_of_a_batch_is_told_as_that(rundir, capfd):
    def make_one_absurd(tree_id: int, version: Version) -> Tree:
        rewards = [3e38 if tree_id == 0 else 1.0, 0.0, 0.0, 1.0]
        return flat_tree(tree_id, np.random.default_rng(tree_id), version=version, rewards=rewards)

    with FakeAllocator(make_one_absurd, ahead=BATCH) as allocator:
        settings = config(allocator.endpoint, steps=1, loss=LossConfig(minibatches=2))
        assert run_learner(settings, rundir) == 0
    said = "step 1: the gradient of 1 of 2 parts of the batch is not finite; the weights moved by the other"
    assert said in capfd.readouterr().err
    assert not same(newest_checkpoint(rundir.checkpoints).path, rundir.warmstart_model)


def test_credit_is_the_capacity_and_grows_with_what_was_trained(rundir):
    _, allocator = run(config(NOWHERE, max_policy_lag=0), rundir)
    totals = [message.total for message in allocator.of(Credit)]
    assert totals[0] == 2 * BATCH  # (K + 2) batches
    assert totals == sorted(set(totals))
    assert totals[-1] <= 2 * BATCH + len(allocator.consumed) + len(allocator.dropped)


def test_learning_rate_zero_leaves_the_weights_bit_identical(rundir):
    code, _ = run(config(NOWHERE, optimizer=OptimizerConfig(lr=0.0)), rundir)
    assert code == 0
    assert same(newest_checkpoint(rundir.checkpoints).path, rundir.warmstart_model)


def test_a_tree_delivered_twice_is_trained_once(rundir):
    code, allocator = run(config(NOWHERE), rundir, deliver_twice=True)
    assert code == 0
    assert max(allocator.consumed.values()) == 1
    assert sum(allocator.consumed.values()) == 3 * BATCH


def test_shuffled_rewards_train_too_and_are_another_run(rundir, tmp_path):
    settings = config(NOWHERE, steps=1, credit=CreditConfig(name="granted"))
    run(settings, rundir)
    control = RunDir.create(tmp_path, "control")
    save_model(control.warmstart_model, model_files(load_model(rundir.warmstart_model), TOKENIZER))
    settings = config(NOWHERE, steps=1, shuffle_rewards=True)
    run(settings, control)
    assert not same(newest_checkpoint(rundir.checkpoints).path, newest_checkpoint(control.checkpoints).path)


def test_two_runs_of_the_same_trees_end_in_the_same_weights(rundir, tmp_path):
    run(config(NOWHERE, max_policy_lag=0), rundir, ahead=BATCH)
    again = RunDir.create(tmp_path, "again")
    save_model(again.warmstart_model, model_files(load_model(rundir.warmstart_model), TOKENIZER))
    run(config(NOWHERE, max_policy_lag=0), again, ahead=BATCH)
    assert same(newest_checkpoint(rundir.checkpoints).path, newest_checkpoint(again.checkpoints).path)


def test_stale_trees_are_dropped_with_their_reason_and_what_they_were_like_and_the_run_goes_on(
    rundir, monkeypatch
):
    old = Version(lineage=0, step=0)
    metrics: list[dict[str, float]] = []
    monkeypatch.setattr(module.MetricsClient, "log", lambda self, step, /, **values: metrics.append(values))

    def make_some_stale(tree_id: int, version: Version) -> Tree:
        return make(tree_id, old if tree_id % 3 == 0 else version)

    with FakeAllocator(make_some_stale, ahead=2 * BATCH) as allocator:
        code = run_learner(config(allocator.endpoint, max_policy_lag=0, steps=4), rundir)
    assert code == 0
    assert set(allocator.dropped.values()) == {"stale"}
    assert not set(allocator.dropped) & set(allocator.consumed)
    for record in records(rundir, "dropped"):
        whole = make(record["tree"], old)
        assert (record["branches"], record["turns"]) == (4, (len(whole.nodes) - 1) / 4)
        assert record["success"] == 0.5
    told = [values for values in metrics if "dropped_tree_success" in values]
    assert told and {values["dropped_tree_success"] for values in told} == {0.5}
    assert sum(values["dropped_tree_branches"] for values in told) <= 4 * len(allocator.dropped)


@contextmanager
def stopping(monkeypatch, condition):
    """Stops the learner as SIGTERM would, once `condition` holds."""
    learners = []
    real = module.Learner.__init__

    def remember(self, *arguments):
        real(self, *arguments)
        learners.append(self)

    monkeypatch.setattr(module.Learner, "__init__", remember)

    def watch() -> None:
        condition()
        learners[0].stop()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join(20)


def test_a_stop_saves_what_was_trained_without_ending_the_run_and_a_restart_goes_on(rundir, monkeypatch):
    with FakeAllocator(make, ahead=2 * BATCH, total=2 * BATCH + 1) as allocator:  # then it runs dry
        settings = config(allocator.endpoint, steps=4, checkpoint_every=100)
        with stopping(monkeypatch, lambda: allocator.wait(lambda: len(allocator.consumed) == 2 * BATCH)):
            assert run_learner(settings, rundir) == 0
        assert not allocator.of(Bye)
        assert set(allocator.committed) == set(allocator.consumed)
    first = newest_checkpoint(rundir.checkpoints)
    assert first.state.version == Version(lineage=0, step=2)
    before = set(allocator.consumed)

    monkeypatch.undo()
    with FakeAllocator(make, ahead=3 * BATCH) as allocator:
        assert run_learner(config(allocator.endpoint, steps=4), rundir) == 0
    assert newest_checkpoint(rundir.checkpoints).state.resumed == [0, 2]
    # The second start is a new lineage, and trees inside the checkpoint are committed, never trained again.
    assert allocator.hellos[0].version == Version(lineage=1, step=2)
    told = allocator.of(Consumed)
    assert [message.version for message in told] == [Version(lineage=1, step=step) for step in (3, 4)]
    again = {tree for message in told for tree in message.trees}
    assert not again & before
    assert before <= {tree for message in allocator.of(Committed) for tree in message.trees}


def test_trees_of_a_lineage_abandoned_two_starts_ago_are_dropped(rundir):
    # Lineage 0 ran beyond 5, where lineage 1 resumed; this is the third start, at 8.
    settings = config(NOWHERE, steps=9, max_policy_lag=4)
    model = build_model(SMALL_MODEL, TOKENIZER, seed=1)
    files = {**model_files(model, TOKENIZER), **alone(model, settings.learner).state_files()}
    state = RunState(
        lineage=1, step=8, trained=[], config_hash=config_hash(settings), random=capture_random(),
        resumed=[0, 5],
    )  # fmt: skip
    save_checkpoint(rundir.checkpoints, state, files, keep=2)

    def make_some_abandoned(tree_id: int, version: Version) -> Tree:
        return make(tree_id, Version(0, 7) if tree_id == 0 else Version(0, 5))

    with FakeAllocator(make_some_abandoned, ahead=2 * BATCH) as allocator:
        settings.cluster.allocator = allocator.endpoint
        assert run_learner(settings, rundir) == 0
    assert allocator.dropped == {0: "stale"}
    assert set(allocator.consumed) == {1, 2}


def test_the_allocators_goodbye_ends_the_learner_with_its_code_after_a_checkpoint(rundir):
    with FakeAllocator(make, ahead=BATCH, total=BATCH) as allocator:
        settings = config(allocator.endpoint, checkpoint_every=100)
        result: list[int] = []
        thread = threading.Thread(target=lambda: result.append(run_learner(settings, rundir)))
        thread.start()
        allocator.wait(lambda: len(allocator.consumed) == BATCH)
        allocator.goodbye = Bye(2, "env.size differs")
        thread.join(30)
    assert result == [2]
    assert newest_checkpoint(rundir.checkpoints).state.step == 1


def test_a_learner_that_is_refused_exits_soon_with_the_code_and_the_reason(rundir, capfd):
    began = time.monotonic()
    code, _ = run(config(NOWHERE), rundir, refuse=Bye(2, "engine.temperature differs: 1.0 and 0.9"))
    assert code == 2 and time.monotonic() - began < 10
    assert "engine.temperature differs: 1.0 and 0.9" in capfd.readouterr().err


def test_an_allocator_that_is_gone_is_peer_lost_after_what_was_learnt_is_saved(rundir):
    with FakeAllocator(make, ahead=BATCH, total=BATCH) as allocator:
        settings = config(allocator.endpoint, checkpoint_every=100)
        settings.cluster.connect_timeout_s = 1.5
        errors: list[Exception] = []

        def target() -> None:
            try:
                run_learner(settings, rundir)
            except PeerLost as error:
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        allocator.wait(lambda: len(allocator.consumed) == BATCH)
        allocator.deaf.set()
        thread.join(30)
    assert errors and errors[0].exit_code == 6
    assert newest_checkpoint(rundir.checkpoints).state.step == 1


def test_without_starting_weights_one_sentence_says_what_to_do(tmp_path):
    with pytest.raises(StorageError, match="run role=warmstart first"):
        run_learner(config(NOWHERE), RunDir.create(tmp_path, "empty"))


def test_a_second_learner_on_the_run_is_refused(rundir):
    with rundir.lock("learner"), pytest.raises(StorageError, match="held by process"):
        run_learner(config(NOWHERE), rundir)


def test_a_deterministic_run_commits_each_version_before_it_is_published(rundir, monkeypatch):
    order: list[str] = []
    save, publish = module.Learner._save, module.Learner._publish
    monkeypatch.setattr(
        module.Learner,
        "_save",
        lambda s, final=False: (order.append(f"save {s._version.step}"), save(s, final))[1],
    )
    monkeypatch.setattr(
        module.Learner, "_publish", lambda s: (order.append(f"publish {s._version.step}"), publish(s))[1]
    )
    settings = config(NOWHERE, max_policy_lag=0, steps=2, checkpoint_every=100)
    settings.deterministic = True
    run(settings, rundir)
    assert order == ["save 0", "publish 0", "save 1", "publish 1", "save 2", "publish 2", "save 2"]


def test_sigterm_and_ctrl_c_ask_for_a_stop_and_the_old_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    calls: list[str] = []
    with module.stop_on_signals(lambda: calls.append("stop")):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert calls == ["stop", "stop"]
    assert signal.getsignal(signal.SIGTERM) is before


PROCESS = """
import sys
from pathlib import Path
from common.rundir import RunDir
from learner.main import run_learner
from tests.learner.test_main import config
sys.exit(run_learner(config({endpoint!r}, steps=1000, checkpoint_every=1000), RunDir.open(Path({path!r}))))
"""


@pytest.mark.slow
def test_sigterm_of_the_process_saves_and_exits_with_0(rundir):
    with FakeAllocator(make, ahead=2 * BATCH) as allocator:
        script = PROCESS.format(endpoint=allocator.endpoint, path=str(rundir.path))
        root = Path(__file__).resolve().parents[2]
        learner = subprocess.Popen([sys.executable, "-c", script], cwd=root, env=os.environ.copy())
        allocator.wait(lambda: len(allocator.consumed) >= 2 * BATCH, timeout_s=90)
        learner.terminate()
        assert learner.wait(60) == 0
        allocator.wait(lambda: set(allocator.committed) == set(allocator.consumed))
    assert newest_checkpoint(rundir.checkpoints).state.step >= 2
