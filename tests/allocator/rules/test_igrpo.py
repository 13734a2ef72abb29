"""IGRPO against a slow literal search, its draws against enumeration, and its levels by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.draws import SeededDraws
from allocator.rules.base import COMPLETE, WAIT, Draws, EventKind
from allocator.rules.igrpo import IgrpoRule, draw, softmax
from common.config_allocator import IgrpoRuleConfig
from common.errors import ConfigError
from common.nouns import NO_LEASE, RewardSource
from tests.allocator.rules.level_search import LevelSearch, assert_same
from tests.allocator.rules.levels import Level, grow

PAPER = IgrpoRuleConfig()
SHORT = IgrpoRuleConfig(gamma=8.0, cap=2, max_levels=3)


class Script(Draws):
    """Chooses as told and remembers the weights it was asked with."""

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self.choices = list(choices)
        self.asked: list[list[float]] = []

    def index(self, count: int) -> int:
        raise AssertionError("no uniform draws here")

    def weighted(self, weights: Sequence[float]) -> int:
        self.asked.append(list(weights))
        return self.choices[len(self.asked) - 1] if len(self.asked) <= len(self.choices) else 0


# ------------------------------------------------------------------------------------------- whole trees


@pytest.mark.parametrize("config", [PAPER, SHORT], ids=["paper", "short"])
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faulty"])
def test_whole_trees_equal_a_plain_search_whatever_the_order_of_arrival(
    config: IgrpoRuleConfig, faults: bool
) -> None:
    for seed in range(8):
        runs = LevelSearch(config, 5, seed, faults=faults).tree(0, 0)
        for order in range(2):
            tree, _ = grow(config, 5, seed, order, faults=faults)
            assert tree is not None
            assert_same(tree, runs)


def test_the_toy_world_shows_every_answer_of_a_level() -> None:
    """Otherwise the comparison above would prove little."""
    ended, heirs, turns = set[str](), set[int](), set[int]()
    for seed in range(8):
        for run in LevelSearch(SHORT, 5, seed, faults=True).tree(0, 0):
            ended.add(run.ended)
            heirs.add(len(run.heirs))
            turns.add(run.own)
    assert ended == {"finished", "horizon", "stopped", "dropped: broken"} and heirs == {0, 1, 2}
    assert max(turns) > 1, "after the last level paths run to their end"


@pytest.mark.parametrize("staleness", [0, 3, 100])
def test_a_level_waits_for_all_its_paths_at_any_score_staleness_and_its_heirs_are_never_stale(
    staleness: int,
) -> None:
    for seed in range(4):
        tree, rig = grow(PAPER, 5, seed, 0, staleness=staleness)
        assert tree is not None
        assert_same(tree, LevelSearch(PAPER, 5, seed).tree(0, 0))
        assert rig.stat("leases/score_age_max") == 0 and rig.stat("leases/speculative_share") == 0
        assert rig.stat("events/given_back") == 0


def test_leaves_weigh_what_was_planned_heirs_cost_no_budget_and_no_level_is_wider_than_the_tree() -> None:
    for seed in range(8):
        tree, _ = grow(PAPER, 5, seed, 0, faults=True)
        assert tree is not None
        assert sum(c.heir_of == NO_LEASE for c in tree.continuations) == 5
        continued = {c.heir_of for c in tree.continuations}
        ends = [c.weight for c in tree.continuations if c.number not in continued]
        assert sum(ends) == pytest.approx(tree.planned_weight) == pytest.approx(1.0)
        width = Counter(tree.nodes[c.anchor].depth for c in tree.continuations)
        assert max(width.values()) == 5


def test_a_width_that_a_budget_adds_later_is_a_tree_of_its_own() -> None:
    rule = IgrpoRule(PAPER)
    view = Level([[(0.5, "up")]] * 3, ended={0: "stopped", 1: "finished", 2: "finished"})
    assert rule.decide(view) == COMPLETE
    view.budget_left = 2
    picks = rule.decide(view).picks
    assert [(pick.group, pick.horizon, pick.heir_of) for pick in picks] == [(1, 1, NO_LEASE)] * 2
    late = Level([[(0.5, "up")]] * 5, ended={0: "stopped", 1: "finished", 2: "finished"}, draws=Script())
    late.branches[3].group = late.branches[4].group = 1  # type: ignore[misc]
    assert len(rule.decide(late).picks) == 2


# ------------------------------------------------------------------------------------------------ a level


def heirs_of(view: Level, config: IgrpoRuleConfig = PAPER) -> list[int]:
    picks = IgrpoRule(config).decide(view).picks
    return [sum(pick.heir_of == number for pick in picks) for number in view.branches]


def test_the_chance_of_a_path_is_the_softmax_of_half_its_score_and_half_its_gain() -> None:
    """Score 0.5 after 0.75, and 0.25 straight from the root, whose S is 0 whatever the world says of it."""
    script = Script()
    view = Level([[(0.75, "up"), (0.5, "up")], [(0.25, "up")]], draws=script)
    IgrpoRule(IgrpoRuleConfig(gamma=2.0)).decide(view)
    first, second = math.exp(2 * (0.5 + (0.5 - 0.75)) / 2), math.exp(2 * (0.25 + 0.25) / 2)
    assert script.asked[0] == pytest.approx([first / (first + second), second / (first + second)])


def test_a_gold_probability_goes_before_the_process_score() -> None:
    script = Script()
    gold = {(0, 0): 0.5, (0, 1): 1.0}
    view = Level([[(0.1, "up"), (0.1, "up")], [(0.2, "up")]], draws=script, gold=gold)
    IgrpoRule(PAPER).decide(view)
    assert script.asked[0] == pytest.approx(softmax([(1.0 + 0.5) / 2, (0.2 + 0.2) / 2]))


def test_a_turn_without_a_score_brought_no_information() -> None:
    script = Script(choices=[1, 0])
    view = Level([[(0.5, "up"), (None, "up")], [(None, "up")]], draws=script)
    decision = IgrpoRule(IgrpoRuleConfig(cap=1)).decide(view)
    assert script.asked[0] == pytest.approx(softmax([0.5 / 2, 0.0]))
    assert len(decision.picks) == 2 and not decision.stops


def test_a_path_drawn_twice_has_two_heirs_one_not_drawn_is_paid_its_score() -> None:
    view = Level([[(0.5, "up")], [(0.75, "up")], [(0.25, "up")]], draws=Script([0, 0, 1]))
    decision = IgrpoRule(PAPER).decide(view)
    assert [(p.heir_of, p.anchor, p.horizon) for p in decision.picks] == [(0, 1, 1), (0, 1, 1), (2, 3, 1)]
    (stop,) = decision.stops
    assert (stop.number, stop.reward, stop.source) == (1, 0.5 * 0.75, RewardSource.PSEUDO_REWARD)


@pytest.mark.parametrize("wave, paid", [(0, 0.375), (149, 0.375), (150, 0.75), (999, 0.75)])
def test_the_pseudo_reward_is_halved_in_the_first_150_updates(wave: int, paid: float) -> None:
    view = Level([[(0.5, "up")], [(0.75, "up")]], wave=wave, draws=Script([0, 0]))
    (stop,) = IgrpoRule(PAPER).decide(view).stops
    assert stop.reward == paid


def test_few_active_paths_get_all_the_heirs_their_cap_allows_and_the_width_does_not_shrink_for_good() -> None:
    over = {0: "finished", 1: "finished", 3: "dropped: broken", 4: "stopped"}
    one = Level([[(0.5, "up")]] * 5, ended=over, draws=Script())
    assert heirs_of(one) == [0, 0, 2, 0, 0]
    three = Level([[(0.5, "up")]] * 5, ended={0: "finished", 3: "dropped: broken"}, draws=Script())
    assert sum(heirs_of(three)) == 5 and max(heirs_of(three)) <= 2


def test_after_the_last_level_every_path_runs_to_its_end() -> None:
    view = Level([[(0.5, "up"), (0.1, "up")], [(0.5, "up"), (0.9, "up")]])
    rule = IgrpoRule(IgrpoRuleConfig(max_levels=2))
    decision = rule.decide(view)
    assert [(p.heir_of, p.horizon) for p in decision.picks] == [(0, 0), (1, 0)] and not decision.stops
    assert rule.explain(view) == []


def test_one_path_on_the_way_holds_the_level_up() -> None:
    view = Level([[(1.0, "up")], [(0.0, "up")]], ended={1: ""})
    assert IgrpoRule(PAPER).decide(view) == WAIT and IgrpoRule(PAPER).explain(view) == []


# -------------------------------------------------------------------------------------------------- draws


def literal_chances(logits: Sequence[float], width: int, cap: int) -> dict[tuple[int, ...], float]:
    """By enumeration of all sequences of draws."""
    found: dict[tuple[int, ...], float] = {}
    for sequence in itertools.product(range(len(logits)), repeat=min(width, cap * len(logits))):
        chance, drawn = 1.0, [0] * len(logits)
        for choice in sequence:
            weights = [math.exp(x) if d < cap else 0.0 for x, d in zip(logits, drawn, strict=True)]
            chance *= weights[choice] / sum(weights)
            drawn[choice] += 1
        if chance:
            found[tuple(drawn)] = found.get(tuple(drawn), 0.0) + chance
    return found


class Path(Draws):
    """One path through the tree of draws; its chance is the product of what was chosen."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.choices, self.chance, self.taken = choices, 1.0, 0

    def index(self, count: int) -> int:
        raise AssertionError("no uniform draws here")

    def weighted(self, weights: Sequence[float]) -> int:
        choice = self.choices[self.taken]
        self.taken += 1
        if choice >= len(weights):
            self.chance = 0.0
            return 0
        self.chance *= weights[choice] / sum(weights)
        return choice


@pytest.mark.parametrize(
    "logits, width, cap", [([0.0, 1.0, -0.5], 3, 2), ([0.2, 0.1], 4, 2), ([1, 2, 3], 2, 1)]
)
def test_the_chances_of_all_draws_are_those_of_the_enumeration(
    logits: list[float], width: int, cap: int
) -> None:
    found: dict[tuple[int, ...], float] = {}
    steps = min(width, cap * len(logits))
    for choices in itertools.product(range(len(logits)), repeat=steps):
        path = Path(choices)
        drawn = tuple(draw(logits, width, cap, path))
        if path.chance:
            found[drawn] = found.get(drawn, 0.0) + path.chance
    assert found == pytest.approx(literal_chances(logits, width, cap))


@given(
    logits=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6),
    width=st.integers(1, 9), cap=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_whatever_the_values_all_expansions_are_drawn_and_none_beyond_the_cap(
    logits: list[float], width: int, cap: int, seed: int
) -> None:
    drawn = draw(logits, width, cap, SeededDraws(seed))
    assert sum(drawn) == min(width, cap * len(logits)) and min(drawn) >= 0 and max(drawn) <= cap


@given(logits=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_a_softmax_sums_to_one_and_keeps_the_order(logits: list[float]) -> None:
    chances = softmax(logits)
    assert math.fsum(chances) == pytest.approx(1.0) and all(chance >= 0 for chance in chances)
    assert chances[logits.index(max(logits))] == max(chances)


# ------------------------------------------------------------------------------------------ the rest of it


def test_the_explanation_says_what_the_decision_does() -> None:
    rule = IgrpoRule(PAPER)
    view = Level([[(0.25, "up")], [(0.75, "up")], [(0.5, "up")]], draws=Script([2, 2, 0]))
    found = rule.explain(view)
    assert [s.anchor for s in found] == [2, 3, 1]
    assert math.fsum(s.total for s in found) == pytest.approx(1.0)
    assert [s.terms for s in found] == [
        {"score": score, "gain": score, "value": score, "heirs": heirs}
        for score, heirs in ((0.75, 0), (0.5, 2), (0.25, 1))
    ]
    view = Level([[(0.25, "up")], [(0.75, "up")], [(0.5, "up")]], draws=Script([2, 2, 0]))
    assert heirs_of(view) == [1, 0, 2]


def test_it_says_what_it_reads_and_needs() -> None:
    assert IgrpoRule.reads == {EventKind.NODE, EventKind.SCORE, EventKind.OUTCOME}
    assert IgrpoRule.requires == {"process_scores"}


@pytest.mark.parametrize(
    "field, value",
    [("gamma", -1.0), ("cap", 0), ("max_levels", 0), ("pseudo_scale", -0.5), ("stable_steps", -1)],
)
def test_a_constant_that_means_nothing_is_refused_with_its_key(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"allocator\.rule\.{field}"):
        IgrpoRuleConfig(**{field: value})  # type: ignore[arg-type]
