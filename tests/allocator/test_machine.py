"""A property-based machine: anything may happen in any order, and the conservation law holds after each step.

Beside the core runs a model made of plain dicts, fed with what the core journals and with what was really sent. It
knows only the law: one live attempt per continuation, epochs that grow by one, turns accepted once and in order,
from the holder of the newest epoch; every attempt and every tree ends once.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator.budgets.base import Budget
from common.config_allocator import RandomRuleConfig, RuleConfig
from common.messages import (
    Bye,
    Committed,
    Consumed,
    Credit,
    Declined,
    Dropped,
    Expanded,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Inspect,
    Inspected,
    InspectFailed,
    Message,
    Revoke,
    Starting,
    TreeReady,
)
from common.nouns import Lease, Version
from tests.allocator.harness import ROOT, Rig, hello, ready, small, turn, win

NAMES = ("a", "b", "c")
Key = tuple[int, int]


class Model:
    """What must hold of the records, whatever led to them."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[int, int, int], str] = {}
        self.newest: dict[Key, int] = {}
        self.turns: dict[Key, int] = {}
        self.tokens: dict[int, int] = {}
        self.trees: dict[int, str] = {}
        self.trained: dict[int, int] = {}

    def read(self, kind: str, fields: dict[str, Any]) -> None:
        handler = getattr(self, f"on_{kind}", None)
        if handler is not None:
            handler(**fields)

    def live(self, tree: int) -> list[tuple[int, int, int]]:
        return [key for key, state in self.attempts.items() if key[0] == tree and state == "live"]

    def on_tree_opened(self, tree: int, task: str, wave: int) -> None:
        assert tree not in self.trees
        self.trees[tree] = "open"

    def on_lease_issued(self, tree: int, number: int, epoch: int, peer: str) -> None:
        assert self.trees[tree] == "open"
        assert epoch == self.newest.get((tree, number), -1) + 1, "an epoch is used once, and grows by one"
        assert all(key[1] != number for key in self.live(tree)), "two live attempts at one continuation"
        self.newest[tree, number] = epoch
        self.attempts[tree, number, epoch] = "live"

    def on_turn_accepted(self, tree: int, number: int, epoch: int, offset: int, tokens: int) -> None:
        assert self.attempts[tree, number, epoch] == "live", "a turn of an attempt that is over"
        assert epoch == self.newest[tree, number]
        assert offset == self.turns.get((tree, number), 0), "a turn is accepted once, in order"
        self.turns[tree, number] = offset + 1
        self.tokens[tree] = self.tokens.get(tree, 0) + tokens

    def on_lease_ended(self, tree: int, number: int, epoch: int, kind: str, turns: int, reason: str) -> None:
        assert self.attempts[tree, number, epoch] == "live", "an attempt ends once"
        assert turns == self.turns.get((tree, number), 0)
        self.attempts[tree, number, epoch] = kind

    def on_tree_ready(self, tree: int, tokens: int) -> None:
        assert self.trees[tree] == "open" and not self.live(tree), "closed while a lease is live"
        assert tokens == self.tokens.get(tree, 0)
        assert any(k[0] == tree and state == "finished" for k, state in self.attempts.items())
        self.trees[tree] = "ready"

    def on_tree_dropped(self, tree: int, reason: str, tokens: int) -> None:
        assert self.trees[tree] in ("open", "ready", "delivered", "consumed", "committed")
        assert not self.live(tree)
        self.trees[tree] = f"dropped: {reason}"

    def on_tree_delivered(self, tree: int) -> None:
        assert self.trees[tree] in ("ready", "delivered", "consumed")
        self.trees[tree] = "delivered"

    def on_tree_consumed(self, tree: int, lineage: int, step: int) -> None:
        assert self.trees[tree] in ("ready", "delivered")
        self.trees[tree] = "consumed"

    def on_tree_committed(self, tree: int) -> None:
        assert self.trees[tree] in ("ready", "delivered", "consumed"), "committed once"
        self.trees[tree] = "committed"


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        branch_rule=st.sampled_from(["flat", "random"]),
        staleness=st.sampled_from([0, 2, 5]),
        lag=st.sampled_from([0, 1]),
    )
    def begin(self, branch_rule: str, staleness: int, lag: int) -> None:
        self.prepare(branch_rule, 4, staleness, lag)

    def prepare(self, branch_rule: str, budget: int | Budget, staleness: int, lag: int) -> None:
        config = RuleConfig() if branch_rule == "flat" else RandomRuleConfig(chains=2, expansions=1)
        bounds = small(
            steps=3, batch_trees=2, max_policy_lag=lag, max_score_staleness=staleness, max_attempts=2,
            connect_timeout_s=1e9,
        )  # fmt: skip
        self.rig = Rig(bounds, config, budget)
        self.model = Model()
        self.incarnations = dict.fromkeys(NAMES, 0)
        self.learner = ("learner/0", 0, 0)
        self.granted: list[tuple[str, Lease]] = []
        self.inspects: list[tuple[str, Inspect]] = []
        self.said: list[tuple[str, Message]] = []
        self.delivered: list[int] = []
        self.credit = 0
        self.limit = bounds.trees
        self.restart_learner(0)
        self.enter("a")

    # --- helpers -----------------------------------------------------------------------------------------

    def say(self, peer: str, message: Message) -> bool:
        handled = self.rig.say(peer, message)
        self.said.append((peer, message))
        self.collect()
        return handled.ack

    def collect(self) -> None:
        for kind, fields in self.rig.core.take_records():
            self.model.read(kind, fields)
        for send in self.rig.sent:
            match send.message:
                case Grant(leases=leases):
                    self.granted += [(send.peer, lease) for lease in leases]
                case Inspect():
                    self.inspects.append((send.peer, send.message))
                case TreeReady(tree=tree):
                    assert send.peer == self.learner[0]
                    self.delivered.append(tree.id)
        self.rig.sent.clear()

    def pick(self, data: st.DataObject) -> tuple[str, Lease]:
        """Mostly a live attempt, now and then one that is over."""
        live = self.live()
        return data.draw(
            st.sampled_from(live if live and data.draw(st.integers(0, 3)) else self.granted[-12:])
        )

    def live(self) -> list[tuple[str, Lease]]:
        state = self.model.attempts
        return [(p, x) for p, x in self.granted if state[x.id.tree, x.id.number, x.id.epoch] == "live"]

    def turns_of(self, lease: Lease) -> int:
        return self.model.turns.get((lease.id.tree, lease.id.number), 0)

    # --- actors ------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def enter(self, name: str) -> None:
        """A new process under this name; the old one, if any, is replaced."""
        self.incarnations[name] += 1
        key = f"{name}/{self.incarnations[name]}"
        self.say(key, hello("actor", key, slots=2, prefetch=1))

    @precondition(lambda self: self.inspects)
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def answer_inspect(self, data: st.DataObject, works: bool) -> None:
        peer, message = data.draw(st.sampled_from(self.inspects[-6:]))
        self.say(
            peer, Inspected(message.tree, message.task, ROOT) if works else InspectFailed(message.tree, "no")
        )

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        peer, lease = self.pick(data)
        assert self.say(peer, Starting(lease.id, Version(0, 0))) == self.rig.core.knows(peer)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), last=st.booleans(), ahead=st.sampled_from([0, 0, 0, 0, 1]))
    def expand(self, data: st.DataObject, last: bool, ahead: int) -> None:
        """The next turn, sometimes one whose predecessor was lost."""
        peer, lease = self.pick(data)
        offset = self.turns_of(lease) + ahead
        before = self.turns_of(lease)
        self.say(peer, Expanded(lease.id, offset, turn(lease, offset, last)))
        assert self.turns_of(lease) <= before + (ahead == 0)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float) -> None:
        peer, lease = self.pick(data)
        self.say(peer, Finished(lease.id, self.turns_of(lease), win(reward)))

    @rule(rounds=st.integers(1, 6))
    def work_in_order(self, rounds: int) -> None:
        """Everybody does what it was told, so that runs get somewhere between the accidents."""
        for _ in range(rounds):
            inspects, self.inspects = self.inspects, []
            for peer, message in inspects:
                self.say(peer, Inspected(message.tree, message.task, ROOT))
            for peer, lease in self.live():
                self.say(peer, Starting(lease.id, Version(0, 0)))
                offset = self.turns_of(lease)
                self.say(peer, Expanded(lease.id, offset, turn(lease, offset, offset > 0)))
                if offset > 0:
                    self.say(peer, Finished(lease.id, self.turns_of(lease), win()))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), again=st.booleans())
    def fail(self, data: st.DataObject, again: bool) -> None:
        peer, lease = self.pick(data)
        self.say(peer, Failed(lease.id, "drill", again, 1))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def decline(self, data: st.DataObject) -> None:
        peer, lease = self.pick(data)
        self.say(peer, Declined(lease.id, "drill"))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A message comes a second time, at any later time."""
        peer, message = data.draw(st.sampled_from(self.said[-20:]))
        self.say(peer, message)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.say(f"{name}/{self.incarnations[name]}", Bye(0, "leaving"))

    # --- time --------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.2, 1.5]))
    def pass_time(self, seconds: float) -> None:
        self.rig.tick(seconds)
        self.collect()

    @rule(silent=st.sets(st.sampled_from(NAMES)), seconds=st.sampled_from([11, 31]))
    def pass_much_time(self, silent: set[str], seconds: int) -> None:
        """Some are silent, the others live but get on with nothing."""
        for _ in range(3):
            self.rig.now += seconds / 3
            for peer in [p for p in self.rig.core.state.peers.members if p.partition("/")[0] not in silent]:
                self.rig.say(peer, Heartbeat(0, 0))
            self.rig.tick()
            self.collect()

    # --- the learner -------------------------------------------------------------------------------------

    @rule(more=st.integers(0, 8))
    def give_credit(self, more: int) -> None:
        self.credit += more
        self.say(self.learner[0], Credit(self.credit))

    @precondition(lambda self: self.delivered)
    @rule(count=st.integers(1, 2))
    def consume(self, count: int) -> None:
        key, lineage, step = self.learner
        trees, self.delivered = self.delivered[:count], self.delivered[count:]
        self.learner = (key, lineage, step + 1)
        self.say(key, Consumed(trees, Version(lineage, step + 1)))

    @rule()
    def commit(self) -> None:
        key, lineage, step = self.learner
        trees = [tree for tree, state in self.model.trees.items() if state == "consumed"]
        self.say(key, Committed(Version(lineage, step), trees))

    @precondition(lambda self: self.delivered)
    @rule()
    def drop(self) -> None:
        self.say(self.learner[0], Dropped(self.delivered.pop(0), "stale"))

    @rule(back=st.sampled_from([0, 0, 1, 2]))
    def restart_learner(self, back: int) -> None:
        """It resumes at an older step, in a new lineage, and gets again what it lost."""
        _, lineage, step = self.learner
        key, step = f"learner/{lineage + 1}", max(0, step - back)
        self.learner, self.delivered, self.credit = (key, lineage + 1, step), [], 4
        self.say(key, hello("learner", key, version=Version(lineage + 1, step)))
        for tree, state in self.model.trees.items():
            if state in ("delivered", "consumed"):
                self.model.trees[tree] = "ready"  # what no checkpoint holds goes again, as the credit comes
        self.say(key, Credit(4))

    # --- the law -----------------------------------------------------------------------------------------

    @invariant()
    def every_attempt_and_every_tree_is_in_one_place(self) -> None:
        if not hasattr(self, "rig"):
            return
        stats = self.rig.core.stats()
        states = list(self.model.attempts.values())
        assert stats["leases/issued"] == len(states)
        assert self.rig.core.live_leases == states.count("live")
        for kind in set(states) - {"live"}:
            assert stats[f"leases/{kind}"] == states.count(kind)
        trees = list(self.model.trees.values())
        assert stats["trees/opened"] == len(trees)
        for state in ("open", "ready", "delivered", "consumed", "committed"):
            assert stats[f"trees/{state}"] == trees.count(state), state
        dropped = sum(state.startswith("dropped") for state in trees)
        assert stats["trees/dropped"] == dropped
        assert len(trees) - dropped <= self.limit

    @invariant()
    def nobody_holds_more_than_it_can(self) -> None:
        if hasattr(self, "rig"):
            for peer in self.rig.core.state.peers.members.values():
                assert len(peer.queued) + len(peer.running) <= 3


AllocatorMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_the_model_is_fed_by_a_whole_run_too() -> None:
    """The model itself accepts an ordinary run from start to end, with revokes and all."""
    rule = RandomRuleConfig(chains=2, expansions=1)
    rig, actor = ready(small(max_score_staleness=2), rule, continuations=4, slots=8)
    model = Model()
    for step in (1, 2):
        rig.work(actor)
        trees = [m.tree.id for m in rig.take("learner/1", TreeReady)]
        assert len(trees) == 2
        rig.consume(trees, step)
    for kind, fields in rig.core.take_records():
        model.read(kind, fields)
    assert list(model.trees.values()) == ["consumed"] * 4 and not rig.take(actor, Revoke)
