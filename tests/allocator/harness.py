"""A core with a learner and actors that a test moves by hand: sent messages are kept, time is a number."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from allocator.budgets import make_budget
from allocator.budgets.base import Budget
from allocator.core import AllocatorCore, Handled, Send, Settings
from allocator.rules import make_rule
from allocator.rules.base import Rule
from common.config_allocator import BudgetConfig, RandomRuleConfig, RuleConfig
from common.messages import (
    PROTOCOL_VERSION,
    Capabilities,
    Consumed,
    Credit,
    Expanded,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Message,
    Starting,
)
from common.nouns import Ending, Lease, Outcome, RewardSource, Turn, TurnStatus, Version, VersionRun
from common.seeds import turn_seed

ROOT = Turn(observation=b"\1\0\0\0\2\0\0\0", state_hash="root", snapshot=b"root")
LEARNER = "learner/1"
M = TypeVar("M", bound=Message)


def small(**changes: Any) -> Settings:
    """Two updates of two trees, K = D = 0."""
    base: dict[str, Any] = {
        "steps": 2, "batch_trees": 2, "max_policy_lag": 0, "max_score_staleness": 0, "lease_deadline_s": 30.0,
    }  # fmt: skip
    return Settings(**(base | changes))


def win(reward: float = 1.0) -> Outcome:
    return Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)


def turn(lease: Lease, offset: int, last: bool = False, tokens: int = 1, reward: float | None = None) -> Turn:
    """A turn whose action is drawn from the lease's seed and the offset; unless told, the last one pays 1."""
    seed = turn_seed(lease.seed, offset)
    return Turn(
        action=b"".join((seed >> (8 * i) & 0xFF).to_bytes(4, "little") for i in range(tokens)),
        logprobs=b"\0\0\0\0" * tokens,
        versions=[VersionRun(Version(0, 0), tokens)],
        observation=b"\3\0\0\0",
        action_text=f"a{seed & 0xFF}",
        seed=seed,
        status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
        reward=float(last) if reward is None else reward,
        snapshot=None if last else b"s%d" % (seed & 0xFF),
    )


class Rig:
    """See the module docstring. `sent` holds everything not yet taken by `take`."""

    def __init__(
        self,
        settings: Settings | None = None,
        rule: Rule | RuleConfig | None = None,
        continuations: int | Budget = 2,
        core: type[AllocatorCore] = AllocatorCore,
    ) -> None:
        rule = rule or RuleConfig()
        chosen = make_rule(rule) if isinstance(rule, RuleConfig) else rule
        if isinstance(continuations, int):
            continuations = make_budget(BudgetConfig(continuations=continuations))
        self.core = core(settings or small(), chosen, continuations)
        self.now = 100.0
        self.sent: list[Send] = []
        self.check_law = True

    # --- moving ------------------------------------------------------------------------------------------

    def say(self, peer: str, message: Message) -> Handled:
        handled = self.core.handle(peer, message, self.now)
        self.sent += handled.sends
        self.law()
        return handled

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.sent += self.core.tick(self.now)
        self.law()

    def live(self, seconds: float, *silent: str) -> None:
        """Time passes; everybody but the silent ones sends heartbeats, and nobody gets on."""
        for _ in range(round(seconds)):
            self.now += 1
            for peer in [p for p in self.core.state.peers.members if p not in silent]:
                self.say(peer, Heartbeat(0, 0))
            self.tick()

    def law(self) -> None:
        if self.check_law:
            assert self.core.audit() == []

    def learner(self, credit: int = 100, step: int = 0, lineage: int = 0, incarnation: str = "1") -> str:
        key = f"learner/{incarnation}"
        self.say(key, hello("learner", key, version=Version(lineage, step)))
        self.say(key, Credit(credit))
        return key

    def actor(self, name: str = "a/1", slots: int = 4, prefetch: int = 0) -> str:
        self.say(name, hello("actor", name, slots=slots, prefetch=prefetch))
        return name

    # --- what was sent -----------------------------------------------------------------------------------

    def take(self, peer: str, kind: type[M]) -> list[M]:
        """Messages of a kind sent to a peer since they were last taken."""
        found = [s.message for s in self.sent if s.peer == peer and isinstance(s.message, kind)]
        self.sent = [s for s in self.sent if not (s.peer == peer and isinstance(s.message, kind))]
        return found

    def leases(self, peer: str) -> list[Lease]:
        return [lease for grant in self.take(peer, Grant) for lease in grant.leases]

    # --- an actor's work ---------------------------------------------------------------------------------

    def inspect(self, peer: str) -> None:
        for message in self.take(peer, Inspect):
            self.say(peer, Inspected(message.tree, message.task, ROOT))

    def start(self, peer: str, lease: Lease) -> Handled:
        return self.say(peer, Starting(lease.id, Version(0, 0)))

    def expand(
        self, peer: str, lease: Lease, offset: int, last: bool = False, reward: float | None = None
    ) -> Handled:
        return self.say(peer, Expanded(lease.id, offset, turn(lease, offset, last, reward=reward)))

    def finish(self, peer: str, lease: Lease, turns: int = 2, reward: float = 1.0) -> None:
        """Run a lease from where it stands to its end; its last turn pays."""
        self.start(peer, lease)
        for offset in range(lease.offset, turns):
            last = offset == turns - 1
            self.expand(peer, lease, offset, last, reward * last)
        self.say(peer, Finished(lease.id, turns, win(reward)))

    def work(self, peer: str, turns: int = 2) -> int:
        """Inspect and finish everything the peer is given until nothing more comes; how many leases."""
        done = 0
        while True:
            self.inspect(peer)
            leases = self.leases(peer)
            if not leases:
                return done
            for lease in leases:
                self.finish(peer, lease, turns)
            done += len(leases)

    def consume(self, trees: list[int], step: int, lineage: int = 0, peer: str = LEARNER) -> None:
        self.say(peer, Consumed(trees, Version(lineage, step)))

    def stat(self, name: str) -> float:
        return self.core.stats().get(name, 0.0)


def ready(
    settings: Settings | None = None,
    rule: Rule | RuleConfig | None = None,
    continuations: int | Budget = 2,
    *,
    slots: int = 4,
    prefetch: int = 0,
) -> tuple[Rig, str]:
    """A learner and one actor."""
    rig = Rig(settings, rule, continuations)
    rig.learner()
    return rig, rig.actor(slots=slots, prefetch=prefetch)


def granted(*given: Any, **named: Any) -> tuple[Rig, str, list[Lease]]:
    """`ready` with the leases of the first trees; without arguments, two of each tree of the first wave."""
    rig, actor = ready(*given, **named)
    rig.inspect(actor)
    return rig, actor, rig.leases(actor)


def hello(
    role: str, key: str, *, slots: int = 0, prefetch: int = 0, version: Version | None = None, **changes: Any
) -> Hello:
    name, _, incarnation = key.partition("/")
    can = Capabilities(slots=slots, prefetch=prefetch, process_scores=True)
    message = Hello(
        role, name, incarnation, PROTOCOL_VERSION, can, {}, version=version,
        weights_endpoint="tcp://weights" if role == "learner" else "",
    )  # fmt: skip
    return msgspec.structs.replace(message, **changes)


RANDOM = RandomRuleConfig(chains=2, expansions=2)
