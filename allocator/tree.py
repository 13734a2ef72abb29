"""A tree while it grows: its nodes as they arrived, its branches, its clock; and the canonical tree at the
end.

Nodes are indexed in order of arrival here. Whatever decides or leaves looks at them by (owner, offset), so
that the order of arrival leaves no trace.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from allocator.draws import SeededDraws
from allocator.rules.base import Draws, open_turns
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    ROOT,
    Continuation,
    LeaseId,
    Node,
    Outcome,
    RewardSource,
    Segment,
    TaskId,
    Tree,
    Version,
)
from common.predictor import Prediction, Predictor, Target
from common.prefix import EMPTY, Prefix, Tally, describe
from common.seeds import derive_seed

Seen = tuple[int, float, int, float, int]
"""A node, and outcomes: wins and trials of its tree, and of what is below it."""


class BranchState(enum.Enum):
    PENDING = "pending"
    """Decided, not yet (or no longer) with an actor."""
    QUEUED = "queued"
    """Granted, not yet started."""
    RUNNING = "running"
    ENDED = "ended"


PENDING, QUEUED, RUNNING, ENDED = BranchState
"""By these names they are looked up in a fifth of the time, and that is done several times a message."""


@dataclass(slots=True, eq=False)
class Branch:
    """A continuation with its current attempt. All above `state` is fixed when it is decided."""

    tree: GrowingTree
    number: int
    decision: int
    group: int
    anchor: int
    horizon: int
    heir_of: int
    weight: float
    baseline: float | None
    predictor_version: int
    stamp: int
    speculative: bool
    seed: int
    prefix: Prefix
    """What was known of its anchor then; its tree's outcomes also stand behind the values of its turns."""
    state: BranchState = PENDING
    epoch: int = -1
    """Of the newest attempt; −1 before the first."""
    attempts: int = 0
    """Issued so far."""
    holder: str = ""
    progress_at: float = 0.0
    checked: bool = False
    """Whether some attempt was let through at `Starting`: its age is never looked at again."""
    failures: int = 0
    nodes: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    ended: str = ""
    endings: list[str] = field(default_factory=list)
    """How each attempt ended, in order: as many as attempts, less one while one is live."""
    heirs: list[int] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether an actor holds it."""
        return self.state is QUEUED or self.state is RUNNING

    @property
    def id(self) -> LeaseId:
        return LeaseId(self.tree.id, self.number, self.epoch)


@dataclass(slots=True, eq=False)
class GrowingTree:
    """An open tree. Implements `rules.base.TreeView`."""

    id: int
    task: TaskId
    slot: int
    wave: int
    opened_at: Version
    predictor: Predictor
    run_seed: int
    gold_answer: str | None = None
    candidate: bool = False
    """Whether it is in a pool that has not been chosen from, or was not chosen."""
    allowance: int | None = None
    """Continuations granted to it by the budget, None before the root is known and the budget has decided."""
    spent: int = 0
    returned: list[Branch] = field(default_factory=list)
    """Branches that were decided, granted, and taken back unstarted: their budget was given back."""
    nodes: dict[int, Node] = field(default_factory=dict)
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    """The prefix that ends with a node, as it was for whoever asked first."""
    predictions: list[dict[Seen, Prediction]] = field(default_factory=lambda: [{}, {}])
    """Made for the newest decision and for the one before: whoever asks what the news changed asks for those
    again."""
    predicted_for: tuple[int, int] = (-1, -1)
    """Decision and version of the newest ones."""
    tallies: dict[int, Tally] = field(default_factory=dict)
    """Outcomes of the environment at and above the leaf they came from, by node."""
    news: set[int] = field(default_factory=set)
    """Branches whose outcome came after the newest decision."""
    parked: bool = False
    """Whether its budget waits for other trees of its wave before it says whether there is more."""
    branches: dict[int, Branch] = field(default_factory=dict)
    next_node: int = 0
    next_number: int = 0
    decisions: int = 0
    clock: int = 0
    """Events of the kinds its rule reads."""
    own_events: dict[int, int] = field(default_factory=dict)
    """Those among them that a decision's own branches brought."""
    outstanding: int = 0
    """Branches not ended."""
    outstanding_of: dict[int, int] = field(default_factory=dict)
    flying: dict[int, int] = field(default_factory=dict)
    """Outstanding branches by anchor."""
    open_ends: int = 0
    """Branches that wait at their horizon."""
    wanting: int = 0
    """Branches outstanding when it last queued for another decision; 0 = it does not queue."""
    settled: bool = False
    inspector: str = ""
    """Actor that sets the task up; empty when none does."""
    inspections: int = 0

    # --- what a rule sees --------------------------------------------------------------------------------

    @property
    def budget_left(self) -> int:
        return (self.allowance or 0) - self.spent

    def node(self, index: int) -> Node:
        return self.nodes[index]

    def anchors(self) -> list[int]:
        return [ROOT, *open_turns(self.nodes.__getitem__, self.branches.values())]

    def in_flight(self, index: int) -> int:
        return self.flying.get(index, 0)

    def tally(self, index: int) -> Tally:
        return self.tallies.get(index, EMPTY)

    def predict(self, index: int) -> Prediction:
        return self.predict_after(index, self.tally(ROOT), self.tally(index))

    def predict_after(self, index: int, tree: Tally, below: Tally) -> Prediction:
        """The newest predictor's word on a node, as it was after these outcomes."""
        now = (self.decisions, self.predictor.version)
        if now != self.predicted_for:
            self.predictions = [{}, self.predictions[0] if now[1] == self.predicted_for[1] else {}]
            self.predicted_for = now
        key = (index, tree.wins, tree.trials, below.wins, below.trials)
        newest, before = self.predictions
        found = newest.get(key) or before.get(key)
        if found is None:
            found = self.predictor.predict(self.prefix_after(index, tree, below))
            if len(newest) < 2 * len(self.nodes):
                newest[key] = found
        return found

    def prefix_at(self, index: int) -> Prefix:
        """What is known now of the prefix that ends with a node."""
        return self.prefix_after(index, self.tally(ROOT), self.tally(index))

    def prefix_after(self, index: int, tree: Tally, below: Tally = EMPTY) -> Prefix:
        """The prefix that ends with a node, as it was after these outcomes."""
        first = self.prefixes.get(index)
        if first is None:
            first = self.prefixes[index] = describe(self.nodes[index], tree, below)
        return first if first.tree is tree and first.below is below else first.after(tree, below)

    def draws(self) -> Draws:
        return SeededDraws(derive_seed("rule", self.run_seed, self.id, self.decisions))

    # --- walking -----------------------------------------------------------------------------------------

    def tip(self, branch: Branch) -> Node:
        """Where the branch stands: its last turn, or its anchor."""
        return self.nodes[branch.nodes[-1] if branch.nodes else branch.anchor]

    def path(self, node: Node) -> list[Node]:
        """Nodes from the root to `node`."""
        path = [node]
        while node.parent != NO_PARENT:
            node = self.nodes[node.parent]
            path.append(node)
        return path[::-1]

    def count_outcome(self, branch: Branch) -> None:
        """A continuation has ended: where the environment said how, so know all nodes its path passes."""
        path = self.path(self.tip(branch))
        success = self.path_success(branch, path)
        if success is not None:
            tallies, won = self.tallies, EMPTY.plus(success).wins
            for node in path:
                known = tallies.get(node.index, EMPTY)
                tallies[node.index] = Tally(known.wins + won, known.trials + 1)

    def path_success(self, branch: Branch, path: list[Node]) -> float | None:
        """Success in [0, 1] of the whole `path` of an ended branch: what was earned before its anchor counts.
        None where the environment did not say."""
        paid = self._paid(branch)
        if paid is None:
            return None
        earned = sum([node.turn.reward for node in path[: len(path) - len(branch.nodes)]], 0.0)
        return min(1.0, max(0.0, earned + paid))

    def earned_up_to(self) -> dict[int, float]:
        """What the turns from the prompt to each node were paid, itself included."""
        earned = {NO_PARENT: 0.0}
        for index, node in self.nodes.items():
            earned[index] = earned[node.parent] + node.turn.reward
        return earned

    def prefix(self, path: list[Node]) -> bytes:
        """Token ids along a path, exactly as they were sampled and observed."""
        parts: list[bytes] = []
        for node in path:
            parts += (node.turn.action, node.turn.observation)
        return b"".join(parts)

    def history(self, path: list[Node]) -> list[Segment]:
        """Actions and seeds that replay the path."""
        return [Segment(node.turn.action_text, node.turn.seed) for node in path[1:]]

    def tokens(self) -> int:
        return sum(node.turn.num_action_tokens for node in self.nodes.values())

    # --- at the end --------------------------------------------------------------------------------------

    def places(self) -> dict[int, int]:
        """Canonical index of each node, by its own; keys come in canonical order, (owner, offset). Parents
        come before their children, because a branch gets its number after its anchor existed."""
        owned = [index for branch in self.branches.values() for index in branch.nodes]
        return {index: new for new, index in enumerate([ROOT, *owned])}

    def canonical(self) -> Tree:
        """The finished tree, its nodes in canonical order."""
        places = self.places()
        place = {NO_PARENT: NO_PARENT, **places}
        nodes = [
            Node(new, place[n.parent], n.lease, n.offset, n.depth, n.turn, n.scores, n.value, n.value_version)
            for n, new in ((self.nodes[index], new) for index, new in places.items())
        ]
        return Tree(
            id=self.id,
            task=self.task,
            wave=self.wave,
            nodes=nodes,
            continuations=[continuation(b, place) for b in self.branches.values()],
            planned_weight=sum(b.weight for b in self.branches.values() if b.heir_of == NO_LEASE),
            opened_at=self.opened_at,
            gold_answer=self.gold_answer,
        )

    def turn_rewards(self, branch: Branch) -> float:
        """What the environment paid for the turns of a continuation, those before its anchor left out."""
        return sum([self.nodes[index].turn.reward for index in branch.nodes], 0.0)

    def earned(self, branch: Branch, said: Outcome) -> Outcome:
        """The outcome of a finished continuation: where the environment pays, what all its own turns earned.

        Whoever reports the end of a retry knows the rewards of its own attempt only.
        """
        if said.source is not RewardSource.ENVIRONMENT:
            return said
        reward = self.turn_rewards(branch)
        return Outcome(reward, reward, said.source, said.ending)

    def returns(self, branch: Branch) -> float | None:
        """Success in [0, 1] of a continuation, by the environment's word; None where that is not known.

        At a horizon it is what its own turns earned and the weighted return of the heirs (weights 1/m, fixed
        from the past).
        """
        paid = self._paid(branch)
        return None if paid is None else min(1.0, max(0.0, paid))

    def _paid(self, branch: Branch) -> float | None:
        """The return as the environment paid it, None where something else, or nothing, was said."""
        if branch.outcome is not None:
            known = branch.outcome.source is RewardSource.ENVIRONMENT
            return branch.outcome.raw_reward if known else None
        shares = [self._paid(self.branches[number]) for number in branch.heirs if number in self.branches]
        if not shares or len(shares) < len(branch.heirs) or None in shares:
            return None
        return self.turn_rewards(branch) + sum(share for share in shares if share is not None) / len(shares)

    def _leases_of_path(self, branch: Branch) -> int:
        """Leases that one path was run in, end to end: together they are one piece of evidence."""
        if branch.heir_of == NO_LEASE and not branch.heirs:
            return 1
        above, below = branch, [branch]
        leases = 0
        while above.heir_of in self.branches:
            above, leases = self.branches[above.heir_of], leases + 1
        while below:
            leases += 1
            below = [self.branches[n] for b in below for n in b.heirs if n in self.branches]
        return leases

    def targets(self) -> tuple[list[Target], int]:
        """One loss term per continuation: at its anchor and at the open nodes it sampled, never above.

        Returns the targets in canonical order, and how many continuations were censored.
        """
        found: list[Target] = []
        censored = 0
        siblings: dict[tuple[int, Tally], Tally] = {}
        for branch in self.branches.values():
            outcome = self.returns(branch)
            if outcome is None:
                censored += 1
                continue
            opened = [self.nodes[index] for index in open_turns(self.nodes.__getitem__, (branch,))]
            share = 1.0 / (1 + len(opened)) / self._leases_of_path(branch)
            place = branch.anchor, branch.prefix.below
            beside = siblings.get(place, EMPTY)
            siblings[place] = beside.plus(outcome)
            found.append(Target(branch.prefix, branch.baseline, outcome, share, beside))
            for node in opened:
                prefix = self.prefix_after(node.index, branch.prefix.tree)
                found.append(Target(prefix, node.value, outcome, share))
        return found, censored


def continuation(branch: Branch, place: dict[int, int]) -> Continuation:
    """A branch as the learner sees it; `place` maps nodes to their canonical indices."""
    return Continuation(
        number=branch.number,
        anchor=place[branch.anchor],
        nodes=[place[index] for index in branch.nodes],
        weight=branch.weight,
        baseline=branch.baseline,
        predictor_version=branch.predictor_version,
        score_stamp=branch.stamp,
        speculative=branch.speculative,
        heir_of=branch.heir_of,
        outcome=branch.outcome,
        ended=branch.ended,
    )
