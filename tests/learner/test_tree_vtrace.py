"""`tree_vtrace`: IMPALA's on a chain, Monte-Carlo on policy, unbiased off policy where nothing is cut."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tabular import World, enumerate_all, history
from common.config_allocator import IgrpoRuleConfig, PatrRuleConfig
from common.config_learner import CreditConfig
from common.nouns import Ending, Outcome, RewardSource, Tree
from learner.credit import CREDITS, Evidence
from learner.credit.base import branch_turns, owners_of
from learner.credit.granted import granted
from learner.credit.tree_vtrace import tree_vtrace, value_terms, vtrace
from tests.allocator.rules.levels import grow
from tests.learner.helpers import continuation, forked_tree, make_tree, node, turn

GRANT = CreditConfig(name="tree_vtrace")
HEAD = CreditConfig(name="tree_vtrace", critic="head")


def literal_vtrace(
    rewards: Sequence[float], values: Sequence[float], ratios: Sequence[float], rho_bar: float, c_bar: float
) -> list[float]:
    """IMPALA's equation (1) as it stands, for a chain of T steps whose last state is worth 0:
    v_s = V_s + Σ_{t ≥ s} (Π_{i = s}^{t − 1} c_i) ρ_t (r_t + V_{t+1} − V_t)."""
    after = [*values[1:], 0.0]
    found = []
    for s in range(len(rewards)):
        total = values[s]
        for t in range(s, len(rewards)):
            trace = math.prod(min(c_bar, ratio) for ratio in ratios[s:t])
            total += trace * min(rho_bar, ratios[t]) * (rewards[t] + after[t] - values[t])
        found.append(total)
    return found


numbers = st.floats(-2, 2)
chains = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*(st.lists(numbers, min_size=n, max_size=n) for _ in range(3)))
)


@given(chains, st.sampled_from([(1.0, 1.0), (2.0, 1.0), (5.0, 0.5), (1e9, 1e9)]))
def test_the_recursion_equals_impalas_sum(chain, bars):
    rewards, values, log_ratios = chain
    ratios = [math.exp(x) for x in log_ratios]
    found = vtrace(rewards, values, log_ratios, *bars)
    expected = literal_vtrace(rewards, values, ratios, *bars)
    assert found.targets == pytest.approx(expected, rel=1e-9, abs=1e-9)
    after = [*expected[1:], 0.0]
    advantages = [
        min(bars[0], ratio) * (reward + v - value)
        for ratio, reward, v, value in zip(ratios, rewards, after, values, strict=True)
    ]
    assert found.advantages == pytest.approx(advantages, rel=1e-9, abs=1e-9)


@given(chains)
def test_on_policy_every_advantage_is_what_came_after_less_the_value(chain):
    rewards, values, _ = chain
    found = vtrace(rewards, values, [0.0] * len(rewards), 1.0, 1.0)
    expected = [sum(rewards[t:]) - values[t] for t in range(len(rewards))]
    assert found.advantages == pytest.approx(expected, abs=1e-12)


def test_a_known_chain_with_a_ratio_above_and_one_below_the_caps():
    # Two steps, V = 0.5 and 0.25, reward 1 at the end, ratios 2 (cut to 1) and 1/2.
    found = vtrace([0.0, 1.0], [0.5, 0.25], [math.log(2), -math.log(2)], 1.0, 1.0)
    assert found.targets == pytest.approx((0.625, 0.625))
    assert found.advantages == pytest.approx((0.125, 0.375))


def test_ratios_far_beyond_any_float_stay_finite():
    for extreme in (1e4, -1e4):
        found = vtrace([1.0, 1.0], [0.0, 0.0], [extreme, extreme], 1e12, 1e12)
        assert all(map(math.isfinite, [*found.targets, *found.advantages]))


# ------------------------------------------------------------------------------------------------ on trees


def with_ratios(tree: Tree, **log_ratios: float) -> Evidence:
    given_ = {int(name[1:]): value for name, value in log_ratios.items()}
    return Evidence({n.index: given_.get(n.index, 0.0) for n in tree.nodes if n.turn.logprobs})


def dyadic(tree: Tree) -> Tree:
    """With values and baselines that floats hold exactly, so that equality can be asked for."""
    nodes = [msgspec.structs.replace(n, value=(n.index % 8) / 8) for n in tree.nodes]
    continuations = [msgspec.structs.replace(c, baseline=(c.number % 4) / 4) for c in tree.continuations]
    return msgspec.structs.replace(tree, nodes=nodes, continuations=continuations)


def test_on_policy_the_advantages_are_exactly_those_of_granted():
    tree = dyadic(forked_tree())
    found = tree_vtrace(tree, GRANT, with_ratios(tree))
    expected = granted(tree, GRANT, Evidence())
    assert [(c.advantages, c.weight) for c in found] == [(c.advantages, c.weight) for c in expected]


@pytest.mark.parametrize(
    "rule", [PatrRuleConfig(interval=2, top_k=2, children=3, margin=0.25), IgrpoRuleConfig()]
)
@pytest.mark.parametrize("seed", range(4))
def test_on_policy_heirs_and_rewards_on_the_way_are_paid_as_granted_pays_them(rule, seed):
    tree, _ = grow(rule, 4, seed, 0)
    assert tree is not None
    ratios = Evidence({n.index: 0.0 for n in tree.nodes})
    for ours, theirs in zip(tree_vtrace(tree, GRANT, ratios), granted(tree, GRANT, ratios), strict=True):
        assert ours.advantages == pytest.approx(theirs.advantages, abs=1e-12)
        assert ours.weight == theirs.weight


def test_a_fork_uses_its_own_turns_and_no_siblings():
    tree = forked_tree()
    base = tree_vtrace(tree, GRANT, with_ratios(tree))
    moved = tree_vtrace(tree, GRANT, with_ratios(tree, n3=-1.0))
    assert base[0] == moved[0], "the owner's branch does not pass through the fork's turn"
    assert base[1].advantages != moved[1].advantages


def test_the_ratio_of_a_turn_is_the_product_over_its_tokens_and_cuts_its_own_advantage():
    tree = forked_tree()
    # Two tokens, each half as likely as it was: the turn's ratio is a quarter.
    owner, _ = tree_vtrace(tree, GRANT, with_ratios(tree, n1=2 * math.log(0.5)))
    on_policy, _ = tree_vtrace(tree, GRANT, with_ratios(tree))
    assert owner.advantages[0] == pytest.approx(on_policy.advantages[0] / 4)
    assert owner.advantages[1] == on_policy.advantages[1]


def test_a_lease_that_ended_at_a_horizon_gets_the_mean_over_its_heirs():
    nodes = [
        node(1, 0, 0, 0, turn((6,)), value=0.5), node(2, 1, 1, 0, turn((7,)), depth=2),
        node(3, 1, 2, 0, turn((8,)), depth=2),
    ]  # fmt: skip
    tree = make_tree(
        nodes,
        [
            continuation(0, [1], None, weight=1.0, baseline=0.25),
            continuation(1, [2], 1.0, anchor=1, weight=0.5, heir_of=0, baseline=0.5),
            continuation(2, [3], 0.0, anchor=1, weight=0.5, heir_of=0, baseline=0.5),
        ],
    )
    evidence = with_ratios(tree, n2=math.log(0.5), n3=math.log(0.25))
    first, second = tree_vtrace(tree, GRANT, evidence)
    # v at the horizon: 0.5 + 0.5 (1 − 0.5) along one heir, 0.5 + 0.25 (0 − 0.5) along the other.
    assert (first.targets[1], second.targets[1]) == pytest.approx((0.75, 0.375))
    paid = sum(credit.weight * credit.advantages[0] for credit in (first, second))
    assert paid == pytest.approx((0.75 + 0.375) / 2 - 0.25)


def test_the_end_of_a_stopped_path_pays_what_the_rule_said_beside_what_its_turns_earned():
    earned = msgspec.structs.replace(turn((5,)), reward=0.25)
    tree = make_tree(
        [node(1, 0, 0, 0, earned, value=0.5), node(2, 1, 0, 1, turn((6,)), depth=2)],
        [continuation(0, [1, 2], 1.0, baseline=0.125)],
    )
    said = Outcome(reward=1.0, raw_reward=0.25, source=RewardSource.PRUNE_RULE, ending=Ending.PRUNED)
    stopped = msgspec.structs.replace(
        tree, continuations=[msgspec.structs.replace(tree.continuations[0], outcome=said)]
    )
    (credit,) = tree_vtrace(stopped, GRANT, with_ratios(tree))
    assert credit.advantages == pytest.approx((1.0 - 0.125, 1.0 - 0.5))
    assert credit.targets == pytest.approx((1.0, 0.75)), "of what is still to come"


def test_a_value_head_speaks_of_what_is_still_to_come():
    earned = msgspec.structs.replace(turn((5,)), reward=0.25)
    tree = make_tree(
        [node(1, 0, 0, 0, earned, value=0.9), node(2, 1, 0, 1, turn((6,)), depth=2)],
        [continuation(0, [1, 2], 1.0, baseline=0.9)],
    )
    evidence = Evidence({1: 0.0, 2: 0.0}, values={0: 0.5, 1: 0.125})
    (credit,) = tree_vtrace(tree, HEAD, evidence)
    assert credit.advantages == pytest.approx((1.0 - 0.5, 0.75 - 0.125))
    assert CREDITS["tree_vtrace"].needs_values(HEAD) and not CREDITS["tree_vtrace"].needs_values(GRANT)
    with pytest.raises(ValueError, match="said nothing about node 1"):
        tree_vtrace(tree, HEAD, Evidence({1: 0.0, 2: 0.0}, values={0: 0.5}))


def test_a_missing_ratio_is_refused_and_never_taken_for_fresh_data():
    with pytest.raises(ValueError, match="no log-ratio of node 1"):
        tree_vtrace(forked_tree(), GRANT, Evidence())


def test_a_demonstrated_turn_has_no_ratio_and_needs_none():
    shown = turn((5,), logprobs=[])
    tree = make_tree([node(1, 0, 0, 0, shown)], [continuation(0, [1], 1.0, baseline=0.5)])
    assert tree_vtrace(tree, GRANT, Evidence())[0].advantages == (0.5,)


def test_a_critic_learns_one_term_of_each_turn_from_the_continuation_that_sampled_it():
    tree = forked_tree()
    terms = value_terms(tree, tree_vtrace(tree, GRANT, with_ratios(tree)))
    assert [(term.node, term.turn, term.weight) for term in terms] == [(0, 1, 0.5), (1, 2, 0.5), (1, 3, 0.25)]
    assert [term.target for term in terms] == [1.0, 1.0, 0.0]
    assert owners_of(tree, tree.continuations[1]) == {1}


def test_a_critic_learns_nothing_from_a_demonstrated_turn():
    """Its target is what an expert makes of the prefix, and no ratio says how far the policy is from that."""
    tree = make_tree(
        [node(1, 0, 0, 0, turn((5,), logprobs=[])), node(2, 1, 0, 1, turn((6,)), depth=2, value=0.25)],
        [continuation(0, [1, 2], 1.0, baseline=0.5)],
    )
    terms = value_terms(tree, tree_vtrace(tree, GRANT, Evidence({2: 0.0})))
    assert [(term.node, term.turn) for term in terms] == [(1, 2)]


# -------------------------------------------------------------------------------------- off policy, exactly

TARGET = World(
    policy={(): (0.3, 0.7), (0,): (0.5, 0.5), (1,): (0.9, 0.1)},
    rewards={(0, 0): 1.0, (1,): 0.25, (1, 1): 1.0},
)
BEHAVIOUR = World(policy={(): (0.6, 0.4), (0,): (0.25, 0.75), (1,): (0.5, 0.5)}, rewards=TARGET.rewards)


def sampled_chain(chooser, forked: bool) -> Tree:
    """A chain under μ; `forked`: and a second continuation after its first turn, only where it failed."""
    nodes, continuations = [], []

    def run(anchor, path, number, earned):
        own, parent = [], anchor
        while path in BEHAVIOUR.policy:
            action = chooser.choose(BEHAVIOUR.policy[path])
            made = BEHAVIOUR.turn(path, action)
            path = (*path, action)
            index = len(nodes) + 1
            nodes.append(node(index, parent, number, len(own), made, depth=len(path), value=0.375))
            own.append(index)
            parent, earned = index, earned + made.reward
        continuations.append(continuation(number, own, earned, anchor=anchor, weight=0.5, baseline=0.625))
        return path, earned

    path, earned = run(0, (), 0, 0.0)
    if forked and earned == 0.0:
        run(1, path[:1], 1, 0.0)
    return make_tree(nodes, continuations)


@pytest.mark.parametrize("forked", [False, True])
def test_without_cuts_the_local_gradient_is_that_of_the_current_policy_at_any_age(forked):
    """Σ over all ways a tree can go of weight · ρ-corrected advantage · score of π, by prefix, against
    visits · ∇V^π computed by recursion; the fork looks at the outcome."""
    free = CreditConfig(name="tree_vtrace", rho_bar=1e9, c_bar=1e9)
    found = {h: np.zeros(2) for h in TARGET.policy}
    visits = {h: 0.0 for h in TARGET.policy}
    for probability, tree in enumerate_all(partial(sampled_chain, forked=forked)):
        paths = {n.index: history(tree, n.index) for n in tree.nodes}
        ratios = {
            index: math.log(TARGET.policy[h[:-1]][h[-1]] / BEHAVIOUR.policy[h[:-1]][h[-1]])
            for index, h in paths.items()
            if h
        }
        for credit in tree_vtrace(tree, free, Evidence(ratios)):
            for each, advantage in zip(credit.turns, credit.advantages, strict=True):
                if each.lease == credit.continuation.number:
                    here, action = paths[each.index][:-1], paths[each.index][-1]
                    visits[here] += probability * credit.weight
                    found[here] += (
                        probability * credit.weight * advantage * np.array(TARGET.score(here, action))
                    )
    for here in TARGET.policy:
        expected = visits[here] * np.array(TARGET.gradient(here))
        np.testing.assert_allclose(found[here], expected, atol=1e-12)


def test_with_caps_of_1_it_is_the_gradient_of_impalas_fixed_point_not_of_the_policy():
    """The bias that the caps buy their variance with: seen, so that the test above could fail."""
    totals = []
    for bar in (1.0, 1e9):
        settings = CreditConfig(name="tree_vtrace", rho_bar=bar, c_bar=bar)
        total = 0.0
        for probability, tree in enumerate_all(partial(sampled_chain, forked=False)):
            paths = {n.index: history(tree, n.index) for n in tree.nodes}
            ratios = {
                i: math.log(TARGET.policy[h[:-1]][h[-1]] / BEHAVIOUR.policy[h[:-1]][h[-1]])
                for i, h in paths.items()
                if h
            }
            (credit,) = tree_vtrace(tree, settings, Evidence(ratios))
            total += probability * credit.advantages[0] * TARGET.score((), paths[1][0])[0]
        totals.append(total)
    assert abs(totals[0] - totals[1]) > 0.01


def test_branches_of_all_small_trees_are_walks_with_as_many_targets_as_turns():
    for tree in itertools.islice((t for _, t in enumerate_all(partial(sampled_chain, forked=True))), 20):
        ratios = Evidence({n.index: 0.1 for n in tree.nodes})
        for credit in tree_vtrace(tree, GRANT, ratios):
            assert credit.turns == branch_turns(tree, credit.continuation)
            assert len(credit.targets) == len(credit.advantages) == len(credit.turns)
