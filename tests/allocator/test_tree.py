"""A tree's targets: what a sibling had come to counts in learning, and never in the prediction. And which of
its turns may be anchors, and in which order they leave."""

from __future__ import annotations

from common.nouns import ROOT, TurnStatus
from common.prefix import EMPTY, Tally
from tests.allocator.harness import RANDOM, granted, small


def test_anchors_and_places_are_those_of_a_plain_look_at_every_node() -> None:
    """Turns of three continuations arrive mixed; one ends the world, one is still open, one has none yet."""
    rig, actor, (first, second, third, _) = granted(small(batch_trees=1), continuations=4, slots=8)
    tree = rig.core.state.forest.trees[0]
    for lease in (third, second, first):
        rig.start(actor, lease)
    for offset, lease in ((0, second), (0, first), (1, second), (0, third), (1, first)):
        rig.expand(actor, lease, offset, last=(lease, offset) == (first, 1))
    plain = sorted(tree.nodes.values(), key=lambda node: (node.lease, node.offset))
    assert list(tree.places()) == [node.index for node in plain]
    opened = [node.index for node in plain if node.turn.status is TurnStatus.OPEN]
    assert tree.anchors() == opened and opened[0] == ROOT and len(opened) == len(plain) - 1


def test_siblings_granted_together_follow_one_after_the_other() -> None:
    rig, actor, leases = granted(small(batch_trees=1), continuations=3)
    tree = rig.core.state.forest.trees[0]
    for lease, reward in reversed([*zip(leases, (1.0, 0.0, 1.0), strict=True)]):
        rig.finish(actor, lease, reward=reward)
    targets, _ = tree.targets()
    anchored = [target for target in targets if target.prefix.depth == 0]
    assert [target.prefix.tree for target in anchored] == [EMPTY] * 3
    assert [(t.outcome, t.beside) for t in anchored] == [
        (1.0, EMPTY),
        (0.0, Tally(1.0, 1)),
        (1.0, Tally(1.0, 2)),
    ]
    assert all(target.beside == EMPTY for target in targets if target.prefix.depth > 0)


def test_what_was_known_at_grant_is_not_counted_beside_too() -> None:
    """Of the continuations from one anchor, those that had ended are in its tally, the others beside it."""
    rig, actor, chains = granted(small(batch_trees=1), RANDOM, continuations=6, slots=8)
    tree = rig.core.state.forest.trees[0]
    for lease in chains:  # no open turn: the second round starts at the root, too
        rig.finish(actor, lease, turns=1, reward=1.0)
    for number, lease in enumerate(rig.leases(actor)):
        rig.finish(actor, lease, turns=1, reward=float(number % 2))
    targets, _ = tree.targets()
    assert [target.prefix.below for target in targets] == [EMPTY] * 2 + [Tally(2.0, 2)] * 4
    assert [target.beside for target in targets] == [
        EMPTY, Tally(1.0, 1), EMPTY, Tally(0.0, 1), Tally(1.0, 2), Tally(1.0, 3),
    ]  # fmt: skip
