"""Trees that wait to be trained: a pure state machine with one conservation law and the policy-lag gate.

    offer ──▶ queued ──take──▶ taken            received = queued + taken + dropped(reason)
      │         │                               (ids are distinct; what is offered again is counted apart)
      ▼         ▼
    repeated  dropped: stale | no_outcome | malformed | over_credit

The gate is per token: a tree may be trained as long as one action token that a branch with an outcome sampled
is at most K updates old (older ones are context then, see `learner.rows`). It is applied when a tree arrives,
and again to the whole queue whenever a batch is asked for, since the weights move on while trees wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common.nouns import ROOT, Continuation, Tree, ids
from learner.credit.base import branch_turns, leaf_of
from learner.rows import Clock

STALE, NO_OUTCOME, MALFORMED, OVER_CREDIT = "stale", "no_outcome", "malformed", "over_credit"


@dataclass(frozen=True, slots=True)
class Drop:
    """A tree that will never be trained."""

    tree: int
    reason: str
    tokens: int
    """Its action tokens."""
    branches: int = 0
    """With an outcome."""
    branch_turns: int = 0
    """Sum over its branches of their turns from the root, as `branch_tokens` of their action tokens."""
    branch_tokens: int = 0
    branch_reward: float = 0.0
    """Sum of their raw rewards."""

    @property
    def mean_turns(self) -> float:
        return self.branch_turns / max(1, self.branches)

    @property
    def success(self) -> float:
        """Mean raw reward of its branches."""
        return self.branch_reward / max(1, self.branches)


class TreeQueue:
    """Holds whole trees until a batch is complete.

    Args:
        batch_trees: trees of one update.
        capacity: most trees held; more is a sender that ignores its credit.
        vocab_size: ids at or above it cannot be embedded.
        settled: trees that an earlier start of this run already trained.
    """

    def __init__(
        self, *, batch_trees: int, capacity: int, vocab_size: int, settled: Iterable[int] = ()
    ) -> None:
        self.batch_trees = batch_trees
        self.capacity = capacity
        self._vocab_size = vocab_size
        self._queued: dict[int, Tree] = {}
        self._seen = set(settled)
        self.received = 0
        self.repeated = 0
        self.taken = 0
        self.dropped: Counter[str] = Counter()
        self._stale: list[Drop] = []

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def room(self) -> int:
        """Trees that may still be sent."""
        return self.capacity - len(self._queued)

    def holds(self) -> list[int]:
        """Ids of the trees that wait, ascending."""
        return sorted(self._queued)

    def seen(self, tree: int) -> bool:
        """Whether a tree came before: queued, taken, dropped or settled."""
        return tree in self._seen

    def offer(self, tree: Tree, clock: Clock) -> Drop | None:
        """Take a tree in, or say why it never will be. A tree that was seen before changes nothing."""
        if tree.id in self._seen:
            self.repeated += 1
            return None
        self._seen.add(tree.id)
        self.received += 1
        reason = self._refusal(tree, clock)
        if reason is not None:
            return self._drop(tree, reason)
        self._queued[tree.id] = tree
        return None

    def take(self, clock: Clock) -> tuple[list[Tree], list[Drop]]:
        """A batch in canonical order if one is complete, else nothing; and what grew too old while waiting.

        The lowest ids go first: they were opened first and would grow stale first.
        """
        stale = [tree for tree in self._queued.values() if not has_fresh_token(tree, clock)]
        drops = [self._drop(self._queued.pop(tree.id), STALE) for tree in stale]
        if len(self._queued) < self.batch_trees:
            return [], drops
        batch = [self._queued.pop(number) for number in self.holds()[: self.batch_trees]]
        self.taken += len(batch)
        return batch, drops

    def stale_since(self) -> list[Drop]:
        """Trees dropped as stale since the last call."""
        found, self._stale = self._stale, []
        return found

    def _refusal(self, tree: Tree, clock: Clock) -> str | None:
        if not self._is_well_formed(tree):
            return MALFORMED
        if not any(True for _ in tree.leaves()):
            return NO_OUTCOME
        if not has_fresh_token(tree, clock):
            return STALE
        return OVER_CREDIT if self.room <= 0 else None

    def _is_well_formed(self, tree: Tree) -> bool:
        """What the codec cannot know: something precedes the first action, and every id has an embedding."""
        if not tree.nodes[ROOT].turn.observation:
            return False
        parts = (part for node in tree.nodes for part in (node.turn.action, node.turn.observation))
        return all(int(ids(part).max()) < self._vocab_size for part in parts if part)

    def _drop(self, tree: Tree, reason: str) -> Drop:
        self.dropped[reason] += 1
        drop = drop_of(tree, reason)
        if reason == STALE:
            self._stale.append(drop)
        return drop


def drop_of(tree: Tree, reason: str) -> Drop:
    """What goes with a tree that is dropped: nothing of it enters a batch's numbers."""
    leaves = list(tree.leaves())
    turns = [node for leaf in leaves for node in branch_turns(tree, leaf)]
    return Drop(
        tree.id,
        reason,
        tree.num_action_tokens(),
        branches=len(leaves),
        branch_turns=len(turns),
        branch_tokens=sum(node.turn.num_action_tokens for node in turns),
        branch_reward=sum(leaf.outcome.raw_reward for leaf in leaves if leaf.outcome is not None),
    )


def has_fresh_token(tree: Tree, clock: Clock) -> bool:
    """Whether any branch with an outcome has an action token at most K updates old."""
    return any(_branch_is_fresh(tree, continuation, clock) for continuation in tree.leaves())


def _branch_is_fresh(tree: Tree, continuation: Continuation, clock: Clock) -> bool:
    return any(
        clock.lag(run.version) <= clock.max_lag
        for node in reversed(tree.walk(leaf_of(continuation)))
        for run in node.turn.versions
    )
