"""The ring, as processes over sockets, computes what the plain loop computes: bit for bit, after every update.

With `deterministic=true`, K = 0 and D = 0 neither the number of actors, nor the order in which they report,
nor the death of one of them leaves a trace in the weights, in the trees, or in what the allocator decided.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from common.nouns import ROOT, Lease, Node, Outcome, Tree, Version
from common.seeds import lease_seed
from tests.oracle.loop import Update, train
from tests.oracle.ring import Ring, fingerprint, warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BATCH, STEPS = 4, 3
FLAT = ["allocator/rule=flat", "allocator.budget.continuations=6"]
RANDOM = ["allocator/rule=random", "allocator.rule.expansions=2", "allocator.budget.continuations=10"]
"""Two chains, then two rounds of two draws each."""


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that reaches the goal now and then: credit needs both outcomes in one tree."""
    longer = [
        "warmstart.demonstrations=64",
        "warmstart.noise=0.2",
        "warmstart.steps=150",
        "warmstart.lr=0.003",
    ]
    return warm_start(tmp_path_factory.mktemp("warm"), "experiment=deterministic", *longer)


def settings(start: Path, *words: str) -> list[str]:
    return [
        "experiment=deterministic", f"model.path={start}", f"learner.steps={STEPS}",
        f"learner.batch_trees={BATCH}", f"learner.keep_checkpoints={STEPS + 1}", "learner.optimizer.lr=0.003",
        *words,
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------- what is compared


def assert_equal(ring: Ring, start: Path, scratch: Path) -> list[Update]:
    """Weights after every update, all trees, and the terms of every lease. Returns the oracle's updates."""
    config, decisions = ring.config(), ring.decisions()
    updates = train(config, start, scratch)
    trees = [tree for update in updates for tree in update.trees]
    assert sorted(decisions.trees) == [tree.id for tree in trees]
    for tree in trees:
        assert shared(decisions.trees[tree.id]) == shared(tree), f"tree {tree.id} differs"
        assert decisions.trees[tree.id].planned_weight == pytest.approx(tree.planned_weight)
    for lease in decisions.leases:
        assert_terms(lease, trees[lease.id.tree], config.seed)
    assert decisions.most_trees == BATCH, "all trees of a batch grow at the same time"
    expected = [fingerprint(update.weights) for update in updates]
    assert [fingerprint(ring.weights(step)) for step in range(1, STEPS + 1)] == expected
    assert len({fingerprint(ring.weights(0)), *expected}) == STEPS + 1, "every update changes something"
    return updates


def shared(tree: Tree) -> tuple[object, ...]:
    """What the oracle's tree has too: all but the worlds' states and descriptions, which change nothing."""
    blank = {"entropies": b"", "snapshot": None, "state_hash": "", "stop_reason": "", "process_score": None}
    nodes = [
        msgspec.structs.replace(node, turn=msgspec.structs.replace(node.turn, **blank)) for node in tree.nodes
    ]
    return tree.task, tree.wave, tree.opened_at, nodes, tree.continuations


def assert_terms(lease: Lease, tree: Tree, seed: int) -> None:
    """What a lease fixes is what the search had at that point, whichever attempt it is."""
    branch = tree.continuations[lease.id.number]
    where = [branch.anchor, *branch.nodes][lease.offset]
    assert lease.prefix == prefix(tree.walk(where)) and lease.depth == tree.nodes[where].depth
    assert lease.seed == lease_seed(seed, tree.id, branch.number)
    terms = (lease.weight, lease.baseline, lease.predictor_version, lease.score_stamp)
    assert terms == (branch.weight, branch.baseline, branch.predictor_version, branch.score_stamp)
    assert lease.min_version == Version(0, tree.wave) and lease.horizon == 0


def prefix(path: list[Node]) -> bytes:
    return b"".join(part for node in path for part in (node.turn.action, node.turn.observation))


def rewards(updates: list[Update]) -> list[set[float]]:
    """The rewards in each tree."""
    outcomes = [[leaf.outcome for leaf in tree.leaves()] for update in updates for tree in update.trees]
    return [{outcome.reward for outcome in of_tree if isinstance(outcome, Outcome)} for of_tree in outcomes]


# -------------------------------------------------------------------------------------------------- the tests


def test_two_actors_and_a_plain_loop_make_the_same_weights(start: Path, tmp_path: Path) -> None:
    with Ring(tmp_path, settings(start, *FLAT, "learner/credit=granted", "learner/weight=none")) as ring:
        ring.train(actors=2)
        updates = assert_equal(ring, start, tmp_path / "oracle")
    assert {0.0, 1.0} in rewards(updates), "some trees know success and failure"


@pytest.mark.parametrize(
    "rule, credit, weight, actors, more",
    [
        ("flat", "grpo", "decoupled", 1, ["learner.loss.minibatches=1"]),
        ("random", "granted", "decoupled", 2, ["learner.loss.epochs=2", "env.is_slippery=true"]),
        ("random", "grpo", "none", 1, ["seed=7"]),
    ],
)
def test_rules_credits_and_weights_all_equal_the_plain_loop(
    rule: str, credit: str, weight: str, actors: int, more: list[str], start: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever the user's OMP_NUM_THREADS says: sums of several threads come in another order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    chosen = [*(FLAT if rule == "flat" else RANDOM), f"learner/credit={credit}", f"learner/weight={weight}"]
    with Ring(tmp_path, settings(start, *chosen, *more)) as ring:
        ring.train(actors)
        updates = assert_equal(ring, start, tmp_path / "oracle")
    assert {0.0, 1.0} in rewards(updates), "some trees know success and failure"
    anchors = {leaf.anchor for update in updates for tree in update.trees for leaf in tree.leaves()}
    assert (anchors == {ROOT}) == (rule == "flat")


def test_an_actor_killed_in_mid_run_leaves_no_trace_in_the_weights(start: Path, tmp_path: Path) -> None:
    wide = ["allocator/rule=random", "allocator.rule.expansions=6", "allocator.budget.continuations=14"]
    soon = ["cluster.heartbeat_s=0.5", "cluster.dead_after_s=3"]

    def kill_the_busiest(ring: Ring) -> None:
        """In the second batch, while at least five of its leases are between two turns."""
        ring.wait(lambda: max(half_done(ring, BATCH).values(), default=0) >= 5)
        ring.kill(half_done(ring, BATCH).most_common(1)[0][0])

    with Ring(tmp_path, settings(start, *wide, *soon, "learner/credit=granted")) as ring:
        ring.train(2, kill_the_busiest)
        assert_equal(ring, start, tmp_path / "oracle")
        leases = ring.decisions().leases
    assert any(lease.offset > 0 for lease in leases), "none was resumed behind turns of the dead actor"


def half_done(ring: Ring, first_tree: int) -> Counter[str]:
    """Leases of trees from `first_tree` on that have delivered a turn and have not ended, by their actor."""
    holders: dict[tuple[int, int], str] = {}
    begun: set[tuple[int, int]] = set()
    for record in ring.journal():
        if record.kind in ("lease_issued", "lease_ended", "turn_accepted"):
            lease = (record.fields["tree"], record.fields["number"])
            match record.kind:
                case "lease_issued":
                    holders[lease] = record.fields["peer"].partition("/")[0]
                case "lease_ended":
                    holders.pop(lease, None)
                case _:
                    begun.add(lease)
    return Counter(peer for lease, peer in holders.items() if lease in begun and lease[0] >= first_tree)
