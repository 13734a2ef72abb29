"""The tree queue: its conservation law under any sequence of events, its gate, and K = 0."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.nouns import Tree, Version
from learner.queue import MALFORMED, NO_OUTCOME, OVER_CREDIT, STALE, TreeQueue, has_fresh_token
from learner.rows import Clock
from tests.learner.helpers import continuation, forked_tree, make_tree, node, turn

VOCAB = 24


def tree(tree_id: int, *steps: int, reward: float | None = 1.0) -> Tree:
    """One branch with one token of each given version step."""
    versions = [(Version(lineage=0, step=step), 1) for step in steps]
    made = turn([5] * len(steps), (), versions=versions)
    return make_tree([node(1, 0, 0, 0, made)], [continuation(0, [1], reward)], tree_id)


def clock(step: int, max_lag: int = 1) -> Clock:
    return Clock(Version(lineage=0, step=step), max_lag)


def queue(batch: int = 2, capacity: int = 6, **more) -> TreeQueue:
    return TreeQueue(batch_trees=batch, capacity=capacity, vocab_size=VOCAB, **more)


def test_a_batch_is_taken_only_when_complete_and_lowest_ids_first():
    q = queue()
    q.offer(tree(7, 0), clock(0))
    assert q.take(clock(0)) == ([], [])
    q.offer(tree(3, 0), clock(0))
    q.offer(tree(5, 0), clock(0))
    batch, drops = q.take(clock(0))
    assert ([t.id for t in batch], drops, q.holds()) == ([3, 5], [], [7])


def test_with_k_0_only_tokens_of_the_current_weights_are_trained():
    q = queue(batch=1)
    assert q.offer(tree(0, 0), clock(1, max_lag=0)).reason == STALE
    assert q.offer(tree(1, 1), clock(1, max_lag=0)) is None
    assert [t.id for t in q.take(clock(1, max_lag=0))[0]] == [1]


def test_a_tree_that_grows_stale_while_it_waits_is_dropped_when_a_batch_is_asked_for():
    q = queue(batch=1, capacity=4)
    q.offer(tree(0, 0), clock(0))
    q.offer(tree(1, 1), clock(1))
    batch, drops = q.take(clock(2))
    assert [t.id for t in batch] == [1]
    assert [(drop.tree, drop.reason, drop.tokens) for drop in drops] == [(0, STALE, 1)]
    assert q.stale_since() == drops and q.stale_since() == []


def test_a_dropped_tree_takes_length_and_success_of_its_branches_along():
    drop = queue().offer(forked_tree(4), clock(2))
    assert (drop.reason, drop.tokens) == (STALE, 5)
    # Two branches share node 1: of 2 turns and 3 tokens with reward 1, of 2 turns and 4 tokens with reward 0.
    assert (drop.branches, drop.branch_turns, drop.branch_tokens, drop.branch_reward) == (2, 4, 7, 1.0)
    assert (drop.mean_turns, drop.success) == (2.0, 0.5)


def test_only_stale_trees_are_told_apart_since_others_were_no_choice_of_the_gate():
    q = queue()
    q.offer(tree(0, 0, reward=None), clock(0))
    assert q.stale_since() == [] and q.dropped == {NO_OUTCOME: 1}


def test_one_young_token_keeps_a_tree():
    assert has_fresh_token(tree(0, 0, 0, 5), clock(6))
    assert not has_fresh_token(tree(0, 0, 0, 4), clock(6))


def test_a_young_token_of_a_continuation_without_outcome_keeps_nothing():
    young = turn((5,), versions=[(Version(lineage=0, step=6), 1)])
    mixed = make_tree(
        [node(1, 0, 0, 0, turn((5,))), node(2, 0, 1, 0, young)],
        [continuation(0, [1], 1.0), continuation(1, [2], None)],
    )
    assert not has_fresh_token(mixed, clock(6))


def test_versions_of_an_abandoned_lineage_are_stale_at_any_k():
    now = Clock(Version(lineage=1, step=4), max_lag=99, resumed=(0, 3))
    assert not has_fresh_token(tree(0, 4), now)
    assert has_fresh_token(tree(0, 3), now)


@pytest.mark.parametrize(
    "bad, reason",
    [
        (tree(0, 0, reward=None), NO_OUTCOME),
        (make_tree([node(1, 0, 0, 0, turn((VOCAB,)))], [continuation(0, [1], 1.0)]), MALFORMED),
        (make_tree([node(1, 0, 0, 0, turn((5,)))], [continuation(0, [1], 1.0)], prompt=()), MALFORMED),
    ],
)
def test_a_tree_that_cannot_be_trained_is_dropped_with_its_reason(bad, reason):
    assert queue().offer(bad, clock(0)).reason == reason


def test_a_sender_that_ignores_its_credit_is_dropped_not_buffered():
    q = queue(batch=9, capacity=2)
    reasons = [q.offer(tree(i, 0), clock(0)) for i in range(3)]
    assert reasons[:2] == [None, None] and reasons[2].reason == OVER_CREDIT
    assert len(q) == 2 and q.room == 0


def test_a_tree_that_an_earlier_start_trained_is_never_trained_again():
    q = queue(batch=1, settled=[4])
    assert q.offer(tree(4, 0), clock(0)) is None
    assert (len(q), q.received, q.repeated) == (0, 0, 1)
    assert q.seen(4) and not q.seen(5)


class QueueMachine(RuleBasedStateMachine):
    """Offers, repeats, new versions and takes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(batch=2, capacity=5)
        self.step, self.next_id = 0, 0
        self.ended: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()

    def _note(self, drops) -> None:
        self.ended.update(drop.tree for drop in drops)
        self.reasons.update(drop.reason for drop in drops)

    @rule(behind=st.integers(0, 4), reward=st.sampled_from([1.0, 0.0, None]))
    def offer(self, behind, reward):
        drop = self.queue.offer(
            tree(self.next_id, max(0, self.step - behind), reward=reward), clock(self.step)
        )
        self._note([drop] if drop else [])
        self.next_id += 1

    @rule(data=st.data())
    def repeat(self, data):
        if self.next_id:
            number = data.draw(st.integers(0, self.next_id - 1))
            before = self.queue.holds()
            assert self.queue.offer(tree(number, self.step), clock(self.step)) is None
            assert self.queue.holds() == before

    @rule()
    def update(self):
        batch, drops = self.queue.take(clock(self.step))
        assert len(batch) in (0, 2)
        assert all(has_fresh_token(t, clock(self.step)) for t in batch)
        assert [t.id for t in batch] == sorted(t.id for t in batch)
        self.ended.update(t.id for t in batch)
        self._note(drops)
        self.step += bool(batch)

    @rule()
    def weights_move_on(self):
        self.step += 1

    @invariant()
    def every_tree_ends_exactly_once_or_waits(self):
        assert max(self.ended.values(), default=1) == 1
        assert set(self.ended) | set(self.queue.holds()) == set(range(self.next_id))
        assert not set(self.ended) & set(self.queue.holds())

    @invariant()
    def counts_are_conserved(self):
        q = self.queue
        assert q.received == self.next_id == len(q) + q.taken + sum(q.dropped.values())
        assert q.dropped == self.reasons

    @invariant()
    def memory_is_bounded(self):
        assert 0 <= self.queue.room <= self.queue.capacity


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40)
