"""The search through the core's messages grows what a plain loop around the forest grows."""

from __future__ import annotations

import msgspec
import pytest

from allocator.budgets import make_budget
from allocator.forest import Forest
from allocator.rules import make_rule
from allocator.rules.base import WAIT, Decision, EventKind, Pick, Rule, TreeView
from allocator.settings import Settings
from allocator.tree import Branch, GrowingTree
from allocator.waves import Waves
from benchmarks.population import POPULATIONS, State
from benchmarks.population_search import START, Search
from common.config_allocator import (
    AdaptiveConfig,
    BudgetConfig,
    EntropyRuleConfig,
    IgrpoRuleConfig,
    PatrRuleConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
    TraceRuleConfig,
    UucbRuleConfig,
    root_cost,
)
from common.nouns import ROOT, Ending, Outcome, RewardSource, Tree
from common.predictor import HistoryPredictor
from common.seeds import turn_seed

C = POPULATIONS["C"]
BATCH, WAVES, SEED = 3, 3, 5
RULES = {
    "flat": RuleConfig(),
    "random": RandomRuleConfig(),
    "arpo": EntropyRuleConfig(initial=3),
    "at2po": EntropyRuleConfig(form="at2po", initial=3, beam=2),
    "uucb": UucbRuleConfig(),
    "trace": TraceRuleConfig(),
    "patr": PatrRuleConfig(interval=2),
    "igrpo": IgrpoRuleConfig(),
}
BUDGETS = {
    "fixed": BudgetConfig(continuations=6),
    "trace_roots": TraceRootsConfig(continuations=6, candidates=2),
    "adaptive": AdaptiveConfig(continuations=6, overhead=0.5),
}


def search_of(rule: RuleConfig, budget: BudgetConfig, first: int = 0) -> Search:
    made = make_budget(budget, BATCH, root_cost(rule))
    return Search(C, make_rule(rule), made, HistoryPredictor(), batch=BATCH, seed=SEED, first=first)


def searched(rule: RuleConfig, budget: BudgetConfig, first: int = 0) -> list[Tree]:
    search = search_of(rule, budget, first)
    return [tree for _ in range(WAVES) for tree in search.wave()]


class PlainLoop:
    """One tree after the other, one branch after the other, without leases, actors or messages."""

    def __init__(self, rule: RuleConfig, budget: BudgetConfig) -> None:
        self.turns = search_of(rule, budget)
        self.budget = make_budget(budget, BATCH, root_cost(rule))
        predictor = HistoryPredictor()
        settings = Settings(seed=SEED, batch_trees=BATCH, max_score_staleness=0, env=C.name)
        self.forest = Forest(settings, make_rule(rule), self.budget, predictor)
        self.waves = Waves(predictor, self.budget, BATCH)
        self.states: dict[int, dict[int, State]] = {}
        self.done: list[Tree] = []

    def trees(self) -> list[Tree]:
        pooled, candidates = self.budget.pooled, self.budget.candidates
        for wave in range(WAVES):
            for place in range(BATCH * candidates):
                number, slot = wave * BATCH * candidates + place, wave * BATCH + (0 if pooled else place)
                tree = self.forest.open(number, slot, wave, START, candidate=pooled)
                root = C.root(tree.task.index)
                self.states[number] = {ROOT: root}
                self.forest.root(tree, self.turns._root_turn(root), None)
                self.settle()
            assert not self.forest.trees, f"wave {wave} stands still"
        return sorted(self.done, key=lambda tree: tree.id)

    def settle(self) -> None:
        forest = self.forest
        while forest.rejected or forest.settled:
            while forest.rejected:
                forest.remove(forest.trees[forest.rejected.popleft()])
            tree = forest.trees.get(forest.settled.popleft()) if forest.settled else None
            if tree is not None:
                tree.settled = False
                self.ask(tree)

    def ask(self, tree: GrowingTree) -> None:
        decision, branches = self.forest.decide(tree)
        for branch in branches:
            self.run(branch)
        if decision.complete and not tree.parked:
            done = self.forest.close(tree)
            assert done is not None
            self.waves.complete(tree)
            self.done.append(done)
        elif not branches and not tree.parked:
            self.forest.touch(tree)

    def run(self, branch: Branch) -> None:
        tree = branch.tree
        state = self.states[tree.id][branch.anchor]
        while True:
            seed = turn_seed(branch.seed, len(branch.nodes))
            state = C.step(state, seed)
            node = self.forest.expand(branch, self.turns._turn_of(state, seed), [])
            self.states[tree.id][node.index] = state
            if state.success is not None:
                said = Outcome(0.0, 0.0, RewardSource.ENVIRONMENT, Ending.TERMINATED)
                return self.forest.end(branch, "finished", tree.earned(branch, said))
            if len(branch.nodes) == branch.horizon:
                return self.forest.end(branch, "horizon", None)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("rule", RULES)
def test_its_trees_are_those_of_a_plain_loop_decision_for_decision(rule: str, budget: str) -> None:
    mine, theirs = (
        searched(RULES[rule], BUDGETS[budget]), PlainLoop(RULES[rule], BUDGETS[budget]).trees()
    )  # fmt: skip
    assert len(mine) == BATCH * WAVES
    # The plain loop has no learner, whose updates a tree notes when it is opened.
    assert [msgspec.structs.replace(tree, opened_at=START) for tree in mine] == theirs


def test_an_episode_of_a_tree_is_a_path_of_the_population() -> None:
    tree = searched(RuleConfig(), BudgetConfig(continuations=2))[0]
    root = C.root(tree.task.index)
    for c in tree.continuations:
        state = root
        for index in c.nodes:
            turn = tree.nodes[index].turn
            state = C.step(state, turn.seed)
            assert turn.num_action_tokens == state.tokens
        assert c.outcome is not None and c.outcome.raw_reward == float(state.success or 0)


def test_prompts_never_repeat_and_a_run_may_leave_out_the_first_ones() -> None:
    def scores(first: int) -> list[float | None]:
        trees = searched(RuleConfig(), BudgetConfig(continuations=1), first)
        return [tree.nodes[ROOT].turn.process_score for tree in trees]

    everything = scores(0)
    assert len(set(everything)) == BATCH * WAVES
    assert scores(BATCH)[: BATCH * (WAVES - 1)] == everything[BATCH:]


def test_of_a_pool_as_many_prompts_are_grown_as_a_wave_has_places() -> None:
    trees = searched(RULES["flat"], BUDGETS["trace_roots"])
    assert [tree.wave for tree in trees] == [wave for wave in range(WAVES) for _ in range(BATCH)]
    assert sum(len(tree.continuations) for tree in trees) == 6 * BATCH * WAVES


def test_the_core_keeps_its_books_while_time_stands_still() -> None:
    search = search_of(RULES["trace"], BUDGETS["adaptive"])
    for _ in range(2):
        search.wave()
    assert search.core.audit() == []


def test_an_oracle_finds_every_state_of_the_wave_by_its_features() -> None:
    hidden: dict[bytes, State] = {}
    seen: list[bytes] = []

    class Watcher(HistoryPredictor):
        def predict(self, prefix, version=None):  # type: ignore[no-untyped-def]
            seen.append(prefix.features)
            assert hidden[prefix.features].depth == prefix.depth
            return super().predict(prefix, version)

    budget = make_budget(BudgetConfig(continuations=4))
    search = Search(C, make_rule(UucbRuleConfig()), budget, Watcher(), batch=2, seed=0, hidden=hidden)
    search.wave()
    assert len(set(seen)) > 8


class Lazy(Rule):
    """Starts one continuation, then waits for ever."""

    name = "lazy"
    reads = frozenset({EventKind.OUTCOME})

    def decide(self, view: TreeView) -> Decision:
        return WAIT if view.branches else Decision(picks=(Pick(ROOT),))


def test_a_rule_that_would_stand_still_is_named() -> None:
    budget = make_budget(BudgetConfig(continuations=2))
    search = Search(C, Lazy(), budget, HistoryPredictor(), batch=1, seed=0)
    with pytest.raises(RuntimeError, match="'lazy' waits"):
        search.wave()
