"""What can be said of a node: the decision behind it and all that stood beside it, as plain frozen data.

Made by `explain`, told by `explain_text`, and written as JSON by `role=replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Weighed:
    """An anchor as the rule saw it."""

    node: int
    depth: int
    in_flight: int
    """Outstanding continuations that started there."""
    wins: float
    """Returns in [0, 1] of the finished continuations that passed through it or started there, summed."""
    trials: int
    mean: float
    """Success predicted for a fresh continuation, with the newest predictor."""
    std: float
    total: float | None
    """What the rule compared, or the probability to be drawn; None where it does not weigh the anchor."""
    terms: dict[str, float]
    started: list[int]
    """Continuations that the decision starts there."""
    stopped: list[int]
    """Continuations that wait there at their horizon, and that the decision ends."""


@dataclass(frozen=True, slots=True)
class Running:
    """A continuation that was outstanding."""

    number: int
    anchor: int
    turns: int
    state: str


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of the rule: which of how many, and how likely that was."""

    options: int
    drawn: int
    probability: float


@dataclass(frozen=True, slots=True)
class News:
    """Outcomes that came since the decision before, and what the rule would have decided without them."""

    continuations: list[int]
    anchors: list[int]
    """Anchors it would have chosen; empty = it would have waited, or closed the tree."""
    changed: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """A tree right before one of its decisions, and the decision."""

    decision: int
    weighs: bool
    """Whether the rule scores anchors here."""
    anchors: list[Weighed]
    """Those the rule weighed, best first, then all others in canonical order."""
    draws: list[Draw]
    running: list[Running]
    stamp: int
    age: int
    predictor_version: int
    allowance: int
    spent: int
    news: News | None
    """None where no outcome came, or the rule reads none."""

    def numbered(self, place: Mapping[int, int]) -> Sight:
        """With canonical nodes."""
        news = self.news and replace(self.news, anchors=[place[index] for index in self.news.anchors])
        return replace(
            self,
            anchors=[replace(a, node=place[a.node]) for a in self.anchors],
            running=[replace(r, anchor=place[r.anchor]) for r in self.running],
            news=news,
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The continuation that sampled a node, with all that was fixed when it was decided."""

    number: int
    anchor: int
    turn: int
    """Which of its turns the node is, from 1."""
    turns: int
    group: int
    horizon: int
    heir_of: int
    weight: float
    baseline: float | None
    predictor_version: int
    stamp: int
    speculative: bool
    age_at_start: int | None
    """Events that the decision had not seen when an actor began with it."""
    attempts: list[str]
    """How each attempt ended."""
    ended: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt whose allowance was named together with others."""

    tree: int
    mean: float
    std: float
    allowance: int


@dataclass(frozen=True, slots=True)
class Extra:
    """Continuations that the budget added when the rule was done."""

    decision: int
    """The one they made possible."""
    continuations: int
    wins: float
    trials: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many continuations a prompt got, and what the budget knew of it."""

    first: int
    mean: float
    """Success predicted at the root before anything was sampled."""
    std: float
    predictor_version: int
    together: list[Candidate]
    """All whose allowances were named at once, this one among them."""
    budget_stats: dict[str, float]
    extras: list[Extra]
    spent: int
    weights: list[float]
    """Of its continuations, heirs left out, by number."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a node is where it is. `allowance` for a root, `owner` and `sight` for any other node."""

    tree: int
    node: int
    task: str
    wave: int
    rule: str
    reads: list[str]
    budget: str
    bound: int
    """D, `allocator.max_score_staleness`."""
    allowance: Allowance | None = None
    owner: Owner | None = None
    sight: Sight | None = None
