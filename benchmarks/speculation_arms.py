"""One arm of the speculation benchmark: a rule with a bound D, on a fleet of so many slots and trees.

    warm-up until `warm` tokens ─▶ measured until `tokens` more are accepted ─▶ occupancy, waste, time
                                   every finished tree ─▶ outcomes, tokens, anchors chosen

All arms of a cell have the same prompts, the same seeds of continuations, slots, trees in flight,
continuations per tree, and latencies by turn; they differ in rule and D only.

*The success predictor* has learned from flat sampling of other prompts before anything starts, the same in
all arms, and goes on learning in each. *Trees in flight* are at most what the work-ahead bound allows,
(K + 1) · batch, with batches of a sixteenth of it and an update that takes no time. *Prefetch* is 0 in all
arms: a lease that lies queued at an actor while its tree goes on is too old when its turn comes.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

from allocator.budgets.fixed import FixedBudget
from allocator.rules.flat import FlatRule
from allocator.settings import GC_THRESHOLD, Settings
from benchmarks.fleet import Faults, Fleet, FleetConfig
from benchmarks.fleet_population import PopulationWorld, Timed
from benchmarks.foresight import Agreement
from benchmarks.latencies import NoTail, frozen
from benchmarks.population import C, Population
from benchmarks.population_search import Search
from common.config_allocator import (
    BudgetConfig,
    PredictorConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRuleConfig,
    UucbRuleConfig,
)
from common.messages import Message, TreeReady
from common.nouns import Tree
from common.predictor import Predictor
from common.predictors import make_predictor

CONTINUATIONS = 64
"""Per tree: with eight slots to a tree each of them runs eight, so that flat sampling keeps them busy to its
stragglers. The group of DeepSeekMath (arXiv 2402.03300)."""
ROUND_TRIP_S = 0.01
"""Mean time to the allocator and back, for turns of one second."""
SLOTS_PER_ACTOR = 8
WARM = 1.5
"""Trees finished before anything is measured, for each in flight: those that began together have parted."""
POPULATION: Population = C
PREDICTOR = PredictorConfig(name="shared")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What all arms of a comparison share."""

    slots: int
    ratio: float
    """Trees in flight per slot."""
    tail: bool
    """Whether latencies are heavy-tailed; else every turn takes as long."""
    continuations: int = CONTINUATIONS
    storm: bool = False
    """Whether turns fail, leases are declined, actors die and freeze, and the policy moves: see `STORM` and
    `DRIFT`."""

    @property
    def trees(self) -> int:
        return max(1, round(self.slots * self.ratio))

    @property
    def batch(self) -> int:
        return max(1, self.trees // 16)


STORM = Faults(
    lost=0.002, duplicated=0.005, failed=0.005, declined=0.002, actor_life_s=600, actor_pause=0.0005
)
"""A bad day: every actor dead within ten minutes, one turn in two hundred lost."""
DRIFT = 0.5
"""Probits by which all prompts have moved when the learner has trained on as many trees as are in flight."""
LESSONS, LESSON_PROMPTS, LESSON_CONTINUATIONS = 16, 32, 8
"""Waves, prompts of each, and continuations of each prompt that the predictor learns from beforehand."""
LESSON_SEED = 7_777
"""Its prompts are nobody else's."""


class Rules(Protocol):
    """Makes the configuration of a rule."""

    def __call__(self) -> RuleConfig: ...


RULES: dict[str, Rules] = {
    "flat": RuleConfig,
    "uucb": UucbRuleConfig,
    "trace": TraceRuleConfig,
    "random": lambda: RandomRuleConfig(chains=2, expansions=1),
}
"""`random` with rounds of two, so that 64 continuations are 2 chains and 31 rounds."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What is kept of a finished tree: one entry for each continuation, by number."""

    wins: tuple[bool | None, ...]
    """None where it has no outcome."""
    tokens: tuple[int, ...]
    """Action tokens it sampled."""
    anchors: tuple[tuple[int, int], ...]
    """(owner, offset) of its anchor."""

    def outcomes(self, tokens: float = math.inf) -> list[bool]:
        """Outcomes of the first continuations, as many as `tokens` pay for, at least one."""
        found: list[bool] = []
        spent = 0
        for win, cost in zip(self.wins, self.tokens, strict=True):
            spent += cost
            if found and spent > tokens:
                break
            found += [] if win is None else [win]
        return found

    def rifb(self, tokens: float = math.inf) -> float:
        """2 · √(p̂ (1 − p̂)) over those outcomes: the mean |advantage| of GRPO."""
        found = self.outcomes(tokens)
        share = sum(found) / len(found)
        return 2 * math.sqrt(share * (1 - share))

    def mixed(self, tokens: float = math.inf) -> bool:
        """Whether both outcomes are among them."""
        return len(set(self.outcomes(tokens))) == 2


def grown(tree: Tree) -> Grown:
    """What to keep of `tree`."""
    nodes = tree.nodes
    return Grown(
        tuple(None if c.outcome is None else c.outcome.raw_reward > 0.5 for c in tree.continuations),
        tuple(sum(nodes[i].turn.num_action_tokens for i in c.nodes) for c in tree.continuations),
        tuple((nodes[c.anchor].lease, nodes[c.anchor].offset) for c in tree.continuations),
    )


class Watched(Fleet):
    """A fleet that keeps what its learner was sent, and counts accepted tokens."""

    grown: dict[int, Grown]
    tokens: int

    @classmethod
    def of(
        cls, cell: Cell, rule: str, staleness: int, seed: int, predictor: Predictor | None = None
    ) -> Watched:
        """The fleet of one arm, before its first event."""
        settings = Settings(
            seed=seed, steps=1 << 40, batch_trees=cell.batch,
            max_policy_lag=max(0, cell.trees // cell.batch - 1), max_score_staleness=staleness,
            lease_deadline_s=1e4, heartbeat_s=10.0, dead_after_s=1e3,
        )  # fmt: skip
        per_actor = min(SLOTS_PER_ACTOR, cell.slots)
        config = FleetConfig(
            actors=cell.slots // per_actor, slots=per_actor, prefetch=0, latency_s=ROUND_TRIP_S / 2,
            step_s=0.0, commit_every=1, credit=2 * cell.trees + 2 * cell.batch, beat_s=10.0, join_over_s=0.1,
            faults=STORM if cell.storm else Faults(),
        )  # fmt: skip
        latency: Timed = frozen() if cell.tail else NoTail()
        drift = DRIFT * cell.batch / cell.trees if cell.storm else 0.0
        world = PopulationWorld(POPULATION, latency, drift)
        budget = BudgetConfig(continuations=cell.continuations)
        fleet = cls(settings, config, RULES[rule](), budget, seed, world=world, predictor=predictor)
        fleet.hashed = False
        fleet.grown, fleet.tokens = {}, 0
        return fleet

    def heard(self, key: str, message: Message, ack: bool, records: list[Any]) -> None:
        """Count what was accepted."""
        self.tokens += sum(fields["tokens"] for kind, fields in records if kind == "turn_accepted")

    def arrived(self, peer: str, message: Message) -> None:
        """Keep what reached the learner."""
        if isinstance(message, TreeReady):
            self.grown[message.tree.id] = grown(message.tree)


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm, measured."""

    useful: float
    """Share of all slot-seconds in which tokens were sampled that were accepted."""
    occupied: float
    """Share in which anything was run; the rest is idle."""
    seconds: float
    """Simulated, for the measured tokens."""
    revoked: float
    """Of leases issued."""
    declined: float
    speculative: float
    changed: float
    """Decisions that news changed, of those made."""
    agreement: float
    trees: dict[int, Grown]
    cpu_s: float
    events: int

    @property
    def tokens_per_tree(self) -> float:
        return sum(sum(tree.tokens) for tree in self.trees.values()) / len(self.trees)


def lessons() -> dict[str, Any]:
    """The state of a predictor that has learned from flat sampling."""
    predictor = make_predictor(PREDICTOR)
    search = Search(
        POPULATION, FlatRule(), FixedBudget(LESSON_CONTINUATIONS), predictor, batch=LESSON_PROMPTS,
        seed=LESSON_SEED,
    )  # fmt: skip
    for _ in range(LESSONS):
        search.wave()
    for version, pins in predictor.pinned().items():  # of continuations that will never run
        for _ in range(pins):
            predictor.unpin(version)
    return predictor.to_state()


def measure(
    cell: Cell, rule: str, staleness: int, seed: int, tokens: int, learned: dict[str, Any], look: int = 8
) -> Measured:
    """Simulate one arm until `tokens` are accepted after a warm-up.

    Args:
        learned: what `lessons` returned.
        look: one decision in so many is compared with what the synchronous search would have chosen; 0 =
            none is.
    """
    predictor = make_predictor(PREDICTOR)
    predictor.from_state(learned)
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        return _measure(Watched.of(cell, rule, staleness, seed, predictor), cell, tokens, look)
    finally:
        gc.set_threshold(*thresholds)


def _measure(fleet: Watched, cell: Cell, tokens: int, look: int) -> Measured:
    began = time.process_time()
    agreement = None
    forest = fleet.core.state.forest
    if look and forest.rule.reads:
        assert isinstance(fleet.world, PopulationWorld)
        agreement = forest.watch = Agreement(forest.rule, fleet.world, look)
    fleet.run(until=lambda: len(fleet.grown) >= WARM * cell.trees)
    now, slots, start, before = fleet.now, fleet.slot_seconds, fleet.tokens, fleet.core.stats()
    fleet.run(until=lambda: fleet.tokens >= start + tokens)
    after = fleet.core.stats()
    seconds = fleet.now - now
    occupied = (fleet.slot_seconds - slots) / (cell.slots * seconds)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    wasted = change.get("events/crossed_tokens", 0) + change.get("events/discarded_tokens", 0)
    accepted = fleet.tokens - start
    issued, made = max(1, change["leases/issued"]), max(1, change["decisions/made"])
    return Measured(
        useful=occupied * accepted / (accepted + wasted),
        occupied=occupied,
        seconds=seconds * tokens / accepted,
        revoked=change["leases/revoked"] / issued,
        declined=change["leases/declined"] / issued,
        speculative=after["leases/speculative_share"],
        changed=(change["decisions/changed_by_news"] + change["decisions/unlocked_by_news"]) / made,
        agreement=agreement.share if agreement is not None else 1.0,
        trees=fleet.grown,
        cpu_s=time.process_time() - began,
        events=fleet.events,
    )
