"""What a branch rule is: a pure function from a tree as it stands to the next decision.

A decision may start continuations (`picks`, possibly a whole round or level at once), give a path that
waits at its horizon to heirs or stop it, wait for what is still running, or say that the tree is complete.
A rule keeps no state: whatever it needs is in the view, in canonical order, so that the same tree gives the
same decision whatever the order in which messages arrived.

    scores at every K turns    picks with `horizon=K`; the ends are the branches whose `ended` is "horizon"
    waiting for a level        return WAIT until the branches looked at have ended
    going on from a horizon    Pick(anchor=last node, heir_of=number); heirs share the weight of their parent
    stopping a path            Decision(stops=(Stop(number, reward),))
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.nouns import NO_LEASE, Node, Outcome, RewardSource, TurnStatus
from common.predictor import Prediction
from common.prefix import Tally

OPEN = TurnStatus.OPEN
"""By this name it is looked up in a fifth of the time, and that is done for each turn."""


class EventKind(enum.Enum):
    """What a rule may read of a tree; the score clock counts the kinds its rule reads."""

    NODE = "node"
    SCORE = "score"
    OUTCOME = "outcome"
    PREDICTOR = "predictor"


class Pick(msgspec.Struct, frozen=True):
    """One more continuation from `anchor`."""

    anchor: int
    group: int = 0
    """A label of the rule's own (a chain, an arm), kept with the branch."""
    horizon: int = 0
    """Turns after which the path comes back to the rule; 0 = run to the end."""
    heir_of: int = NO_LEASE
    """Number of the branch whose horizon this one continues. All heirs of a branch come in one decision."""


class Stop(msgspec.Struct, frozen=True):
    """End a path that waits at its horizon."""

    number: int
    reward: float
    """What the rule says in place of the rest of the path; what its turns had earned comes on top."""
    source: RewardSource = RewardSource.PRUNE_RULE
    """`PSEUDO_REWARD` where the reward is a guess at what would have come. Neither is a target of the success
    predictor."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Why an anchor was or was not chosen, for `role=replay`."""

    anchor: int
    total: float
    """What the rule compares; for a rule that draws, the probability."""
    terms: Mapping[str, float]
    """What the total is made of, by name."""


class Draws(abc.ABC):
    """Where a rule's chance comes from; tests enumerate it."""

    @abc.abstractmethod
    def index(self, count: int) -> int:
        """Uniform in `[0, count)`."""

    @abc.abstractmethod
    def weighted(self, weights: Sequence[float]) -> int:
        """An index, with probability proportional to its weight (≥ 0, one of them above 0)."""


class Decision(msgspec.Struct, frozen=True):
    """What the rule wants now. Empty and not complete = wait for what is outstanding."""

    picks: tuple[Pick, ...] = ()
    stops: tuple[Stop, ...] = ()
    complete: bool = False


WAIT = Decision()
COMPLETE = Decision(complete=True)


class BranchView(Protocol):
    """A continuation as a rule sees it."""

    @property
    def number(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def anchor(self) -> int: ...
    @property
    def nodes(self) -> Sequence[int]:
        """The nodes it has sampled so far, in order."""

    @property
    def outcome(self) -> Outcome | None: ...
    @property
    def ended(self) -> str:
        """Empty while outstanding; then `finished`, `horizon`, `stopped`, or why it was dropped."""


def open_turns(node: Callable[[int], Node], branches: Iterable[BranchView]) -> list[int]:
    """The turns of these continuations that may be anchors, in order: of each all but perhaps the last one,
    since nothing is sampled behind the end of the world."""
    found: list[int] = []
    for branch in branches:
        nodes = branch.nodes
        if nodes:
            found += nodes if node(nodes[-1]).turn.status is OPEN else nodes[:-1]
    return found


class TreeView(Protocol):
    """A tree as a rule sees it. Branches come by number, anchors by (owner, offset): canonical order."""

    @property
    def id(self) -> int: ...
    @property
    def wave(self) -> int: ...
    @property
    def branches(self) -> Mapping[int, BranchView]: ...
    @property
    def allowance(self) -> int | None:
        """Continuations that the budget gave the prompt so far; known whenever a rule is asked."""

    @property
    def budget_left(self) -> int:
        """Continuations that may still be started; heirs cost nothing."""

    def node(self, index: int) -> Node: ...
    def anchors(self) -> list[int]:
        """Root and all open turns, in canonical order."""

    def in_flight(self, index: int) -> int:
        """Outstanding continuations of this anchor: they count as visits, so that leases spread."""

    def tally(self, index: int) -> Tally:
        """Outcomes so far of the continuations that passed through a node or started there."""

    def predict(self, index: int) -> Prediction:
        """Success predicted now for a fresh continuation from a node, with the newest predictor."""

    def draws(self) -> Draws:
        """Draws keyed on (run seed, tree, decision number)."""


class Rule(abc.ABC):
    """Which anchor next, or wait."""

    name: str
    reads: frozenset[EventKind]
    """Kinds of events a decision depends on. Empty: never throttled by score staleness."""
    requires: frozenset[str] = frozenset()
    """Capabilities an actor must have (fields of `Capabilities`), else its hello is refused."""
    turns_need: frozenset[str] = frozenset()
    """Fields of a turn that must not be empty, else the run ends with a sentence at the first one that is."""

    @abc.abstractmethod
    def decide(self, view: TreeView) -> Decision:
        """The next decision. Must not be WAIT when nothing is outstanding."""

    def explain(self, view: TreeView) -> list[Scored]:
        """The anchors that `decide` would weigh now, best first. Empty for a rule that weighs nothing."""
        return []
