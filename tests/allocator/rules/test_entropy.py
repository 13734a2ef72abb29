"""`entropy`: both forms against slow versions of the published code, in small random worlds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from allocator.rules import arpo, at2po
from allocator.rules.base import WAIT, Decision, EventKind, Pick, Rule
from allocator.rules.entropy import EntropyRule
from common.config_allocator import EntropyRuleConfig
from common.errors import ConfigError
from common.nouns import ROOT
from common.seeds import derive_seed
from tests.allocator.rules.garden import Garden, Place, World, run_apart, run_mixed

START: Place = (-1, 0)
ARPO = EntropyRuleConfig(initial=4, beam=2, weight=2.0, vocabulary=20)
"""Weight and vocabulary such that entropy matters: chances from 0 to 1."""
AT2PO = EntropyRuleConfig(form="at2po", initial=3, beam=3)


def grown(config: EntropyRuleConfig, allowance: int, world: World) -> tuple[Garden, list[Place]]:
    garden = Garden(EntropyRule(config), allowance)
    run_apart(garden, world)
    return garden, [garden.place(branch.anchor) for branch in garden.tree.branches.values()]


# ------------------------------------------------------------------------------------------------- ARPO


def in_rounds(config: EntropyRuleConfig, allowance: int, world: World) -> list[Place]:
    """ARPO as its code has it: all active paths sample one turn, then each may be copied, round by round.

    A path is its list of turns, those it shares included. Draws are those of the allocator: one stream for the
    rounds since the last that branched.
    """
    anchors: list[Place] = [START] * min(config.initial, allowance)
    paths: list[list[Place]] = [[] for _ in anchors]
    started = [0] * len(anchors)
    decisions, active = 1, list(range(len(anchors)))
    rng = random.Random(derive_seed("rule", 0, 0, decisions))
    while active:
        still = []
        for path in active:
            offset = len(paths[path]) - started[path]
            if offset == world.breaks_after(path):
                continue
            paths[path].append((path, offset))
            if offset < world.length(path) - 1:
                still.append(path)
        new = []
        for path in still:
            now, first = (total(config, world, turn) for turn in (paths[path][-1], paths[path][0]))
            for _ in range(config.beam - 1):
                if len(anchors) + len(new) == allowance or now is None or first is None:
                    break
                if min(1.0, max(0.0, rng.random() - config.weight * (now - first))) <= config.threshold:
                    new.append(paths[path][:])
        for shared in new:
            anchors.append(shared[-1])
            started.append(len(shared))
            paths.append(shared)
            still.append(len(paths) - 1)
        if new:
            decisions += 1
            rng = random.Random(derive_seed("rule", 0, 0, decisions))
        active = still
    return anchors + [START] * (allowance - len(anchors))


def total(config: EntropyRuleConfig, world: World, turn: Place) -> float | None:
    entropies = world.entropies(*turn)[: config.window]
    return sum(entropies) / math.log(config.vocabulary) if entropies else None


@pytest.mark.parametrize("seed", range(60))
def test_arpo_branches_where_its_code_does_though_paths_run_to_their_ends_at_once(seed: int) -> None:
    config = EntropyRuleConfig(
        initial=1 + seed % 5, beam=1 + seed % 4, weight=2.0, vocabulary=20, window=20 - seed % 3
    )
    allowance = 3 + seed % 12
    _, anchors = grown(config, allowance, World(seed))
    assert anchors == in_rounds(config, allowance, World(seed))


def test_the_worlds_are_ones_where_a_wrong_branch_shows() -> None:
    places = [place for seed in range(60) for place in in_rounds(ARPO, 16, World(seed))]
    deep = [place for place in places if place[1] > 0]
    assert len(deep) > 50 and 0.1 < places.count(START) / len(places) < 0.9


def path_with(garden: Garden, *entropies: list[float]) -> list[int]:
    """A continuation whose turns have these entropies; the last one ends it."""
    branch = garden.start()
    nodes = [
        garden.turn(branch, entropies=each, last=each is entropies[-1], logprobs=[-1.0]) for each in entropies
    ]
    garden.end(branch, 1.0)
    return nodes


def test_the_chance_to_branch_grows_with_entropy_and_is_that_of_the_published_inequality() -> None:
    """The share of uniform U at which U − w · ΔH ≤ threshold, clipped or not, by counting."""
    for change in (-2.0, -0.8, 0.0, 0.3, 1.2, 3.0):
        config = EntropyRuleConfig(initial=1, weight=0.5, vocabulary=round(math.e**2), threshold=0.4)
        garden = Garden(EntropyRule(config), 4)
        nodes = path_with(garden, [3.0], [3.0 + change], [1.0])
        scored = {each.anchor: each for each in EntropyRule(config).explain(garden.tree)}
        delta = change / math.log(config.vocabulary)
        us = [(i + 0.5) / 10_000 for i in range(10_000)]
        share = sum(min(1.0, max(0.0, u - config.weight * delta)) <= config.threshold for u in us) / len(us)
        assert scored[nodes[1]].total == pytest.approx(share, abs=1e-3)
        assert scored[nodes[0]].total == pytest.approx(0.4), "the first turn is compared with itself"
        assert set(scored) == set(nodes[:2]), "behind the last turn there is nothing to continue"


def test_a_threshold_of_one_always_branches_and_of_zero_never_without_a_rise() -> None:
    """Below 1 the published clip changes nothing; at 1 it lets everything through, however certain."""
    for threshold, chance in ((1.0, 1.0), (0.0, 0.0)):
        rule = EntropyRule(EntropyRuleConfig(initial=1, threshold=threshold, weight=5.0))
        garden = Garden(rule, 3)
        nodes = path_with(garden, [3.0], [1.0], [1.0])
        assert {each.anchor: each.total for each in rule.explain(garden.tree)} == dict.fromkeys(
            nodes[:2], chance
        )
        assert garden.decide().picks[0].anchor == (nodes[0] if chance else ROOT)


def test_a_branch_is_compared_with_the_first_turn_of_the_trajectory_it_left() -> None:
    garden = Garden(EntropyRule(EntropyRuleConfig(initial=1, threshold=1.0)), 4)
    nodes = path_with(garden, [4.0], [1.0], [1.0])
    fork = garden.start(nodes[0], group=1)
    own = garden.turn(fork, entropies=[1.0, 2.0])
    scored = {each.anchor: each for each in EntropyRule(EntropyRuleConfig(initial=1)).explain(garden.tree)}
    first = scored[own].terms["first"]
    assert first == pytest.approx(4.0 / math.log(151_936)) and scored[own].terms["level"] == 2


def test_a_turn_whose_entropies_are_absent_was_never_scored_which_is_not_zero() -> None:
    """With threshold 1 every scored turn branches; here none can, so all goes to the prompt."""
    garden = Garden(EntropyRule(EntropyRuleConfig(initial=2, threshold=1.0)), 6)
    path_with(garden, [1.0], [], [1.0])
    path_with(garden, [], [1.0], [1.0])
    decision = garden.decide()
    assert [pick.anchor for pick in decision.picks] == [1], (
        "the one turn that has entropies, as has its first"
    )
    (fork,) = garden.grow(*decision.picks)
    garden.drop(fork)
    assert garden.decide().picks == (Pick(ROOT, group=arpo.LEFTOVER),) * 3


def test_only_the_first_tokens_of_a_turn_count_and_they_are_summed() -> None:
    config = EntropyRuleConfig(initial=1, window=3, vocabulary=20)
    garden = Garden(EntropyRule(config), 3)
    nodes = path_with(garden, [1.0, 1.0, 1.0, 50.0], [1.0])
    assert arpo.uncertainty(config, garden.tree.nodes[nodes[0]]) == pytest.approx(3 / math.log(20))


def test_a_level_waits_for_the_paths_that_may_still_bring_a_turn_of_it_and_for_no_others() -> None:
    garden = Garden(EntropyRule(EntropyRuleConfig(initial=3, threshold=1.0)), 8)
    first, second, third = garden.grow(*[Pick(ROOT)] * 3)
    assert garden.decide() == WAIT
    garden.turn(first, entropies=[1.0])
    garden.turn(first, entropies=[1.0])
    garden.turn(second, entropies=[1.0], last=True)
    assert garden.decide() == WAIT, "the third may have a turn to branch at"
    garden.turn(third, entropies=[1.0])
    decision = garden.decide()
    assert [pick.anchor for pick in decision.picks] == [first.nodes[0], third.nodes[0]]
    forks = garden.grow(*decision.picks)
    assert garden.decide() == WAIT, "the level below: its forks have no turn yet"
    for fork in forks:
        garden.turn(fork, entropies=[1.0], last=True)
    garden.turn(third, entropies=[1.0], last=True)
    (pick,) = garden.decide().picks
    assert pick.anchor == first.nodes[1], "nobody has ended, but who could was seen to end"


def test_when_every_path_ended_with_its_first_turn_the_rest_starts_at_the_prompt() -> None:
    for config in (ARPO, AT2PO):
        _, anchors = grown(config, 9, World(3, dropped=0.0, longest=1))
        assert anchors == [START] * 9


# ------------------------------------------------------------------------------------------------ AT²PO


@dataclass(eq=False)
class Seen:
    """A turn as the published code keeps it."""

    turn: Place | None
    parent: Seen | None
    surprisal: float = 0.0
    leaf: bool = False
    children: list[Seen] = field(default_factory=list)


def again(config: EntropyRuleConfig, allowance: int, world: World) -> list[Place]:
    """AT²PO as its code has it: a chosen turn is taken back, and a sibling of it sampled to its end."""
    root = Seen(None, None)
    anchors: list[Place] = []

    def chain(parent: Seen) -> None:
        number = len(anchors)
        anchors.append(parent.turn or START)
        for offset in range(world.length(number)):
            if offset == world.breaks_after(number):
                return
            logprobs = world.logprobs(number, offset)
            child = Seen((number, offset), parent, -sum(logprobs) / len(logprobs))
            child.leaf = offset == world.length(number) - 1
            parent.children.append(child)
            parent = child

    def walk(node: Seen) -> list[Seen]:
        return [node, *(found for child in node.children for found in walk(child))]

    for _ in range(min(config.initial, allowance)):
        chain(root)
    while len(anchors) < allowance:
        candidates = [node for node in walk(root) if not node.leaf]
        candidates.sort(key=lambda node: node.turn or START)
        scores = {
            node: node.surprisal - config.sibling_penalty * max(0, len((node.parent or node).children) - 1)
            for node in candidates
        }
        best = sorted(candidates, key=lambda node: scores[node], reverse=True)
        while len(best) < config.beam:
            best = best + best
        for node in best[: min(config.beam, allowance - len(anchors))]:
            chain(node.parent or node)
    return anchors


@pytest.mark.parametrize("seed", range(60))
def test_at2po_samples_again_the_turns_that_its_code_takes(seed: int) -> None:
    penalty = (0.05, 0.5, 2.0)[seed % 3]
    config = EntropyRuleConfig(form="at2po", initial=1 + seed % 4, beam=1 + seed % 6, sibling_penalty=penalty)
    allowance = 3 + seed % 14
    _, anchors = grown(config, allowance, World(seed))
    assert anchors == again(config, allowance, World(seed))


def test_a_surprising_turn_is_sampled_again_from_where_it_began() -> None:
    garden = Garden(EntropyRule(EntropyRuleConfig(form="at2po", initial=1, beam=1)), 3)
    branch = garden.start()
    before = garden.turn(branch, logprobs=[-0.1])
    garden.turn(branch, logprobs=[-5.0, -3.0])
    garden.turn(branch, logprobs=[-9.0], last=True)
    garden.end(branch, 0.0)
    assert garden.decide().picks == (Pick(before, group=1),)
    (best, *others) = garden.forest.rule.explain(garden.tree)
    assert (best.anchor, best.total, best.terms["surprisal"]) == (before, 4.0, 4.0)
    assert [each.anchor for each in others] == [ROOT], (
        "one line an anchor, for the best turn that began there"
    )


def test_children_on_their_way_are_siblings_already() -> None:
    """So that leases granted while others run spread over the tree."""
    garden = Garden(EntropyRule(EntropyRuleConfig(form="at2po", initial=1, sibling_penalty=0.5)), 9)
    nodes = garden.path([0.5, 0.5], 1.0)

    def siblings() -> float:
        return next(s for s in at2po.ranked(AT2PO, garden.tree) if s.anchor == nodes[0]).terms["siblings"]

    assert siblings() == 0
    fork = garden.start(nodes[0], group=1)
    assert siblings() == 1
    garden.turn(fork)
    assert siblings() == 1, "its first turn takes its place"
    lost = garden.start(nodes[0], group=1)
    assert siblings() == 2
    garden.drop(lost)
    assert siblings() == 1, "it brought no child"


def test_a_turn_without_tokens_has_no_surprisal_and_is_no_candidate() -> None:
    garden = Garden(EntropyRule(AT2PO), 9)
    branch = garden.start()
    garden.turn(branch, logprobs=[])
    garden.turn(branch, logprobs=[-1.0], last=True)
    garden.end(branch, 0.0)
    assert [each.terms["depth"] for each in at2po.ranked(AT2PO, garden.tree)] == [0]


def test_an_iteration_waits_until_each_initial_trajectory_has_a_turn() -> None:
    garden = Garden(EntropyRule(AT2PO), 9)
    branches = garden.grow(*[Pick(ROOT)] * 3)
    for branch in branches:
        assert garden.decide() == WAIT
        garden.turn(branch)
    assert len(garden.decide().picks) == 3


# ----------------------------------------------------------------------------------------- both forms


def test_the_published_constants_are_the_defaults() -> None:
    arpo_defaults = EntropyRuleConfig()
    assert (arpo_defaults.initial, arpo_defaults.beam, arpo_defaults.window) == (8, 2, 20)
    assert (arpo_defaults.threshold, arpo_defaults.weight, arpo_defaults.sibling_penalty) == (0.5, 0.2, 0.05)


@pytest.mark.parametrize("config", [ARPO, AT2PO], ids=["arpo", "at2po"])
@pytest.mark.parametrize("seed", range(25))
def test_asked_at_any_time_it_spends_its_budget_and_no_more_and_waits_only_for_something(
    config: EntropyRuleConfig, seed: int
) -> None:
    garden = Garden(EntropyRule(config), 12)

    def check(decision: Decision) -> None:
        assert len(decision.picks) <= garden.tree.budget_left
        assert {pick.anchor for pick in decision.picks} <= set(garden.tree.anchors())

    run_mixed(garden, World(seed), seed, check)
    assert garden.tree.budget_left == 0 and len(garden.tree.branches) == 12


@pytest.mark.parametrize("seed", range(15))
def test_arpo_decides_the_same_in_whatever_order_its_paths_get_on(seed: int) -> None:
    """A level reads turns of itself and above only, all of which are there when it is decided."""
    garden = Garden(EntropyRule(ARPO), 12)
    run_mixed(garden, World(seed, dropped=0.0), seed, lambda decision: None)
    _, anchors = grown(ARPO, 12, World(seed, dropped=0.0))
    assert [garden.place(branch.anchor) for branch in garden.tree.branches.values()] == anchors


@pytest.mark.parametrize("config", [ARPO, AT2PO], ids=["arpo", "at2po"])
def test_it_reads_turns_alone_so_other_outcomes_change_nothing(config: EntropyRuleConfig) -> None:
    class Opposite(World):
        def reward(self, number: int) -> float:
            return 1 - super().reward(number)

    rule: Rule = EntropyRule(config)
    assert rule.reads == {EventKind.NODE} and not rule.requires
    for seed in range(10):
        assert grown(config, 12, World(seed))[1] == grown(config, 12, Opposite(seed))[1]


def test_it_explains_what_it_would_weigh_best_first() -> None:
    for config in (ARPO, AT2PO):
        garden = Garden(EntropyRule(config), 12)
        assert [each.anchor for each in garden.forest.rule.explain(garden.tree)] == [ROOT]
        for branch in garden.grow(*[Pick(ROOT)] * config.initial):
            for _ in range(2):
                garden.turn(branch, entropies=[1.0 + branch.number], logprobs=[-1.0 - branch.number])
            garden.turn(branch, last=True)
            garden.end(branch, 1.0)
        scored = garden.forest.rule.explain(garden.tree)
        assert all(a.total >= b.total for a, b in pairwise(scored))
        assert len({each.anchor for each in scored}) == len(scored) > 2


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"form": "arpa"}, "allocator.rule.form must be one of arpo, at2po"),
        ({"threshold": 1.5}, "allocator.rule.threshold must be in"),
        ({"window": 0}, "allocator.rule.window must be at least 1"),
        ({"vocabulary": 1}, "allocator.rule.vocabulary must be at least 2"),
        ({"sibling_penalty": -1.0}, "allocator.rule.sibling_penalty must be 0 or more"),
        ({"weight": math.inf}, "allocator.rule.weight must be a finite number"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EntropyRuleConfig(**wrong)  # type: ignore[arg-type]
