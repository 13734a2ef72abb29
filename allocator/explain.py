"""Why an anchor was chosen: the core as it stood right before each decision, as plain data.

    replay ─▶ forest ─▶ Explainer.deciding ─▶ Sight (nodes in order of arrival)
                                                 └── tree finished ─▶ explain ─▶ Explanation (canonical nodes)

Nodes get their canonical index only once their tree is finished, so what was seen is kept until then. Nothing
here is printed: `explain_text` does that.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from allocator.budgets.base import Prompt
from allocator.explanation import (
    Allowance,
    Candidate,
    Draw,
    Explanation,
    Extra,
    News,
    Owner,
    Running,
    Sight,
    Weighed,
)
from allocator.forest import Forest
from allocator.hindsight import Hindsight
from allocator.rules.base import Decision, Draws, Scored
from allocator.tree import Branch, BranchState, GrowingTree
from common.nouns import NO_LEASE, ROOT


class Overheard(Hindsight):
    """The tree as it is; what a rule draws from it is kept."""

    def __init__(self, tree: GrowingTree) -> None:
        super().__init__(tree, ())
        self.heard: list[Draw] = []

    def draws(self) -> Draws:
        return _Heard(self._tree.draws(), self.heard)


class _Heard(Draws):
    def __init__(self, draws: Draws, heard: list[Draw]) -> None:
        self._draws, self._heard = draws, heard

    def index(self, count: int) -> int:
        drawn = self._draws.index(count)
        self._heard.append(Draw(count, drawn, 1 / count))
        return drawn

    def weighted(self, weights: Sequence[float]) -> int:
        drawn = self._draws.weighted(weights)
        self._heard.append(Draw(len(weights), drawn, weights[drawn] / sum(weights)))
        return drawn


@dataclass(slots=True)
class _Seen:
    """What was seen of one tree so far."""

    tree: GrowingTree
    sights: dict[int, Sight] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)


class Explainer:
    """Looks on while `forest` decides about `trees`. Implements `watch.Watch`."""

    def __init__(self, forest: Forest, trees: Container[int]) -> None:
        self._forest, self._trees = forest, trees
        self._prompts: dict[int, Prompt] = {}
        self._allowances: dict[int, Allowance] = {}
        self._seen: dict[int, _Seen] = {}
        forest.watch = self

    # --- while the forest decides ------------------------------------------------------------------------

    def admitted(self, prompt: Prompt) -> None:
        self._prompts[prompt.tree] = prompt

    def allowed(self, allowances: Mapping[int, int]) -> None:
        named = {tree: self._prompts.pop(tree) for tree in sorted(allowances)}
        together = [
            Candidate(tree, named[tree].prediction.mean, named[tree].prediction.std, allowances[tree])
            for tree in named
        ]
        for tree, prompt in named.items():
            if tree in self._trees:
                self._allowances[tree] = Allowance(
                    allowances[tree], prompt.prediction.mean, prompt.prediction.std,
                    prompt.root.value_version, together, dict(self._forest.budget.stats()), [], 0, [],
                )  # fmt: skip

    def deciding(self, tree: GrowingTree, decision: Decision) -> None:
        if tree.id not in self._trees:
            return
        seen = self._seen.setdefault(tree.id, _Seen(tree))
        before = self._allowances[tree.id].first + sum(extra.continuations for extra in seen.extras)
        sight = look(self._forest, tree, decision)
        if sight.allowance > before:
            tally = tree.tally(ROOT)
            seen.extras.append(Extra(tree.decisions, sight.allowance - before, tally.wins, tally.trials))
        seen.sights[tree.decisions] = sight

    def starting(self, tree: int, number: int) -> None:
        """An actor is about to say that it begins with a continuation."""
        seen = self._seen.get(tree)
        branch = seen.tree.branches.get(number) if seen else None
        if seen is not None and branch is not None and not branch.checked:
            seen.ages[number] = self._forest.age(branch)

    # --- once a tree is finished -------------------------------------------------------------------------

    def finished(self, tree: int) -> int | None:
        """How many nodes a tree has in the end; None before that, or where nothing was decided about it."""
        done = tree in self._seen and tree not in self._forest.trees
        return len(self._seen[tree].tree.nodes) if done else None

    def explain(self, tree: int, node: int) -> Explanation:
        """Why the node with this canonical index is where it is.

        Raises:
            KeyError, IndexError: there is no such tree, or no such node in it.
        """
        seen = self._seen[tree]
        grown, place = seen.tree, seen.tree.places()
        index, forest = list(place)[node], self._forest
        explanation = Explanation(
            tree, node, str(grown.task), grown.wave, forest.rule.name,
            sorted(kind.value for kind in forest.rule.reads), forest.budget.name,
            forest.settings.max_score_staleness,
        )  # fmt: skip
        if node == ROOT:
            weights = [b.weight for b in grown.branches.values() if b.heir_of == NO_LEASE]
            allowance = replace(
                self._allowances[tree], extras=seen.extras, spent=grown.spent, weights=weights
            )
            return replace(explanation, allowance=allowance)
        branch = grown.branches[grown.nodes[index].lease]
        owner = _owner(branch, index, place, seen.ages.get(branch.number))
        return replace(explanation, owner=owner, sight=seen.sights[branch.decision].numbered(place))


def look(forest: Forest, tree: GrowingTree, decision: Decision) -> Sight:
    """A tree right before a decision; nodes are in order of arrival. The rule is asked again, with the same
    draws, and answers the same: it keeps no state."""
    overheard = Overheard(tree)
    forest.rule.decide(overheard)
    anchors, weighs = _anchors(forest, tree, decision)
    running = [
        Running(b.number, b.anchor, len(b.nodes), b.state.value)
        for b in tree.branches.values()
        if b.state is not BranchState.ENDED
    ]
    return Sight(
        decision=tree.decisions, weighs=weighs, anchors=anchors, draws=overheard.heard, running=running,
        stamp=forest.clock(tree), age=forest.age_now(tree), predictor_version=forest.predictor.version,
        allowance=tree.allowance or 0, spent=tree.spent, news=_news(forest, tree, decision),
    )  # fmt: skip


def _anchors(forest: Forest, tree: GrowingTree, decision: Decision) -> tuple[list[Weighed], bool]:
    scores = forest.rule.explain(tree)
    started: dict[int, list[int]] = {}
    for number, pick in enumerate(decision.picks, tree.next_number):
        started.setdefault(pick.anchor, []).append(number)
    stopped: dict[int, list[int]] = {}
    for stop in decision.stops:
        stopped.setdefault(tree.tip(tree.branches[stop.number]).index, []).append(stop.number)
    weighed = {score.anchor for score in scores}
    others = [anchor for anchor in dict.fromkeys([*tree.anchors(), *started]) if anchor not in weighed]
    rows: list[tuple[int, Scored | None]] = [(score.anchor, score) for score in scores]
    rows += [(anchor, None) for anchor in others]
    found = []
    for anchor, score in rows:
        tally, prediction = tree.tally(anchor), tree.predict(anchor)
        found.append(
            Weighed(
                anchor, tree.node(anchor).depth, tree.in_flight(anchor), tally.wins, tally.trials,
                prediction.mean, prediction.std, score.total if score else None,
                dict(score.terms) if score else {}, started.get(anchor, []), stopped.get(anchor, []),
            )
        )  # fmt: skip
    return found, bool(scores)


def _news(forest: Forest, tree: GrowingTree, decision: Decision) -> News | None:
    blind = forest.without_news(tree)
    if blind is None:
        return None
    return News(sorted(tree.news), [pick.anchor for pick in blind.picks], blind.picks != decision.picks)


def _owner(branch: Branch, index: int, place: Mapping[int, int], age_at_start: int | None) -> Owner:
    return Owner(
        number=branch.number, anchor=place[branch.anchor], turn=branch.nodes.index(index) + 1,
        turns=len(branch.nodes), group=branch.group, horizon=branch.horizon, heir_of=branch.heir_of,
        weight=branch.weight, baseline=branch.baseline, predictor_version=branch.predictor_version,
        stamp=branch.stamp, speculative=branch.speculative, age_at_start=age_at_start,
        attempts=list(branch.endings), ended=branch.ended,
        reward=branch.outcome.reward if branch.outcome else None,
    )  # fmt: skip
