"""The bias of the local policy gradient at each prefix, for every branch rule and credit, by enumeration.

    python -m benchmarks.bias

One tree of a small world (`benchmarks.tabular`) is grown in every way it can be: all actions, all draws. Each
finished tree goes through the learner's own credit and rows; what a token is paid, times its weight, times
the score of its action, is summed by prefix and averaged with the probabilities. That is the expected
gradient, and it is compared with two others, computed apart from credit and rows:

    run          Σ over sampled turns of weight at grant x score x return of the continuation that sampled it:
                 each path's own return, given the others of its tree, where a rule may have stopped it
    environment  Σ over sampled turns of weight at grant x ∇V: the environment's own values, by recursion
    rivals       Σ over sampled turns of score x what the whole tree brought: for rules that stop or draw
                 paths, where an action of one path also decides what becomes of the others

The first two weigh a prefix as often as the allocator led there. Where no path is stopped they must agree,
and `run` is then no definition but proven. `rivals` is compared with `run` only for rules whose leases all
descend from the prompt, so that the tree's return is one sum of fixed weight. A bias is |expected − true| /
|true| over all prefixes together. Credits that choose their own scale (a z-score has one) are first scaled to
fit best, all prefixes alike, which flatters them. `direction` is the greatest angle, in degrees, between the
expected and the true gradient at one prefix with three actions or more: what no reweighting of prefixes could
explain. The policy is the one that sampled; what its age does to a credit is not measured here.

No sampling, hence no error bars and no seeds: the same numbers on every machine, up to rounding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from allocator.budgets import make_budget
from allocator.rules import make_rule
from allocator.settings import Settings
from benchmarks import results, tables
from benchmarks.cli import guarded
from benchmarks.tabular import NOW, EnumeratedForest, History, World, enumerate_all, grow, history
from common.config_allocator import (
    BudgetConfig,
    EntropyRuleConfig,
    IgrpoRuleConfig,
    PatrRuleConfig,
    PredictorConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRuleConfig,
    UucbRuleConfig,
)
from common.config_learner import CreditConfig, NodeWeight
from common.nouns import NO_LEASE, ROOT, Tree
from common.predictor import Predictor, Target
from common.predictors import make_predictor
from common.prefix import Prefix, Tally
from learner.credit import CREDITS, Evidence
from learner.rows import Clock, RowCounts, build_rows

Gradient = dict[History, list[float]]

BROAD = World(
    policy={(): (0.3, 0.3, 0.4), (0,): (0.5, 0.5), (1,): (0.7, 0.3), (2,): (0.2, 0.8)},
    rewards={(0, 0): 1.0, (1, 1): 1.0, (2, 0): 1.0},
)
"""Two turns, three actions at the prompt; values 0.5, 0.3 and 0.2 below it."""
DEEP = World(
    policy={(): (0.3, 0.3, 0.4), (0,): (0.5, 0.5), (1,): (0.7, 0.3), (0, 0): (0.6, 0.4), (1, 1): (0.5, 0.5)},
    rewards={(2,): 1.0, (0,): 0.25, (0, 1): 0.5, (0, 0, 0): 0.75, (1, 1, 1): 1.0},
)
"""Up to three turns; one action wins at once, another is paid on the way. For rules that look at paths turn
by turn."""


@dataclass(frozen=True)
class Arm:
    """One rule as it is enumerated; small numbers, since every continuation multiplies the ways to go."""

    name: str
    rule: RuleConfig
    continuations: int
    world: World = BROAD
    lockstep: bool = False
    """Decisions are made while continuations run, on what there is so far."""


ARMS = (
    Arm("flat", RuleConfig(), 3),
    Arm("random", RandomRuleConfig(chains=1, expansions=2), 3),
    Arm("random, running", RandomRuleConfig(chains=1, expansions=2), 3, lockstep=True),
    Arm("entropy (ARPO)", EntropyRuleConfig(initial=1, beam=2, threshold=0.55), 3),
    Arm("entropy (AT²PO)", EntropyRuleConfig(form="at2po", initial=1, beam=2), 3, DEEP),
    Arm("uucb", UucbRuleConfig(initial=1, exploration=0.5), 4),
    Arm("uucb, running", UucbRuleConfig(initial=1, exploration=0.5), 3, lockstep=True),
    Arm("trace", TraceRuleConfig(per_root=1), 4),
    Arm("patr", PatrRuleConfig(interval=1, top_k=1, children=2, margin=0.1), 2, DEEP),
    Arm("patr, every two turns", PatrRuleConfig(interval=2, top_k=1, children=2, margin=0.0), 2, DEEP),
    Arm("igrpo", IgrpoRuleConfig(max_levels=3), 2, DEEP),
)

WEIGHTS: Mapping[str, tuple[NodeWeight, ...]] = {
    "granted": (NodeWeight.GRANTED, NodeWeight.LEAF_SHARE, NodeWeight.ONCE),
    "tree_vtrace": (NodeWeight.GRANTED,),
    "grpo": (NodeWeight.LEAF_SHARE, NodeWeight.GRANTED, NodeWeight.ONCE),
    "dr_grpo": (NodeWeight.LEAF_SHARE, NodeWeight.GRANTED),
    "rloo": (NodeWeight.LEAF_SHARE, NodeWeight.GRANTED),
    "edge": (NodeWeight.ONCE, NodeWeight.GRANTED),
    "edge (path)": (NodeWeight.LEAF_SHARE,),
}
"""What a shared token is worth: each credit's own first."""
SETTINGS: Mapping[str, CreditConfig] = {
    **{name: CreditConfig(name=name) for name in CREDITS},
    "edge (path)": CreditConfig(name="edge", edge_weight="path"),
}
COMPETING = ("patr", "igrpo")
"""Rules under which a path may cost another its place."""
OWN_SCALE = frozenset({"grpo", "dr_grpo", "edge (path)"})
"""A z-score has a scale of its own, a mean that holds the branch itself takes (n − 1) / n, and weights by the
forks that came about are no weights at grant."""


# -------------------------------------------------------------------------------------------- one gradient


def expected_gradient(tree: Tree, world: World, credit: str, node_weight: NodeWeight) -> Gradient:
    """What the learner's rows say: Σ advantage x weight x score, by prefix. The policy is the one that
    sampled."""
    settings, on_policy = SETTINGS[credit], Evidence({node.index: 0.0 for node in tree.nodes})
    credits = CREDITS[settings.name].function(tree, settings, on_policy)
    found: Gradient = {}
    for row in build_rows(tree, credits, node_weight, Clock(NOW, 0), RowCounts()):
        actions: list[int] = []
        for at in range(1, row.length, 2):  # the prompt, then action and observation in turn
            here, action = tuple(actions), int(row.ids[at])
            if row.trained[at]:
                paid = float(row.advantages[at]) * float(row.weights[at])
                _add(found, here, [paid * s for s in world.score(here, action)])
            actions.append(action)
    return found


def run_gradient(tree: Tree, world: World) -> Gradient:
    """The objective actually run, without baselines: weight x score x what the continuation brought."""
    found: Gradient = {}
    for here, action, weight, number in _sampled(tree):
        brought = _return(tree, number)
        if brought is not None:
            _add(found, here, [weight * brought * s for s in world.score(here, action)])
    return found


def rivals_gradient(tree: Tree, world: World) -> Gradient:
    """What the tree brought as a whole, for every action in it."""
    roots = [(c.weight, _return(tree, c.number)) for c in tree.continuations if c.heir_of == NO_LEASE]
    brought = math.fsum(weight * value for weight, value in roots if value is not None)
    found: Gradient = {}
    for here, action, _, _ in _sampled(tree):
        _add(found, here, [brought * s for s in world.score(here, action)])
    return found


def environment_gradient(tree: Tree, world: World) -> Gradient:
    """The environment's own values at the prefixes that were visited."""
    found: Gradient = {}
    for here, _, weight, _ in _sampled(tree):
        _add(found, here, [weight * g for g in world.gradient(here)])
    return found


def _sampled(tree: Tree) -> Iterator[tuple[History, int, float, int]]:
    """(prefix, action, weight at grant, continuation) of every sampled turn."""
    weights = {c.number: c.weight for c in tree.continuations}
    for node in tree.nodes[ROOT + 1 :]:
        path = history(tree, node.index)
        yield path[:-1], path[-1], weights[node.lease], node.lease


def _return(tree: Tree, number: int) -> float | None:
    """What a continuation brought: its outcome, or what its turns earned and its heirs bring on average."""
    continuation = next(c for c in tree.continuations if c.number == number)
    if continuation.outcome is not None:
        return continuation.outcome.reward
    heirs = [_return(tree, c.number) for c in tree.continuations if c.heir_of == number]
    known = [heir for heir in heirs if heir is not None]
    if not known or len(known) < len(heirs):
        return None
    return sum(tree.nodes[i].turn.reward for i in continuation.nodes) + math.fsum(known) / len(known)


def _add(total: Gradient, here: History, more: list[float]) -> None:
    total[here] = [a + b for a, b in zip(total.get(here, [0.0] * len(more)), more, strict=True)]


# --------------------------------------------------------------------------------------------- expectation


def taught(name: str) -> Predictor:
    """A predictor that has learnt something, wrong here and different at each depth: a baseline worth having
    is no condition for being unbiased."""
    predictor = make_predictor(PredictorConfig(name=name))
    targets = [
        Target(Prefix(depth, tree=Tally(float(wins), 2)), 0.5, float(i % 4 < 3 - depth))
        for depth in range(3)
        for wins in range(3)
        for i in range(12)
    ]
    predictor.update(targets)
    return predictor


Estimate = Callable[[Tree, World], Gradient]


def expectations(arm: Arm, predictor: Predictor, estimates: Mapping[str, Estimate]) -> dict[str, Gradient]:
    """The expected value of each estimate over all trees.

    Raises RuntimeError when the probabilities do not sum to 1: something was not enumerated.
    """
    budget = make_budget(BudgetConfig(continuations=arm.continuations))
    forest = EnumeratedForest(Settings(), make_rule(arm.rule), budget, predictor)
    totals: dict[str, dict[History, list[float]]] = {name: {} for name in estimates}
    mass = 0.0
    for probability, tree in enumerate_all(
        lambda chooser: grow(forest, arm.world, chooser, lockstep=arm.lockstep)[0]
    ):
        mass += probability
        for name, estimate in estimates.items():
            for here, value in estimate(tree, arm.world).items():
                _add(totals[name], here, [probability * v for v in value])
    if abs(mass - 1.0) > 1e-9:
        raise RuntimeError(f"the probabilities of {arm.name} sum to {mass}")
    return totals


def bias(found: Gradient, true: Gradient, *, scaled: bool) -> float:
    """|found − true| / |true| over all prefixes; `scaled` = after the one factor that fits best."""
    pairs = _pairs(found, true)
    power = math.fsum(t * t for _, t in pairs)
    factor = 1.0
    if scaled:
        own = math.fsum(f * f for f, _ in pairs)
        factor = math.fsum(f * t for f, t in pairs) / own if own else 0.0
    return math.sqrt(math.fsum((factor * f - t) ** 2 for f, t in pairs) / power)


def direction(found: Gradient, true: Gradient) -> float:
    """Greatest angle in degrees between the two at one prefix with three actions or more."""
    worst = 0.0
    for here, target in true.items():
        value = found.get(here, [0.0] * len(target))
        sizes = math.hypot(*value) * math.hypot(*target)
        if len(target) > 2 and sizes > 0:
            cosine = math.fsum(v * t for v, t in zip(value, target, strict=True)) / sizes
            worst = max(worst, math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))
    return worst


def _pairs(found: Gradient, true: Gradient) -> list[tuple[float, float]]:
    return [
        pair
        for here, target in true.items()
        for pair in zip(found.get(here, [0.0] * len(target)), target, strict=True)
    ]


def measure(arm: Arm, predictor: str) -> list[dict[str, object]]:
    """All credits of one arm."""
    combinations = [(credit, weight) for credit, weights in WEIGHTS.items() for weight in weights]
    estimates: dict[str, Estimate] = {
        "run": run_gradient,
        "environment": environment_gradient,
        "rivals": rivals_gradient,
    }
    for credit, weight in combinations:
        estimates[f"{credit}/{weight.value}"] = lambda tree, world, c=credit, w=weight: (  # type: ignore[misc]
            expected_gradient(tree, world, c, w)
        )
    totals = expectations(arm, taught(predictor), estimates)
    run, environment = totals["run"], totals["environment"]
    stopped = bias(run, environment, scaled=False)
    competing = arm.rule.name in COMPETING
    rivals = bias(run, totals["rivals"], scaled=False) if competing else 0.0
    rows: list[dict[str, object]] = []
    for credit, weight in combinations:
        found, scaled = totals[f"{credit}/{weight.value}"], credit in OWN_SCALE
        rows.append(
            {
                "rule": arm.name,
                "predictor": predictor,
                "credit": credit,
                "node_weight": weight.value,
                "bias_run": bias(found, run, scaled=scaled),
                "bias_environment": bias(found, environment, scaled=scaled),
                "direction": direction(found, run),
                "run_against_environment": stopped,
                "run_against_rivals": rivals,
            }
        )
    return rows


def greatest(rows: Sequence[Mapping[str, object]], credit: str) -> float:
    """The worst bias of a credit over all rules, with its own worth of a shared token."""
    own = WEIGHTS[credit][0].value
    return max(
        float(str(row["bias_run"])) for row in rows if (row["credit"], row["node_weight"]) == (credit, own)
    )


def main(words: list[str]) -> int:
    """Enumerate, write, print; returns the exit code."""
    session = results.begin("bias", words)
    runs = [row for predictor in ("history", "shared") for arm in ARMS for row in measure(arm, predictor)]
    headline = {f"{name}_max": greatest(runs, name) for name in CREDITS}
    line = results.finish(session, headline, runs)
    tables.update_if_committed(results.RESULTS)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
