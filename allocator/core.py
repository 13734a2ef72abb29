"""The allocator's decision core: a state machine without sockets, clocks, threads or global randomness.

    handle(peer, message, now) -> Handled(sends, ack)        tick(now) -> sends        restart(boot, now)

         Hello ─▶ door ──────────────┐
    actor says ─▶ growing ─▶ forest ─┼─▶ pump ─▶ Inspect, Grant ─▶ actors        (granting)
    learner says ▶ learning ─────────┤      └──▶ TreeReady within credit ─▶ learner
          tick ─▶ timers ────────────┘

`forest` holds the open trees and asks the branch rule, `leases` the attempts at continuations, `peers` who
has room, `delivery` the finished trees, `waves` what the success predictor learns. Time is an argument and
draws are hashed from the run's seed, so the same object runs behind the ROUTER, in a simulated fleet, under
a property-based machine and in the replay of a journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allocator import granting, growing, learning
from allocator.audit import audit, stats, waiting
from allocator.budgets import make_budget
from allocator.budgets.base import Budget
from allocator.door import PEER_LOST, end_run, hello, leave, restart, revive, silent
from allocator.endings import confirm_stop, retry
from allocator.peers import ACTOR, Peer
from allocator.rules import make_rule
from allocator.rules.base import Rule
from allocator.settings import Settings
from allocator.state import CoreState, Exit, Handled, Record, Send
from allocator.tree import Branch, GrowingTree
from common.config import Config
from common.config_allocator import root_cost
from common.messages import Bye, Hello, InspectFailed, Message
from common.predictor import HistoryPredictor, Predictor
from common.predictors import make_predictor

__all__ = ["AllocatorCore", "Exit", "Handled", "Record", "Send", "Settings"]


class AllocatorCore:
    """One run's decisions.

    `agreed` settings and all bounds come in `settings`; `rule`, `budget` and `predictor` are the choices of
    the run. Peers are named `name/incarnation` by the transport.
    """

    def __init__(
        self, settings: Settings, rule: Rule, budget: Budget, predictor: Predictor | None = None
    ) -> None:
        self.state = CoreState(settings, rule, budget, predictor or HistoryPredictor())
        self._begun = False

    @classmethod
    def from_config(cls, config: Config, run: str) -> AllocatorCore:
        """The core that a configuration describes, for the run named `run`."""
        rule, budget = (
            make_rule(config.allocator.rule),
            make_budget(
                config.allocator.budget, config.learner.batch_trees, root_cost(config.allocator.rule)
            ),
        )
        predictor = make_predictor(config.allocator.predictor)
        return cls(Settings.from_config(config, run), rule, budget, predictor)

    # --- input -------------------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message, now: float) -> Handled:
        """One message from one peer."""
        s = self._at(now)
        ack = self._receive(peer, message)
        granting.pump(s)
        return Handled(s.take_sends(), ack)

    def tick(self, now: float) -> list[Send]:
        """Time has passed: deadlines, silence, rest, balance. Call a few times a second.

        One that changes nothing but the clock leaves no record, so that a replay needs only the others.
        """
        changed = not self._begun
        s = self._at(now)
        before = len(s.records)
        s.waited[waiting(s)] += 1
        while (due := s.next_due()) is not None:
            changed = self._remind(*due) or changed
        changed = self._learner_overdue() or changed
        granting.pump(s)
        if s.ending is None:
            granting.rebalance(s)
        sends = s.take_sends()
        if changed or sends or len(s.records) > before:
            s.records.insert(before, ("tick", {"now": now}))
        return sends

    def stop(self, code: int, reason: str, now: float) -> list[Send]:
        """End the run from outside: every peer is told goodbye with `code`."""
        s = self._at(now)
        s.record("stopped", code=code, reason=reason, now=now)
        end_run(s, code, reason)
        if s.peers.learner is not None:
            s.send(s.peers.learner.key, Bye(code, reason))
        return s.take_sends()

    def restart(self, boot: int, now: float) -> None:
        """The process that ran this core died: another one, the `boot`-th after the first, goes on.

        Nobody can be told anything yet: whoever is there says hello again.
        """
        s = self._at(now)
        restart(s, boot)
        s.sends.clear()
        s.departed.clear()

    def adopt(self, decisive: Mapping[str, str], *, fell_back: bool = False) -> None:
        """Go on by what these say of the settings that may change between two processes of a run.

        A run that was complete goes on when it is to make more updates, or to make some of them again.

        Args:
            fell_back: the checkpoint that it was complete by is gone (`allocator.recovery`).
        """
        s, before = self.state, self.state.settings
        settings = before.changed(decisive)
        s.settings = s.forest.settings = s.delivery.settings = settings
        if s.ending is not None and (settings.steps > before.steps or fell_back):
            s.ending = None

    def take_records(self) -> list[Record]:
        """Journal records since the last call, in order."""
        records, self.state.records = self.state.records, []
        return records

    def take_departed(self) -> list[str]:
        """Peers whose unacknowledged messages may be forgotten: what they held went elsewhere."""
        departed, self.state.departed = self.state.departed, []
        return departed

    # --- for the caller ----------------------------------------------------------------------------------

    @property
    def ending(self) -> Exit | None:
        """Set once the run is over: drain until `live_leases` is 0, then exit with its code."""
        return self.state.ending

    def knows(self, peer: str) -> bool:
        """Whether this incarnation was let in and has not been replaced."""
        return peer in self.state.peers.members

    @property
    def live_leases(self) -> int:
        return self.state.leases.live

    @property
    def open_trees(self) -> int:
        return len(self.state.forest.trees)

    def audit(self) -> list[str]:
        """Violations of the conservation law, empty when it holds. Reads everything: not for every
        message."""
        return audit(self.state)

    def stats(self) -> dict[str, float]:
        """Numbers for metrics and the progress line."""
        return stats(self.state)

    def waiting(self) -> str:
        """What the core waits for now, in one word; `working` when actors have all they can hold."""
        return waiting(self.state)

    # --- dispatch ----------------------------------------------------------------------------------------

    def _at(self, now: float) -> CoreState:
        s = self.state
        s.now = now
        if not self._begun:
            self._begun = True
            s.learner_since = now
        return s

    def _receive(self, key: str, message: Message) -> bool:
        s = self.state
        if isinstance(message, Hello):
            hello(s, key, message)
            return True
        peer = s.peers.members.get(key)
        if peer is None:
            s.counts["strangers"] += 1
            return False
        if not peer.alive:
            revive(s, peer)
        peer.seen_at = s.now
        if isinstance(message, Bye):
            self._goodbye(peer, message)
            return True
        handlers = growing.HANDLERS if peer.role == ACTOR else learning.HANDLERS
        handler = handlers.get(type(message))
        if handler is None:
            s.counts["forbidden"] += 1
            return True
        return handler(s, peer, message)

    def _goodbye(self, peer: Peer, message: Bye) -> None:
        leave(self.state, peer, "expired", "said goodbye")
        if peer.role != ACTOR and message.code == 0:
            end_run(self.state, 0, "the run is complete")

    # --- time --------------------------------------------------------------------------------------------

    def _remind(self, kind: str, subject: Any, epoch: int) -> bool:
        """Act on a reminder if it still matters. True when something changed, a new reminder included."""
        match kind:
            case "lease":
                return self._lease_due(subject, epoch)
            case "inspect":
                return self._inspection_due(subject, epoch)
            case "silence":
                return self._silence_due(subject)
            case "stopping":
                key, lease = subject
                peer = self.state.peers.members.get(key)
                return peer is not None and confirm_stop(self.state, peer, lease)
        return self._rested(subject)

    def _lease_due(self, branch: Branch, epoch: int) -> bool:
        s = self.state
        if branch.epoch != epoch or not branch.live or s.ending is not None:
            return False
        peer = s.peers.members[branch.holder]
        due = s.leases.due(branch, peer, s.settings.lease_deadline_s)
        if due > s.now:
            s.remind(due, "lease", branch, epoch)
            return True
        retry(s, branch, peer, "expired", "no progress in time", confirmed=False)
        return True

    def _inspection_due(self, tree: GrowingTree, attempt: int) -> bool:
        if not tree.inspector or tree.inspections != attempt:
            return False
        peer = self.state.peers.members[tree.inspector]
        return growing.inspect_failed(self.state, peer, InspectFailed(tree.id, "no answer in time"))

    def _silence_due(self, peer: Peer) -> bool:
        s = self.state
        if not peer.alive or s.peers.members.get(peer.key) is not peer:
            return False
        due = peer.seen_at + s.settings.dead_after_s
        if due > s.now:
            s.remind(due, "silence", peer)
            return True
        silent(s, peer)
        return True

    def _rested(self, peer: Peer) -> bool:
        if not peer.resting or self.state.peers.members.get(peer.key) is not peer:
            return False
        peer.resting = False
        self.state.peers.changed(peer)
        return True

    def _learner_overdue(self) -> bool:
        """End the run for want of a learner. True when that was now."""
        s = self.state
        learner, limit = s.peers.learner, s.settings.connect_timeout_s
        gone = learner is None or not learner.alive
        if s.ending is not None or not gone or s.now - s.learner_since <= limit:
            return False
        what = "no learner has said hello" if s.version is None else "the learner is gone"
        wanted = f"{what} for {limit:g} s (cluster.connect_timeout_s)"
        end_run(s, PEER_LOST, f"{wanted}: start it again, then the run")
        return True
