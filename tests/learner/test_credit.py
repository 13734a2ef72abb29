"""Each credit against its formula, computed by hand or by a slow literal oracle."""

import itertools
import math
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit import CREDITS, BranchCredit, Evidence
from learner.credit.grpo import z_scores
from tests.learner.helpers import continuation, flat_tree, forked_tree, make_tree, node, turn

GROUP_CREDITS = ("grpo", "dr_grpo", "rloo", "edge")
SETTINGS = CreditConfig()


def on_policy(tree: Tree) -> Evidence:
    return Evidence({node.index: 0.0 for node in tree.nodes})


def credits_of(name: str, tree: Tree, **settings: object) -> list[BranchCredit]:
    return CREDITS[name].function(tree, CreditConfig(name=name, **settings), on_policy(tree))


def flat(*rewards: float | None, weight: float = 0.5) -> Tree:
    nodes = [node(i + 1, 0, i, 0, turn((5,))) for i in range(len(rewards))]
    return make_tree(
        nodes, [continuation(i, [i + 1], reward, weight=weight) for i, reward in enumerate(rewards)]
    )


def shaped(tree: Tree, rewards: list[float]) -> Tree:
    """Other rewards, raw ones as they were."""
    changed = [
        msgspec.structs.replace(c, outcome=msgspec.structs.replace(c.outcome, reward=reward))
        for c, reward in zip(tree.continuations, rewards, strict=True)
    ]
    return msgspec.structs.replace(tree, continuations=changed)


def paid_once(credits: list[BranchCredit]) -> list[float]:
    """The advantage of single-turn branches."""
    return [advantage for credit in credits for advantage in credit.advantages]


# ------------------------------------------------------------------------------------------------ granted


def test_granted_pays_return_minus_what_was_predicted_before_each_turn():
    owner, fork = credits_of("granted", forked_tree())
    # The owner's first turn has the baseline of its grant, its second the value of the node before it.
    assert owner.advantages == (1.0 - 0.125, 1.0 - 0.25)
    # The fork's branch contains the owner's first turn, with that turn's baseline and the fork's return.
    assert fork.advantages == (0.0 - 0.125, 0.0 - 0.5)
    assert (owner.weight, fork.weight) == (0.5, 0.25)
    assert [turn.index for turn in fork.turns] == [1, 3]


def test_granted_subtracts_nothing_where_nothing_was_predicted():
    tree = make_tree([node(1, 0, 0, 0, turn((5,)))], [continuation(0, [1], 1.0, baseline=None)])
    assert credits_of("granted", tree)[0].advantages == (1.0,)


def test_granted_does_not_depend_on_the_other_branches():
    alone, crowded = credits_of("granted", flat(1.0))[0], credits_of("granted", flat(1.0, 0.0, 0.0))[0]
    assert (alone.advantages, alone.weight) == (crowded.advantages, crowded.weight)


# ----------------------------------------------------------------------------------------- every method


@pytest.mark.parametrize("name", CREDITS)
def test_a_continuation_without_an_outcome_gets_no_credit_and_is_no_zero_reward(name):
    with_failure, without = credits_of(name, flat(1.0, None, 0.0)), credits_of(name, flat(1.0, 0.0))
    assert [credit.continuation.number for credit in with_failure] == [0, 2]
    assert [credit.advantages for credit in with_failure] == [credit.advantages for credit in without]


@pytest.mark.parametrize("name", CREDITS)
def test_every_turn_of_the_branch_has_an_advantage(name):
    for credit in credits_of(name, forked_tree()):
        assert len(credit.advantages) == len(credit.turns)


@pytest.mark.parametrize("name", CREDITS)
def test_a_credit_can_be_called_without_evidence_unless_it_needs_some(name):
    method = CREDITS[name]
    if method.needs_ratios:
        with pytest.raises(ValueError, match="no log-ratio of node"):
            method(forked_tree(), CreditConfig(name=name))
    else:
        assert method(forked_tree(), CreditConfig(name=name)) == credits_of(name, forked_tree())


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "granted", "tree_vtrace"])
def test_a_branch_that_was_dropped_leaves_the_denominators_of_the_others(name):
    full, fewer = credits_of(name, flat(1.0, 0.0, 0.0)), credits_of(name, flat(1.0, None, 0.0))
    assert {credit.weight for credit in [*full, *fewer]} == {0.5}


# ------------------------------------------------------------------------------------- groups of leaves


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9).filter(lambda r: max(r) - min(r) > 1e-3))
def test_grpo_equals_the_z_score_with_bessel_correction(rewards):
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    assert z_scores(rewards, 1e-6) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9).filter(lambda r: max(r) - min(r) > 1e-3))
def test_rloo_takes_the_mean_of_the_others_and_dr_grpo_the_mean_of_all(rewards):
    others = [statistics.mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert paid_once(credits_of("rloo", flat(*rewards))) == pytest.approx(expected, abs=1e-9)
    centred = [reward - statistics.mean(rewards) for reward in rewards]
    assert paid_once(credits_of("dr_grpo", flat(*rewards))) == pytest.approx(centred, abs=1e-9)


def test_known_constants_of_one_success_in_four():
    tree = flat(1.0, 0.0, 0.0, 0.0)
    assert paid_once(credits_of("grpo", tree)) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert paid_once(credits_of("dr_grpo", tree)) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert paid_once(credits_of("rloo", tree)) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert paid_once(credits_of("edge", tree)) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_equal_rewards_are_paid_exactly_zero_though_their_mean_differs_in_the_last_bit(name):
    # Seven times 0.35 sums to a mean that is not 0.35; epsilon would turn that into a gradient.
    assert paid_once(credits_of(name, flat(*[0.35] * 7))) == [0.0] * 7
    # Rewards that were summed in another order differ by rounding alone.
    assert paid_once(credits_of(name, flat(0.1 + 0.2, 0.3, 0.3))) == [0.0] * 3


def test_a_spread_that_single_precision_would_round_away_gives_a_z_score_of_order_one():
    # Seven equal rewards and one 1.5e-4 above: E[x²] − E[x]² in float32 makes this a thousand times larger.
    rewards = [0.35] * 7 + [0.35015]
    wrong = np.float32(rewards)
    naive = float(np.mean(wrong * wrong, dtype=np.float32) - np.float32(np.mean(wrong)) ** 2)
    assert abs(naive - statistics.pvariance(rewards)) > statistics.pvariance(rewards)
    scores = paid_once(credits_of("grpo", flat(*rewards)))
    assert max(map(abs, scores)) < math.sqrt(8) and scores[-1] == pytest.approx(2.4287, abs=1e-3)


@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_one_leaf_with_an_outcome_is_paid_exactly_zero_whatever_became_of_the_others(name):
    assert paid_once(credits_of(name, flat(0.7))) == [0.0]
    assert paid_once(credits_of(name, flat(*[None] * 7, 1.0))) == [0.0]


@pytest.mark.parametrize("name", GROUP_CREDITS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_and_poisons_no_group(name, poison):
    with pytest.raises(ValueError, match="continuation 1 has the reward"):
        credits_of(name, flat(1.0, poison, 0.0))


@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_contrast_is_decided_in_each_group_on_its_own(name):
    # A batch-wide spread must not give the uniform group a gradient, nor take it from the mixed one.
    uniform, mixed = credits_of(name, flat(1.0, 1.0)), credits_of(name, flat(0.0, 1.0))
    assert all(credit.advantages == (0.0,) for credit in uniform)
    assert all(credit.advantages != (0.0,) for credit in mixed)


@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_a_penalty_on_length_gives_a_uniform_group_no_contrast(name):
    tree = shaped(flat(0.0, 0.0, 0.0), [-0.1, -0.2, -0.3])
    assert paid_once(credits_of(name, tree)) == [0.0] * 3


@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_rewards_within_the_tolerance_are_equal_and_beyond_it_are_not(name):
    assert paid_once(credits_of(name, flat(0.0, 0.01), tolerance=0.02)) == [0.0, 0.0]
    assert paid_once(credits_of(name, flat(0.0, 0.03), tolerance=0.02))[0] < 0


def test_grpo_weighs_each_leaf_by_the_realised_number_of_leaves():
    assert [credit.weight for credit in credits_of("grpo", flat(1.0, 0.0, 0.0, None))] == [1 / 3] * 3


def test_what_was_earned_before_an_observation_reaches_every_turn_of_the_branch():
    # An observation between two actions ends nothing: both turns are paid by what the branch earned.
    nodes = [
        node(1, 0, 0, 0, turn((5,), (8, 9, 10))), node(2, 1, 0, 1, turn((6,)), depth=2),
        node(3, 0, 1, 0, turn((7,))),
    ]  # fmt: skip
    tree = make_tree(nodes, [continuation(0, [1, 2], 1.0), continuation(1, [3], 0.0)])
    for name in GROUP_CREDITS:
        long, _ = credits_of(name, tree)
        assert len(long.advantages) == 2 and long.advantages[0] == long.advantages[1] > 0, name


# ----------------------------------------------------------------------------------------------- edges


def comb(*rewards: float) -> Tree:
    """root ─┬─ 1 ─┬─ 2 ─ 3       an edge to node 1's fork; three edges below it, the first of two turns;
    │     ├─ 4           and one edge to node 6. Rewards of the leaves 3, 4, 5, 6.
    │     └─ 5
    └─ 6
    """
    nodes = [
        node(1, 0, 0, 0, turn((5,))), node(2, 1, 0, 1, turn((5,)), depth=2), node(3, 2, 0, 2, turn((5,)), depth=3),
        node(4, 1, 1, 0, turn((5,)), depth=2), node(5, 1, 2, 0, turn((5,)), depth=2), node(6, 0, 3, 0, turn((5,))),
    ]  # fmt: skip
    owners = [([1, 2, 3], 0), ([4], 1), ([5], 1), ([6], 0)]
    return make_tree(
        nodes,
        [
            continuation(i, own, rewards[i], anchor=anchor, weight=0.25)
            for i, (own, anchor) in enumerate(owners)
        ],
    )


def test_an_edge_is_paid_its_value_less_the_mean_of_its_siblings():
    first, second, third, fourth = credits_of("edge", comb(1.0, 0.0, 0.5, 0.25))
    assert first.advantages == pytest.approx((0.5 - 0.25, 1.0 - 0.25, 1.0 - 0.25))  # both turns of the edge
    assert second.advantages == pytest.approx((0.25, 0.0 - 0.75))
    assert third.advantages == pytest.approx((0.25, 0.5 - 0.5))
    assert fourth.advantages == pytest.approx((0.25 - 0.5,))


def test_a_node_is_worth_the_mean_of_its_children_or_of_its_leaves():
    nodes = [
        node(1, 0, 0, 0, turn((5,))), node(2, 1, 0, 1, turn((5,)), depth=2), node(3, 2, 0, 2, turn((5,)), depth=3),
        node(4, 2, 1, 0, turn((5,)), depth=3), node(5, 1, 2, 0, turn((5,)), depth=2), node(6, 0, 3, 0, turn((5,))),
    ]  # fmt: skip
    tree = make_tree(
        nodes,
        [
            continuation(0, [1, 2, 3], 1.0), continuation(1, [4], 1.0, anchor=2),
            continuation(2, [5], 0.0, anchor=1), continuation(3, [6], 0.0),
        ],
    )  # fmt: skip
    assert credits_of("edge", tree)[0].advantages[0] == pytest.approx(0.5)  # mean over children: (1 + 0) / 2
    assert credits_of("edge", tree, node_value="leaves")[0].advantages[0] == pytest.approx(2 / 3)


def test_an_edge_without_a_sibling_is_paid_exactly_zero_until_the_first_fork():
    owner, fork = credits_of("edge", forked_tree())
    assert owner.advantages == (0.0, 1.0) and fork.advantages == (0.0, -1.0)


def test_the_weight_of_a_path_is_one_over_the_children_of_every_fork_above_it_and_sums_to_one():
    credits = credits_of("edge", comb(1.0, 0.0, 0.5, 0.25), edge_weight="path")
    assert [credit.weight for credit in credits] == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert [credit.weight for credit in credits_of("edge", comb(1, 0, 0, 0))] == [0.25] * 4


def test_a_branch_that_ends_where_others_go_on_is_their_sibling():
    # Stopped at node 1, where an heir goes on: two entries below node 1, one of them without turns.
    nodes = [node(1, 0, 0, 0, turn((5,))), node(2, 1, 1, 0, turn((5,)), depth=2)]
    tree = make_tree(nodes, [continuation(0, [1], 0.0), continuation(1, [2], 1.0, anchor=1)])
    stopped, other = credits_of("edge", tree)
    assert stopped.advantages == (0.0,) and other.advantages == (0.0, 1.0)


def literal_edges(tree: Tree, rewards: dict[int, float]) -> dict[int, float]:
    """A(node) by recursion from the definition, children's means; for trees whose leaves are inner of none."""
    children = {n.index: [c.index for c in tree.nodes if c.parent == n.index] for n in tree.nodes}

    def value(index: int) -> float:
        below = children[index]
        return sum(map(value, below)) / len(below) if below else rewards[index]

    found = {0: 0.0}
    for each in tree.nodes[1:]:
        siblings = children[each.parent]
        if len(siblings) == 1:
            found[each.index] = found[each.parent]
        else:
            others = [value(other) for other in siblings if other != each.index]
            found[each.index] = value(each.index) - sum(others) / len(others)
    return found


def small_trees() -> list[Tree]:
    """Every tree of three continuations of two turns, each from the prompt or from a first turn before it."""
    found = []
    for anchors in itertools.product((None, 0, 1), repeat=2):
        nodes, continuations, first = [], [], list[int]()
        for number, anchor in enumerate((None, *anchors)):
            start = first[anchor] if anchor is not None and anchor < number else 0
            own = []
            for offset in range(2 if start == 0 else 1):
                parent = own[-1] if own else start
                own.append(len(nodes) + 1)
                nodes.append(node(own[-1], parent, number, offset, turn((5,)), depth=1))
            first.append(own[0] if start == 0 else start)
            continuations.append(continuation(number, own, 0.0, anchor=start))
        found.append(make_tree(nodes, continuations))
    return found


def test_edges_equal_the_definition_on_every_small_tree_and_all_outcomes():
    for tree in small_trees():
        for outcomes in itertools.product((0.0, 1.0), repeat=3):
            rewards = {c.nodes[-1]: r for c, r in zip(tree.continuations, outcomes, strict=True)}
            paid = [
                msgspec.structs.replace(c, outcome=msgspec.structs.replace(c.outcome, reward=r, raw_reward=r))
                for c, r in zip(tree.continuations, outcomes, strict=True)
            ]
            full = msgspec.structs.replace(tree, continuations=paid)
            expected = literal_edges(full, rewards)
            for credit in credits_of("edge", full):
                by_hand = [expected[turn.index] for turn in credit.turns]
                assert credit.advantages == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_edge_and_rloo_agree_where_nothing_branches(seed):
    tree = flat_tree(0, np.random.default_rng(seed), branches=5, rewards=[1, 0, 0, 1, 0])
    edges, leaves = credits_of("edge", tree), credits_of("rloo", tree)
    assert [c.advantages for c in edges] == [pytest.approx(c.advantages) for c in leaves]
