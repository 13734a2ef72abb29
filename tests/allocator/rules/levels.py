"""For rules that go level by level: a toy world, a crowd that grows its trees, and a level made by hand.

In the toy world a turn depends on the seed of its lease and its offset alone. `level_search` grows the same
trees without the allocator.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from allocator.rules.base import BranchView, Draws
from common.config_allocator import IgrpoRuleConfig, PatrRuleConfig
from common.messages import Expanded, Failed, Finished, HorizonReached, Message, Revoke, TreeReady
from common.nouns import (
    NO_LEASE,
    ROOT,
    BranchScore,
    Lease,
    LeaseId,
    Node,
    Outcome,
    Tree,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    ids_to_bytes,
)
from common.prefix import Tally
from common.seeds import turn_seed
from tests.allocator.harness import LEARNER, Rig, small, win

LevelConfig = PatrRuleConfig | IgrpoRuleConfig
Place = tuple[int, int]
"""(owner, offset) of a turn."""


# ------------------------------------------------------------------------------------------- the world


@dataclass(frozen=True)
class Step:
    """One turn. Few scores and actions, so that ties and repetitions happen; rewards add up exactly."""

    action: str
    score: float
    reward: float
    last: bool


def step(seed: int, offset: int) -> Step:
    """Turn `offset` of the lease with this seed; one in four is the last."""
    drawn = turn_seed(seed, offset)
    last = (drawn >> 40) % 4 == 0
    reward = (drawn >> 24) % 3 / 8 if not last else float(drawn >> 30 & 1)
    return Step("ab"[drawn >> 16 & 1], (drawn >> 8) % 5 / 4, reward, last)


def breaks_at(seed: int) -> int | None:
    """The turn before which the lease is lost for good, in a world with faults; one in nine is."""
    return seed % 2 if (seed >> 9) % 9 == 0 else None


def turn_of(seed: int, offset: int) -> Turn:
    made, drawn = step(seed, offset), turn_seed(seed, offset)
    return Turn(
        action=ids_to_bytes([drawn % 1000]),
        logprobs=b"\0\0\0\0",
        versions=[VersionRun(Version(0, 0), 1)],
        observation=ids_to_bytes([7]),
        action_text=made.action,
        seed=drawn,
        status=TurnStatus.TERMINATED if made.last else TurnStatus.OPEN,
        reward=made.reward,
        snapshot=None if made.last else b"s",
        process_score=made.score,
    )


def next_message(lease: Lease, done: int, faults: bool = False) -> Message:
    """What an actor says after `done` turns of a lease, the start aside."""
    if faults and breaks_at(lease.seed) == done and (done == 0 or not step(lease.seed, done - 1).last):
        return Failed(lease.id, "broken", False)
    if done and step(lease.seed, done - 1).last:
        return Finished(lease.id, done, win(float("nan")))  # what it earned is known from its turns
    if lease.horizon and done == lease.horizon:
        return HorizonReached(lease.id, done)
    return Expanded(lease.id, done, turn_of(lease.seed, done))


# ---------------------------------------------------------------------------------------------- the crowd


def grow(
    config: LevelConfig,
    continuations: int,
    seed: int,
    order: int,
    *,
    staleness: int = 0,
    faults: bool = False,
) -> tuple[Tree | None, Rig]:
    """Tree 0 of a run, grown by three actors whose messages come in a random order."""
    bounds = small(batch_trees=1, steps=1, seed=seed, max_score_staleness=staleness)
    rig, rng = Rig(bounds, config, continuations), random.Random(order)
    rig.check_law = False
    rig.learner()
    held = {rig.actor(name, slots=2, prefetch=1): list[Lease]() for name in ("a/1", "b/1", "c/1")}
    done: dict[LeaseId, int] = {}
    for _ in range(20_000):
        for key, leases in held.items():
            rig.inspect(key)
            for revoke in rig.take(key, Revoke):  # a queued lease that went to an idle actor
                leases[:] = [lease for lease in leases if lease.id != revoke.lease]
                rig.say(key, Failed(revoke.lease, "revoked", False))
            leases += rig.leases(key)
        busy = [key for key, leases in held.items() if leases]
        if not busy or rig.core.state.delivery.opened > 1:
            break
        key = rng.choice(busy)
        lease = rng.choice(held[key])
        if lease.id not in done:
            rig.start(key, lease)
            done[lease.id] = 0
            continue
        message = next_message(lease, done[lease.id], faults)
        rig.say(key, message)
        done[lease.id] += 1
        if not isinstance(message, Expanded):
            held[key].remove(lease)
    assert rig.core.audit() == []
    grown = [message.tree for message in rig.take(LEARNER, TreeReady) if message.tree.id == 0]
    return (grown[0] if grown else None), rig


# ------------------------------------------------------------------------------------------------- a level


@dataclass
class Path:
    """A branch of a view made by hand."""

    number: int
    nodes: list[int]
    ended: str = "horizon"
    group: int = 0
    anchor: int = ROOT
    outcome: Outcome | None = None


class Level:
    """A tree in which every path has come to its horizon, as a rule sees it. Implements `TreeView`."""

    def __init__(
        self,
        paths: list[list[tuple[float | None, str]]],
        *,
        wave: int = 0,
        draws: Draws | None = None,
        ended: Mapping[int, str] | None = None,
        gold: Mapping[Place, float] | None = None,
    ) -> None:
        """`paths`: score and action of each turn; `ended` where not at the horizon; `gold` by (path, turn)."""
        self.id, self.wave, self.allowance, self.budget_left = 0, wave, len(paths), 0
        self.nodes = [Node(ROOT, -1, NO_LEASE, 0, 0, Turn(process_score=0.5))]
        self.branches: dict[int, BranchView] = {}
        self._draws = draws
        for number, turns in enumerate(paths):
            made = Path(number, [], (ended or {}).get(number, "horizon"))
            for offset, (score, action) in enumerate(turns):
                parent = made.nodes[-1] if made.nodes else ROOT
                found = (gold or {}).get((number, offset))
                scores = [] if found is None else [BranchScore(found, "gold_probability", 0)]
                turn = Turn(action_text=action, process_score=score)
                index = len(self.nodes)
                self.nodes.append(Node(index, parent, number, offset, offset + 1, turn, scores))
                made.nodes.append(index)
            self.branches[number] = made

    def node(self, index: int) -> Node:
        return self.nodes[index]

    def anchors(self) -> list[int]:
        return list(range(len(self.nodes)))

    def in_flight(self, index: int) -> int:
        return 0

    def tally(self, index: int) -> Tally:
        return Tally()

    def predict(self, index: int) -> object:
        raise AssertionError("a level rule predicts nothing")

    def draws(self) -> Draws:
        assert self._draws is not None, "this rule draws nothing"
        return self._draws
