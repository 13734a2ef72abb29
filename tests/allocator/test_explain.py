"""Why an anchor was chosen: a search followed by hand, and every node of whole simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from allocator.budgets.base import Prompt
from allocator.budgets.fixed import FixedBudget
from allocator.core import AllocatorCore
from allocator.explain import Explainer
from allocator.explain_text import lines
from allocator.explanation import Candidate, Draw, Explanation, Extra, News, Running, Weighed
from allocator.replay import Replay
from allocator.replay_role import explain_node
from allocator.rules.base import (
    COMPLETE,
    WAIT,
    Decision,
    EventKind,
    Pick,
    Rule,
    Scored,
    TreeView,
)
from allocator.settings import Settings
from common.config_allocator import BUDGET_SCHEMAS, RULE_SCHEMAS, RandomRuleConfig
from common.journal import JournalWriter, read_journal
from common.messages import Expanded, Finished, HorizonReached, Inspect
from common.nouns import ROOT, Lease, Tree, floats_to_bytes
from tests.allocator.harness import turn, win
from tests.allocator.journaled import Journalled, configuration, tap
from tests.allocator.test_fleet import fleet

PENALTY = 0.2


class Greedy(Rule):
    """Two from the prompt; then one at a time, where (wins + 1) / (trials + 2) − 0.2 · in flight is highest."""

    name = "greedy"
    reads = frozenset({EventKind.NODE, EventKind.OUTCOME})

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        if not view.branches:
            return Decision(picks=(Pick(ROOT), Pick(ROOT)))
        if not all(branch.nodes for branch in list(view.branches.values())[:2]):
            return WAIT
        return Decision(picks=(Pick(self.explain(view)[0].anchor),))

    def explain(self, view: TreeView) -> list[Scored]:
        if not view.branches:
            return []
        found = []
        for anchor in view.anchors():
            tally = view.tally(anchor)
            value, crowd = (tally.wins + 1) / (tally.trials + 2), -PENALTY * view.in_flight(anchor)
            found.append(Scored(anchor, value + crowd, {"value": value, "crowd": crowd}))
        return sorted(found, key=lambda scored: -scored.total)


def finish_from(rig: Journalled, peer: str, lease: Lease, offset: int, reward: float) -> None:
    """The last turn of a lease that has started, and its end."""
    rig.expand(peer, lease, offset, last=True, reward=reward)
    rig.say(peer, Finished(lease.id, offset + 1, win(reward)))


def searched(folder: Path) -> Journalled:
    """One tree of five continuations at D = 4, by one actor whose turns come in this order.

    lease 1: turn          arrives first, and is canonical node 3
    lease 0: turn          node 1 ─▶ decision 1 starts lease 2 there
    lease 0: turn, lost    node 2 ─▶ decision 2 starts lease 3 at node 3
    lease 1: turn, won     node 4 ─▶ decision 3 starts lease 4 at the root
    leases 2, 3, 4         nodes 5; 6; 7, 8
    """
    rig = Journalled(configuration(continuations=5, staleness=4, steps=1, batch=1), folder, rule=Greedy())
    rig.learner()
    rig.actor("a/1", slots=8)
    rig.inspect("a/1")
    first, second = rig.leases("a/1")
    rig.start("a/1", first)
    rig.start("a/1", second)
    rig.expand("a/1", second, 0)
    rig.expand("a/1", first, 0)
    (third,) = rig.leases("a/1")
    rig.start("a/1", third)
    finish_from(rig, "a/1", first, 1, reward=0.0)
    (fourth,) = rig.leases("a/1")
    rig.start("a/1", fourth)
    finish_from(rig, "a/1", second, 1, reward=1.0)
    (fifth,) = rig.leases("a/1")
    rig.finish("a/1", third, turns=1)
    rig.finish("a/1", fifth, turns=2)
    rig.finish("a/1", fourth, turns=1)
    rig.writer.flush(sync=False)
    return rig


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Journalled:
    return searched(tmp_path_factory.mktemp("search"))


def why(search: Journalled, node: int) -> Explanation:
    settings = Settings.from_config(search.config, "r")
    core = AllocatorCore(settings, Greedy(), FixedBudget(5))
    report = explain_node(core, search.rundir.allocator_journal, (0, node))
    assert report.differences == 0 and report.explanation is not None
    return report.explanation


HALF = 0.5
PRIOR = (1 / 12) ** 0.5
"""Standard deviation of the uniform prior: the predictor has learnt nothing within the first wave."""


def row(
    node: int, depth: int, flying: int, won: tuple[int, int], value: float, started: list[int]
) -> Weighed:
    terms = {"value": value, "crowd": pytest.approx(-PENALTY * flying)}
    total = pytest.approx(value - PENALTY * flying)
    wins, trials = won
    return Weighed(
        node, depth, flying, wins, trials, HALF, pytest.approx(PRIOR), total, terms, started, []  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_anchors_are_those_of_the_moment_by_the_numbers_of_the_finished_tree(search: Journalled) -> None:
    """Node 3 arrived before node 1; node 2 did not exist yet."""
    sight = why(search, 5).sight
    assert sight is not None and (sight.decision, sight.weighs, sight.draws) == (1, True, [])
    assert sight.anchors == [
        row(1, 1, 0, (0, 0), 1 / 2, [2]),
        row(3, 1, 0, (0, 0), 1 / 2, []),
        row(0, 0, 2, (0, 0), 1 / 2, []),
    ]
    assert sight.running == [Running(0, 0, 1, "running"), Running(1, 0, 1, "running")]
    assert sight.news is None
    assert (sight.stamp, sight.age, sight.allowance, sight.spent) == (2, 4, 5, 2)


def test_outcomes_since_the_last_decision_that_changed_nothing(search: Journalled) -> None:
    sight = why(search, 6).sight
    assert sight is not None and sight.decision == 2
    assert sight.anchors == [
        row(3, 1, 0, (0, 0), 1 / 2, [3]),
        row(0, 0, 1, (0, 1), 1 / 3, []),
        row(1, 1, 1, (0, 1), 1 / 3, []),
    ]
    assert sight.running == [Running(1, 0, 1, "running"), Running(2, 1, 0, "running")]
    assert sight.news == News([0], [3], changed=False)
    assert (sight.stamp, sight.age) == (4, 4)


def test_outcomes_since_the_last_decision_that_changed_it(search: Journalled) -> None:
    """Without the win, node 3 would have stood at 0.3 and the prompt at 1/3 − 0.2."""
    sight = why(search, 8).sight
    assert sight is not None and sight.decision == 3
    assert sight.anchors == [
        row(0, 0, 0, (1, 2), 1 / 2, [4]),
        row(3, 1, 1, (1, 1), 2 / 3, []),
        row(1, 1, 1, (0, 1), 1 / 3, []),
    ]
    assert sight.news == News([1], [3], changed=True)


def test_the_owner_of_a_node_and_what_was_fixed_when_it_was_decided(search: Journalled) -> None:
    owner = why(search, 8).owner
    assert owner is not None
    assert (owner.number, owner.anchor, owner.turn, owner.turns) == (4, 0, 2, 2)
    assert (owner.weight, owner.baseline, owner.predictor_version) == (1 / 5, HALF, 0)
    assert (owner.stamp, owner.speculative) == (6, True)
    assert owner.age_at_start == 4, "two events of lease 2, and two that lease 3 may still bring"
    assert (owner.ended, owner.reward, owner.attempts) == ("finished", 1.0, ["finished"])


def test_a_decision_that_weighs_nothing_says_so_and_still_shows_what_was_there(search: Journalled) -> None:
    for node in (1, 2, 3, 4):
        sight = why(search, node).sight
        assert sight is not None and (sight.decision, sight.weighs) == (0, False)
        assert [(a.node, a.total, a.terms, a.started) for a in sight.anchors] == [(0, None, {}, [0, 1])]
        assert (sight.age, sight.stamp, sight.running) == (0, 0, [])


def test_the_prompt_got_its_allowance_for_itself(search: Journalled) -> None:
    found = why(search, 0)
    allowance = found.allowance
    assert found.owner is None and found.sight is None and allowance is not None
    assert (allowance.first, allowance.spent, allowance.extras) == (5, 5, [])
    assert (allowance.mean, allowance.predictor_version) == (HALF, 0)
    assert allowance.std == pytest.approx(PRIOR)
    assert allowance.together == [Candidate(0, HALF, allowance.std, 5)]
    assert allowance.weights == [1 / 5] * 5


# ------------------------------------------------------------------------------------------- budgets


class Pool(FixedBudget):
    """Two prompts are looked at together: the second gets one continuation more than the first."""

    name = "pool"

    def __init__(self) -> None:
        super().__init__(2)
        self.waiting: list[int] = []

    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        self.waiting.append(prompt.tree)
        if len(self.waiting) < 2:
            return {}
        both, self.waiting = self.waiting, []
        return {tree: 1 + place for place, tree in enumerate(sorted(both))}

    def extra(self, view: TreeView) -> int:
        """One more for a tree that has lost all it tried so far, once."""
        tally = view.tally(ROOT)
        return 1 if tally.wins == 0 and (view.allowance or 0) < 3 else 0

    def stats(self) -> dict[str, float]:
        return {"waiting": float(len(self.waiting))}


def test_prompts_that_got_their_allowance_together_and_what_was_added_later(tmp_path: Path) -> None:
    config = configuration(steps=1, batch=2)
    config.allocator.rule.name = "flat"
    rig = Journalled(config, tmp_path, rule=Flat(), budget=Pool())
    rig.learner()
    rig.actor("a/1", slots=8)
    for reward in (0.0, 0.0, 0.0, 0.0):
        rig.inspect("a/1")
        for lease in rig.leases("a/1"):
            rig.finish("a/1", lease, turns=1, reward=reward)
    rig.writer.flush(sync=False)
    core = AllocatorCore(Settings.from_config(config, "r"), Flat(), Pool())
    report = explain_node(core, rig.rundir.allocator_journal, (1, 0))
    assert report.differences == 0 and report.explanation is not None
    allowance = report.explanation.allowance
    assert allowance is not None and allowance.first == 2 and allowance.spent == 3
    assert [(c.tree, c.allowance) for c in allowance.together] == [(0, 1), (1, 2)]
    assert allowance.extras == [Extra(1, 1, 0.0, 2)]
    assert allowance.budget_stats == {"waiting": 0.0}


class Flat(Rule):
    """All from the prompt, weighing nothing."""

    name = "flat"
    reads: frozenset[EventKind] = frozenset()

    def decide(self, view: TreeView) -> Decision:
        return Decision(picks=(Pick(ROOT),) * view.budget_left) if view.budget_left else COMPLETE


# ------------------------------------------------------------------------------------- whole runs


def explained(core: AllocatorCore, path: Path) -> tuple[Explainer, list[Tree]]:
    """Everything about every tree that was finished, in one replay."""
    explainer, trees = Explainer(core.state.forest, range(1 << 30)), list[Tree]()
    finished = core.state.delivery.finished
    core.state.delivery.finished = lambda tree, slot: trees.append(tree) or finished(tree, slot)  # type: ignore
    player = Replay(core)
    for record in read_journal(path):
        player.feed(record)
    assert player.finish() == []
    return explainer, trees


@pytest.mark.parametrize("staleness", [0, 3])
def test_every_node_of_a_faulty_run_is_explained_as_the_learner_sees_it(
    staleness: int, tmp_path: Path
) -> None:
    rule = RandomRuleConfig()
    simulation = fleet(2, rule, max_score_staleness=staleness)
    with JournalWriter(tmp_path / "journal.tw") as journal:
        tap(simulation.core, journal)
        simulation.run(max_events=5000)
    explainer, trees = explained(fleet(2, rule, max_score_staleness=staleness).core, tmp_path / "journal.tw")
    assert len(trees) > 10
    drawn = 0
    for tree in trees:
        assert explainer.finished(tree.id) == len(tree.nodes)
        for node in tree.nodes[1:]:
            found = explainer.explain(tree.id, node.index)
            owner, sight = found.owner, found.sight
            assert owner is not None and sight is not None
            one = next(each for each in tree.continuations if each.number == node.lease)
            assert owner.anchor == one.anchor and one.nodes[owner.turn - 1] == node.index
            assert (owner.weight, owner.baseline, owner.stamp) == (one.weight, one.baseline, one.score_stamp)
            assert sight.stamp == one.score_stamp and sight.age <= staleness
            (chosen,) = {a.node for a in sight.anchors if one.number in a.started}
            assert chosen == one.anchor and {a.node for a in sight.anchors} <= set(range(len(tree.nodes)))
            assert all(tree.nodes[a.node].depth == a.depth for a in sight.anchors)
            assert bool(sight.draws) == (one.number >= rule.chains), "first the chains, then a round of draws"
            drawn += len(sight.draws)
    assert drawn > 50


def test_what_a_rule_draws_is_overheard_with_its_probability(tmp_path: Path) -> None:
    rig = Journalled(configuration(), tmp_path)
    rig.learner()
    rig.actor("a/1", slots=8)
    while rig.work("a/1", turns=3):
        rig.tick(0.2)
    rig.writer.flush(sync=False)
    core = AllocatorCore.from_config(rig.config, "r")
    explainer, trees = explained(core, rig.rundir.allocator_journal)
    sight = explainer.explain(trees[0].id, len(trees[0].nodes) - 1).sight
    assert sight is not None
    assert [(d.options, d.probability) for d in sight.draws] == [(3, 1 / 3)] * 4, "root and two open turns"
    assert all(isinstance(draw, Draw) and 0 <= draw.drawn < 3 for draw in sight.draws)


def test_looking_on_changes_nothing(search: Journalled) -> None:
    def history(watched: bool) -> dict[str, float]:
        core = AllocatorCore(Settings.from_config(search.config, "r"), Greedy(), FixedBudget(5))
        if watched:
            Explainer(core.state.forest, range(100))
        player = Replay(core)
        for record in search.records():
            player.feed(record)
        assert player.finish() == []
        return core.stats()

    assert history(True) == history(False)


# ------------------------------------------------------------------------------------- every rule


def worker(rig: Journalled, deepest: int = 5) -> int:
    """One actor does all it is given, with process scores and entropies; how many leases."""
    done = 0
    while True:
        rig.inspect("a/1")
        leases = rig.leases("a/1")
        for lease in leases:
            rig.start("a/1", lease)
            for offset in range(lease.offset, deepest):
                last = lease.depth + offset + 1 >= deepest
                sampled = turn(lease, offset, last, reward=float(last and sampled_well(lease.seed)))
                score = (lease.seed >> offset & 7) / 7
                sampled = msgspec.structs.replace(
                    sampled, process_score=score, entropies=floats_to_bytes([1.0 + score])
                )
                rig.say("a/1", Expanded(lease.id, offset, sampled))
                if last:
                    rig.say("a/1", Finished(lease.id, offset + 1, win(sampled.reward)))
                    break
                if lease.horizon and offset + 1 == lease.horizon:
                    rig.say("a/1", HorizonReached(lease.id, offset + 1))
                    break
        if not leases and not any(isinstance(send.message, Inspect) for send in rig.sent):
            return done
        done += len(leases)


def sampled_well(seed: int) -> bool:
    return seed % 3 == 0


@pytest.mark.parametrize("budget", BUDGET_SCHEMAS)
@pytest.mark.parametrize("rule", RULE_SCHEMAS)
def test_every_rule_and_budget_explains_what_it_chooses(rule: str, budget: str, tmp_path: Path) -> None:
    """What is chosen is among what is weighed, and asked again with the same draws a rule says the same."""
    config = configuration(RULE_SCHEMAS[rule](), continuations=18, steps=1)
    config.allocator.budget = BUDGET_SCHEMAS[budget](continuations=18)
    rig = Journalled(config, tmp_path)
    rig.learner()
    rig.actor("a/1", slots=8)
    assert worker(rig) >= 18
    rig.writer.flush(sync=False)
    explainer, trees = explained(AllocatorCore.from_config(config, "r"), rig.rundir.allocator_journal)
    assert len(trees) == 2
    for tree in trees:
        prompt = explainer.explain(tree.id, ROOT).allowance
        assert (
            prompt is not None and prompt.first + sum(e.continuations for e in prompt.extras) >= prompt.spent
        )
        for node in tree.nodes[1:]:
            found = explainer.explain(tree.id, node.index)
            assert found.owner is not None and found.sight is not None
            chosen = [a for a in found.sight.anchors if node.lease in a.started]
            assert {a.node for a in chosen} == {found.owner.anchor}
            assert not found.sight.weighs or chosen[0].total is not None, "what it chose, it weighed"
            assert list(lines(found))
