"""The forest: open trees, the decisions of the branch rule about them, and their score clocks.

    opened ──root known──▶ asked ──▶ branches outstanding ──▶ asked … ──▶ complete ──▶ canonical `Tree`

A tree is asked about (`touch`) after every event that could change the rule's mind: it goes to `settled`
when nothing is outstanding, else to `wanting` if a decision made now would not be too stale. `settled`
trees are asked at once (they decide or close); `wanting` ones only when some actor has room, so that
decisions are made late.

Staleness D (design §4): a decision's stamp is the tree's clock when it is made. Its age is the events of
*other* decisions since, plus what their outstanding branches may still bring, one event per kind read.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from allocator.accounts import count_tree
from allocator.budgets.base import Budget, Prompt
from allocator.hindsight import Hindsight
from allocator.horizons import waiting_path
from allocator.rules.base import COMPLETE, OPEN, Decision, EventKind, Pick, Rule, Stop
from allocator.settings import Settings
from allocator.tree import ENDED, Branch, GrowingTree
from allocator.watch import Watch
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    ROOT,
    BranchScore,
    Ending,
    Node,
    Outcome,
    TaskId,
    Tree,
    Turn,
    Version,
)
from common.predictor import Predictor
from common.prefix import describe
from common.seeds import lease_seed, task_index
from common.staleness import score_age

BRIM = 8
"""A decision is not made when its age would come closer to D than D / 8. A few events come in before its
leases start, and each that is too old by then costs a turn sampled for nothing: at the brim one in ten."""

BROUGHT = frozenset({EventKind.NODE, EventKind.SCORE, EventKind.OUTCOME})
"""Kinds that a running continuation may bring; the predictor moves between waves only."""


class Forest:
    """All open trees of a run."""

    def __init__(self, settings: Settings, rule: Rule, budget: Budget, predictor: Predictor) -> None:
        self.settings = settings
        self.rule = rule
        self.budget = budget
        self.predictor = predictor
        self.trees: dict[int, GrowingTree] = {}
        self.settled: deque[int] = deque()
        self.wanting: list[tuple[int, int]] = []
        """A heap of (outstanding branches, tree), outdated entries among them."""
        self.chosen: deque[int] = deque()
        """Waves whose pool the budget has chosen from."""
        self.rejected: deque[int] = deque()
        """Prompts that it did not select: to be dropped."""
        self.parked: dict[int, set[int]] = {}
        """Trees, by wave, whose budget waits for others of their wave."""
        self.candidates = 0
        """Open trees that share the slots of their wave with the rest of their pool."""
        self.inspecting = 0
        self.changed = 0
        """Decisions that outcomes which came since the one before made another."""
        self.unlocked = 0
        """Decisions that could not have been made without those outcomes."""
        self.decided = 0
        self.grown = 0
        self.speculative = 0
        self.account: Counter[str] = Counter()
        """What closed trees cost."""
        self.oldest_score = 0
        """Greatest age at which a branch was let through at `Starting`."""
        self.watch: Watch | None = None
        self._kinds_out = len(rule.reads & BROUGHT)
        self.speculates = self._kinds_out > 0
        """Whether a decision made while something is outstanding may miss what it brings."""
        self._reads = tuple(rule.reads)
        """Looked up at every event, by identity: members of an enum hash slowly."""
        self._reads_predictor = EventKind.PREDICTOR in rule.reads

    # --- trees -------------------------------------------------------------------------------------------

    def open(
        self, tree: int, slot: int, wave: int, version: Version, *, candidate: bool = False
    ) -> GrowingTree:
        """A new tree over the run's task number `tree`; its root is not known yet."""
        index = task_index(self.settings.seed, tree)
        task = TaskId(env=self.settings.env, split=self.settings.split, index=index)
        self.candidates += candidate
        self.trees[tree] = growing = GrowingTree(
            tree, task, slot, wave, version, self.predictor, self.settings.seed, candidate=candidate
        )
        return growing

    def root(self, tree: GrowingTree, turn: Turn, gold_answer: str | None) -> None:
        """The prompt is known: the budget may now name allowances."""
        tree.gold_answer = gold_answer
        root = Node(
            index=ROOT, parent=NO_PARENT, lease=NO_LEASE, offset=0, depth=0, turn=turn,
            value_version=self.predictor.version,
        )  # fmt: skip
        prediction = self.predictor.predict(describe(root))
        tree.nodes[ROOT] = root = msgspec.structs.replace(root, value=prediction.mean)
        tree.next_node = ROOT + 1
        prompt = Prompt(tree.id, tree.wave, tree.slot, root, prediction)
        if self.watch is not None:
            self.watch.admitted(prompt)
        self._allow(self.budget.admit(prompt))

    def _allow(self, allowances: Mapping[int, int]) -> None:
        """Prompts get their allowance: one on its own, or all of a pool; then each one chosen takes a slot of
        its own in its wave."""
        if self.watch is not None and allowances:
            self.watch.allowed(allowances)
        chosen = sorted(tree for tree, allowance in allowances.items() if allowance > 0)
        if chosen and self.trees[chosen[0]].candidate:
            self.chosen.append(self.trees[chosen[0]].wave)
        for place, number in enumerate(chosen):
            tree = self.trees[number]
            if len(allowances) > 1:
                tree.slot = tree.wave * self.settings.batch_trees + place
            self.candidates -= tree.candidate
            tree.candidate = False
            tree.allowance = allowances[number]
            self.touch(tree)
        self.rejected.extend(sorted(tree for tree, allowance in allowances.items() if allowance <= 0))

    def touch(self, tree: GrowingTree) -> None:
        """Something happened: the rule may have something new to say."""
        if tree.allowance is None:
            return
        if tree.outstanding == 0:
            if not tree.settled:
                tree.settled = True
                self.settled.append(tree.id)
        elif (
            tree.wanting != tree.outstanding
            and (tree.budget_left > 0 or tree.open_ends > 0)
            and not self.throttled(tree)
        ):
            self._want(tree)

    def _want(self, tree: GrowingTree) -> None:
        tree.wanting = tree.outstanding
        if len(self.wanting) > 4 * len(self.trees) + 64:
            self.wanting = [(t.wanting, t.id) for t in self.trees.values() if t.wanting > 0]
            heapq.heapify(self.wanting)
        else:
            heapq.heappush(self.wanting, (tree.wanting, tree.id))

    def next_wanting(self) -> GrowingTree | None:
        """Of the trees that may have something to grant the one with fewest branches outstanding, the lowest
        where equal: slots spread over the trees, and each decision knows as much as it can."""
        while self.wanting:
            outstanding, number = heapq.heappop(self.wanting)
            tree = self.trees.get(number)
            if tree is not None and tree.wanting == outstanding:
                tree.wanting = 0
                return tree
        return None

    def remove(self, tree: GrowingTree) -> None:
        """Forget an open tree (closed or dropped); its branches must all have ended."""
        del self.trees[tree.id]
        self.candidates -= tree.candidate
        self._unpark(tree.wave)
        for branch in tree.branches.values():
            if branch.state is not ENDED:
                raise RuntimeError(f"tree {tree.id} closed while {branch.id} is {branch.state.value}")
        self._allow(self.budget.withdraw(tree.id, tree.slot))

    def _unpark(self, wave: int) -> None:
        """A tree of the wave has decided or is gone: those that waited for it are asked again."""
        for number in sorted(self.parked.pop(wave, ())):
            if number in self.trees:
                self.trees[number].parked = False
                self.touch(self.trees[number])

    # --- the clock ---------------------------------------------------------------------------------------

    def clock(self, tree: GrowingTree) -> int:
        """Events the rule reads that have happened, the predictor's updates among them."""
        return tree.clock + (self.predictor.version if self._reads_predictor else 0)

    def age_now(self, tree: GrowingTree) -> int:
        """Age of a decision made now: what outstanding branches may still bring."""
        return score_age(0, 0, self._kinds_out * tree.outstanding)

    def throttled(self, tree: GrowingTree) -> bool:
        """Whether a decision made now would rest on scores older than D, or would hardly start in time."""
        limit = self.settings.max_score_staleness
        return self.age_now(tree) > limit - limit // BRIM

    def age(self, branch: Branch) -> int:
        """Events that the decision behind a branch has not seen."""
        tree, own = branch.tree, branch.decision
        others = tree.outstanding - tree.outstanding_of.get(own, 0)
        happened = self.clock(tree) - tree.own_events.get(own, 0)
        return score_age(branch.stamp, happened, self._kinds_out * others)

    def too_old(self, branch: Branch) -> bool:
        """Whether a branch that never started may not start any more.

        Heirs are exempt: a path that waits at its horizon has to go on, with shares of its weight that were
        fixed together, and without one of them its return would not be known. This bends no bound where a
        rule decides about all paths at once (`patr`, `igrpo`): nothing of another decision is outstanding
        then, nothing comes in between, and the age of its heirs is 0 at any D. Where a rule would let each
        path go on by itself, D holds for the decision (`throttled`), and `oldest_score` tells how old its
        heirs were when they started.
        """
        if branch.checked or branch.heir_of != NO_LEASE:
            return False
        return self.age(branch) > self.settings.max_score_staleness

    def _event(self, branch: Branch, kind: EventKind) -> None:
        if kind in self._reads:
            tree = branch.tree
            tree.clock += 1
            tree.own_events[branch.decision] = tree.own_events.get(branch.decision, 0) + 1

    # --- decisions ---------------------------------------------------------------------------------------

    def decide(self, tree: GrowingTree) -> tuple[Decision, list[Branch]]:
        """Ask the rule; returns its decision and the branches it starts. A complete tree may get more
        budget."""
        decision = self.rule.decide(tree)
        if decision == COMPLETE and tree.outstanding == 0:
            extra = self.budget.extra(tree)
            tree.parked = extra is None
            if extra is None:
                self.parked.setdefault(tree.wave, set()).add(tree.id)
            if extra and tree.allowance is not None:
                tree.allowance += extra
                decision = self.rule.decide(tree)
                self._unpark(tree.wave)
        if self.watch is not None and (decision.picks or decision.stops):
            self.watch.deciding(tree, decision)
        if decision.picks:
            self._weigh_the_news(tree, decision)
        for stop in decision.stops:
            self._stop(tree, stop)
        return decision, self._grow(tree, decision.picks) if decision.picks else []

    def _weigh_the_news(self, tree: GrowingTree, decision: Decision) -> None:
        """Whether outcomes that came since the last decision changed this one: what reprioritising is
        worth."""
        blind = self.without_news(tree)
        if blind is not None:
            self.changed += bool(blind.picks) and blind.picks != decision.picks
            self.unlocked += not blind.picks
        tree.news.clear()

    def without_news(self, tree: GrowingTree) -> Decision | None:
        """What the rule would decide now had those outcomes not come, with the same draws; None where none
        came, or it reads none."""
        if not tree.news or EventKind.OUTCOME not in self.rule.reads:
            return None
        return self.rule.decide(Hindsight(tree, tree.news))

    def _stop(self, tree: GrowingTree, stop: Stop) -> None:
        """The path ends here: paid what its turns earned, and what the rule says in place of the rest."""
        branch = waiting_path(self.rule.name, tree, stop.number, "stops")
        earned = tree.turn_rewards(branch)
        branch.outcome = Outcome(earned + stop.reward, earned, stop.source, Ending.PRUNED)
        branch.ended = "stopped"
        tree.open_ends -= 1
        self._event(branch, EventKind.OUTCOME)

    def _grow(self, tree: GrowingTree, picks: tuple[Pick, ...]) -> list[Branch]:
        """One decision: its branches share stamp and number, and their weights come from the past only."""
        stamp = self.clock(tree)
        speculative = self._kinds_out * tree.outstanding > 0
        heirs = [pick.heir_of for pick in picks]
        for number in dict.fromkeys(heirs):
            if number != NO_LEASE:
                waiting_path(self.rule.name, tree, number, "gives heirs to")
        grown = []
        for pick in picks:
            branch = self._branch(tree, pick, stamp, speculative)
            if pick.heir_of != NO_LEASE:
                parent = tree.branches[pick.heir_of]
                branch.weight = parent.weight / heirs.count(pick.heir_of)
                tree.open_ends -= not parent.heirs
                parent.heirs.append(branch.number)
            else:
                tree.spent += 1
            tree.branches[branch.number] = branch
            tree.outstanding += 1
            tree.flying[pick.anchor] = tree.flying.get(pick.anchor, 0) + 1
            grown.append(branch)
        tree.outstanding_of[tree.decisions] = len(picks)
        tree.decisions += 1
        self.decided += 1
        self.grown += len(picks)
        self.speculative += len(picks) if speculative else 0
        return grown

    def _branch(self, tree: GrowingTree, pick: Pick, stamp: int, speculative: bool) -> Branch:
        prefix = tree.prefix_at(pick.anchor)
        version = self.predictor.version
        self.predictor.pin(version)
        number = tree.next_number
        tree.next_number += 1
        return Branch(
            tree, number, tree.decisions, pick.group, pick.anchor, pick.horizon, pick.heir_of,
            weight=self.budget.weight(tree.id),
            baseline=self.predictor.predict(prefix, version).mean,
            predictor_version=version, stamp=stamp, speculative=speculative,
            seed=lease_seed(self.settings.seed, tree.id, number), prefix=prefix,
        )  # fmt: skip

    # --- what happens to a branch ------------------------------------------------------------------------

    def expand(self, branch: Branch, turn: Turn, scores: list[BranchScore]) -> Node:
        """One turn was sampled: a node below the branch's tip, with the value its pinned predictor gives
        it."""
        tree = branch.tree
        parent, index, version = tree.tip(branch), tree.next_node, branch.predictor_version
        node = Node(
            index, parent.index, branch.number, len(branch.nodes), parent.depth + 1, turn, scores,
            value_version=version,
        )  # fmt: skip
        tree.nodes[index] = node
        if turn.status is OPEN:
            value = self.predictor.predict(tree.prefix_after(index, branch.prefix.tree), version).mean
            tree.nodes[index] = node = msgspec.structs.replace(node, value=value)
        tree.next_node += 1
        branch.nodes.append(index)
        self._event(branch, EventKind.NODE)
        if scores or turn.process_score is not None:
            self._event(branch, EventKind.SCORE)
        self.touch(tree)
        return node

    def end(self, branch: Branch, ended: str, outcome: Outcome | None) -> None:
        """The continuation is over: with an outcome, at its horizon, or dropped for a reason."""
        branch.outcome = outcome
        branch.ended = ended
        if outcome is not None:
            self._event(branch, EventKind.OUTCOME)
            branch.tree.news.add(branch.number)
            branch.tree.count_outcome(branch)
        if ended == "horizon":
            branch.tree.open_ends += 1
        self._settle(branch)

    def give_back(self, branch: Branch) -> None:
        """The branch never sampled anything that counts: its budget is free again, its number is used up."""
        tree = branch.tree
        del tree.branches[branch.number]
        tree.returned.append(branch)
        tree.spent -= 1
        branch.ended = "given back"
        self._settle(branch)

    def _settle(self, branch: Branch) -> None:
        tree = branch.tree
        branch.state = ENDED
        tree.outstanding -= 1
        tree.outstanding_of[branch.decision] -= 1
        tree.flying[branch.anchor] -= 1
        self.predictor.unpin(branch.predictor_version)
        self.touch(tree)

    def close(self, tree: GrowingTree) -> Tree | None:
        """The finished tree in canonical order, or None when no continuation has an outcome."""
        done = tree.canonical() if any(b.outcome is not None for b in tree.branches.values()) else None
        count_tree(self.account, tree)
        self.budget.closed(tree)
        self.remove(tree)
        return done
