"""One sum over a pool of prompts: what is allowed, what the core does with it, and that no wave waits for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.budgets import make_budget
from allocator.budgets.base import Prompt
from allocator.budgets.roots import allocate_roots
from allocator.budgets.trace_roots import TraceRootsBudget
from common.config_allocator import (
    AllocatorConfig,
    BudgetConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
    TraceRuleConfig,
    check_allocator,
    root_cost,
)
from common.errors import ConfigError
from common.messages import Committed, Dropped, Inspect, Inspected, InspectFailed, TreeReady
from common.nouns import NO_LEASE, NO_PARENT, Node, Version
from common.predictor import Prediction
from tests.allocator.harness import LEARNER, ROOT, Rig, small

BATCH = 3
UNITS = st.sampled_from([1, 3])


def budget(
    candidates: int = 2, continuations: int = 6, batch: int = BATCH, unit: int = 1
) -> TraceRootsBudget:
    return TraceRootsBudget(TraceRootsConfig(continuations=continuations, candidates=candidates), batch, unit)


def prompt(tree: int, mean: float = 0.5, std: float = 0.1, wave: int = 0) -> Prompt:
    root = Node(index=0, parent=NO_PARENT, lease=NO_LEASE, offset=0, depth=0, turn=ROOT)
    return Prompt(tree, wave, wave * BATCH, root, Prediction(mean, std))


def admit_all(chosen_by: TraceRootsBudget, prompts: list[Prompt]) -> Mapping[int, int]:
    *first, last = [chosen_by.admit(each) for each in prompts]
    assert not any(first), "allowances before the pool was whole"
    return last


class Guessing(TraceRootsBudget):
    """Each prompt is as likely to succeed as its number says: prompts that differ, where the world's do not."""

    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        digest = hashlib.blake2b(str(prompt.tree).encode(), digest_size=2).digest()
        guess = Prediction(int.from_bytes(digest, "big") / 65535, 0.05)
        return super().admit(replace(prompt, prediction=guess))


# ---------------------------------------------------------------------------------------------- allowances


@given(
    data=st.data(), candidates=st.integers(1, 3), batch=st.integers(1, 4), mean=st.integers(2, 7), unit=UNITS
)
@settings(max_examples=80, deadline=None)
def test_a_whole_pool_gives_one_batch_of_prompts_the_whole_sum_whoever_was_ready_first(
    data: st.DataObject, candidates: int, batch: int, mean: int, unit: int
) -> None:
    size = candidates * batch
    means = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    prompts = [prompt(tree, mean) for tree, mean in enumerate(means)]
    orders = [prompts, data.draw(st.permutations(prompts))]
    first, second = (admit_all(budget(candidates, mean * unit, batch, unit), order) for order in orders)
    assert first == second and sorted(first) == list(range(size))
    selected = [allowance for allowance in first.values() if allowance]
    assert len(selected) == batch and sum(selected) == batch * mean * unit
    assert all(allowance % unit == 0 and allowance >= 2 * unit for allowance in selected)


def test_prompts_in_doubt_are_selected_and_what_is_certain_is_not() -> None:
    means = [0.99, 0.4, 0.02, 0.5, 0.9, 0.0]
    allowances = admit_all(budget(), [prompt(tree, mean, 0.05) for tree, mean in enumerate(means)])
    assert sorted(allowances) == list(range(6))
    assert {tree for tree, allowance in allowances.items() if allowance} == {1, 3, 4}
    assert allowances[4] > allowances[3], "where the other outcome is rarer, it takes more samples"


def test_the_uncertainty_of_a_prediction_counts() -> None:
    """0.5 because nothing is known, or because half of many succeeded: the second one holds more contrast."""
    unknown, known = prompt(0, 0.5, 0.45), prompt(1, 0.6, 0.03)
    assert admit_all(budget(2, 4, batch=1), [unknown, known]) == {0: 0, 1: 4}


def test_under_the_rule_trace_the_sum_is_shared_out_in_samples_from_the_root() -> None:
    """Three prompts, 18 continuations each: 18 samples, each with two continuations from prefixes."""
    rule = TraceRuleConfig(per_root=2)
    assert root_cost(rule) == 3 and root_cost(RuleConfig()) == 1
    chosen_by = make_budget(TraceRootsConfig(continuations=18, candidates=2), BATCH, root_cost(rule))
    assert isinstance(chosen_by, TraceRootsBudget)
    means = [0.5, 0.1, 0.8, 0.97, 0.03, 0.3]
    allowances = admit_all(chosen_by, [prompt(tree, mean, 0.1) for tree, mean in enumerate(means)])
    samples = allocate_roots(means, 18, BATCH, [0.1] * 6, fill=True)
    assert list(allowances.values()) == [3 * count for count in samples] and sum(samples) == 18


def test_a_prompt_that_comes_later_gets_the_typical_allowance_at_once() -> None:
    chosen_by = budget()
    admit_all(chosen_by, [prompt(tree) for tree in range(6)])
    assert chosen_by.admit(prompt(6, 0.001)) == {6: 6}
    assert chosen_by.admit(prompt(7, wave=1)) == {}, "that one is the first of the next pool"


def test_a_prompt_that_is_dropped_before_the_choice_leaves_the_pool() -> None:
    chosen_by = budget()
    for tree in range(5):
        assert chosen_by.admit(prompt(tree)) == {}
    assert chosen_by.withdraw(2, 0) == {}
    assert chosen_by.withdraw(77, 0) == {}, "one that was never ready"
    assert chosen_by.admit(prompt(5)) == {}
    assert set(chosen_by.admit(prompt(6))) == {0, 1, 3, 4, 5, 6}


def test_a_continuation_weighs_one_over_its_prompts_allowance() -> None:
    chosen_by = budget()
    allowances = admit_all(chosen_by, [prompt(tree, mean) for tree, mean in enumerate((0.5, 0.1, 0.9) * 2)])
    for tree, allowance in allowances.items():
        if allowance:
            assert chosen_by.weight(tree) == 1 / allowance
    chosen_by.admit(prompt(6))
    assert chosen_by.weight(6) == 1 / 6


def test_what_it_keeps_survives_as_plain_values_in_the_middle_of_a_pool() -> None:
    kept, fresh = budget(), budget()
    admit_all(kept, [prompt(tree, tree / 6, 0.1) for tree in range(6)])
    for tree in range(6, 11):
        kept.admit(prompt(tree, tree / 11, 0.1, wave=1))
    fresh.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(kept.to_state())))
    assert fresh.to_state() == kept.to_state()
    for each in (prompt(11, 0.3, 0.2, wave=1), prompt(12, wave=0)):
        assert fresh.admit(each) == kept.admit(each)
    assert fresh.stats() == kept.stats() and fresh.weight(12) == kept.weight(12)


# --------------------------------------------------------------------------------------------- at the start


@pytest.mark.parametrize("rule, continuations, words", [
    (TraceRuleConfig(per_root=2), 8, "a multiple of 3, at least 6, for budget=trace_roots with rule=trace"),
    (TraceRuleConfig(per_root=2), 3, "2 or more from the prompt, 2 from prefixes for each"),
    (RuleConfig(), 1, "at least 2 for budget=trace_roots"),
])  # fmt: skip
def test_a_sum_that_cannot_be_shared_out_is_refused_with_the_reason(
    rule: RuleConfig, continuations: int, words: str
) -> None:
    config = AllocatorConfig(rule=rule, budget=TraceRootsConfig(continuations=continuations))
    with pytest.raises(ConfigError, match=r"allocator\.budget\.continuations") as error:
        check_allocator(config, 4)
    assert words in str(error.value)
    with pytest.raises(ValueError, match="two or more times"):
        budget(continuations=continuations, unit=root_cost(rule))


@pytest.mark.parametrize("rule", [RuleConfig(), RandomRuleConfig(), TraceRuleConfig(per_root=2)])
def test_other_sums_are_not(rule: RuleConfig) -> None:
    check_allocator(AllocatorConfig(rule=rule, budget=TraceRootsConfig(continuations=9)), 4)


def test_the_rounds_of_tree_grpo_still_have_to_fit_an_even_budget() -> None:
    with pytest.raises(ConfigError):
        check_allocator(AllocatorConfig(rule=RandomRuleConfig(), budget=BudgetConfig(continuations=9)), 4)


# --------------------------------------------------------------------------------------------- in the core


def rig(candidates: int = 2, **bounds: int) -> Rig:
    """Waves of two prompts, four continuations each."""
    config = TraceRootsConfig(continuations=4, candidates=candidates)
    made = Rig(small(**bounds), continuations=Guessing(config, bounds.get("batch_trees", 2)))
    made.learner()
    return made


def records(of: Rig, kind: str) -> list[dict]:
    return [fields for found, fields in of.core.take_records() if found == kind]


def test_a_wave_is_chosen_from_a_pool_and_the_rest_of_it_costs_no_token() -> None:
    run = rig()
    actor = run.actor(slots=32)
    inspects = run.take(actor, Inspect)
    assert [message.tree for message in inspects] == [0, 1, 2, 3]
    for message in inspects:
        run.say(actor, Inspected(message.tree, message.task, ROOT))
    run.work(actor)
    trees = {m.tree.id: m.tree for m in run.take(LEARNER, TreeReady)}
    dropped = records(run, "tree_dropped")
    assert len(trees) == 2 and len(dropped) == 2 and not set(trees) & {f["tree"] for f in dropped}
    assert all((f["reason"], f["tokens"]) == ("not_selected", 0) for f in dropped)
    assert sum(len(tree.continuations) for tree in trees.values()) == 8
    assert all(tree.planned_weight == pytest.approx(1.0) for tree in trees.values())
    assert sorted(p.slot for p in run.core.state.delivery.parcels.values()) == [0, 1]
    assert run.stat("trees/dropped/not_selected") == 2 and run.core.waiting() == "work_ahead"


def test_no_prompt_of_the_next_wave_is_set_up_before_the_learner_is_there() -> None:
    """K = 0: predictions for the second pool know all of the first wave."""
    run = rig(candidates=3, steps=3)
    actor = run.actor(slots=64)
    run.work(actor)
    assert run.stat("trees/opened") == 6
    run.consume([m.tree.id for m in run.take(LEARNER, TreeReady)], 1)
    assert run.stat("trees/opened") == 12 and run.stat("predictor/version") == 1


def test_a_candidate_that_cannot_be_set_up_is_replaced_in_its_pool() -> None:
    run = rig()
    actor = run.actor(slots=32)
    while run.stat("trees/dropped/inspect_failed") == 0:
        for message in run.take(actor, Inspect):
            failed = InspectFailed(message.tree, "broken")
            fine = Inspected(message.tree, message.task, ROOT)
            run.say(actor, failed if message.tree == 1 else fine)
    assert run.stat("leases/pending") == 0 == run.stat("leases/queued"), "the pool is not whole"
    assert [m.tree for m in run.take(actor, Inspect)] == [4]
    run.say(actor, Inspected(4, run.core.state.forest.trees[4].task, ROOT))
    assert run.stat("trees/dropped/not_selected") == 2 and run.stat("leases/queued") == 8


def test_a_selected_prompt_that_is_dropped_is_replaced_at_once_by_one() -> None:
    run = rig()
    actor = run.actor(slots=32)
    run.work(actor)
    gone, kept = sorted(m.tree.id for m in run.take(LEARNER, TreeReady))
    run.say(LEARNER, Dropped(gone, "stale"))
    assert [m.tree for m in run.take(actor, Inspect)] == [4]
    run.say(actor, Inspected(4, run.core.state.forest.trees[4].task, ROOT))
    tree = run.core.state.forest.trees[4]
    assert (tree.allowance, tree.wave) == (4, 0) and not tree.candidate
    run.work(actor)
    assert run.stat("trees/opened") == 5
    run.consume([kept, 4], 1)
    assert run.stat("trees/open") == 4, "the next pool"


@pytest.mark.parametrize("candidates", [1, 2])
def test_a_pool_that_was_begun_is_filled_though_the_learner_fell_back_behind_it(candidates: int) -> None:
    """Half a pool, and then the wave before it has to be grown again: it must not fill the room of the pool,
    or both wait, the pool for room and the learner for trees."""
    run = rig(candidates, steps=3)
    actor = run.actor(slots=64)
    run.work(actor)
    run.consume([m.tree.id for m in run.take(LEARNER, TreeReady)], 1)
    inspects = run.take(actor, Inspect)
    run.say(actor, Inspected(inspects[0].tree, inspects[0].task, ROOT))
    lost = run.core.state.forest.trees[inspects[1].tree]
    for _ in range(2):
        run.say(actor, InspectFailed(lost.id, "broken"))
        run.take(actor, Inspect)
    run.say(LEARNER, Committed(Version(0, 1), [p for p in run.core.state.delivery.parcels]))
    learner = run.learner(step=0, lineage=1, incarnation="2")
    assert run.stat("trees/dropped/checkpoint_lost") == 2
    run.say(actor, InspectFailed(lost.id, "broken"))
    assert run.stat("trees/dropped/inspect_failed") == 1
    for message in inspects[2:]:
        run.say(actor, Inspected(message.tree, message.task, ROOT))
    for step in (1, 2, 3):
        run.work(actor)
        trees = [m.tree.id for m in run.take(learner, TreeReady)]
        assert len(trees) == 2, f"update {step}: {run.core.stats()}"
        run.consume(trees, step, lineage=1, peer=learner)


def test_what_is_told_says_what_the_choice_is_worth() -> None:
    run = rig(candidates=4, steps=6, batch_trees=4)
    actor = run.actor(slots=256)
    for step in range(1, 7):
        run.work(actor)
        run.consume([m.tree.id for m in run.take(LEARNER, TreeReady)], step)
    assert run.stat("budget/planned") > run.stat("budget/even") > 0
    assert run.stat("budget/largest") >= 4
    assert run.stat("budget/predicted") == pytest.approx(run.stat("budget/planned"))
    assert run.stat("budget/mixed") == 0, "all continuations of the rig succeed"
    assert run.stat("growth/continuations_per_tree") == 4 and run.stat("growth/mixed_share") == 0
