"""One lease, from its anchor to its end.

    Lease ─restore─▶ world ─┬▶ sample ─▶ step ─▶ Expanded ─┐  consumes  one Attempt
                            └──────── next turn ◀──────────┘  produces  Starting, Expanded …, then one of
                                                                        Finished, HorizonReached, Failed
    waits for: the engine (unblocked by a generation, an abort, or its death, which raises EngineError).

A continuation is paid by what it earned: its outcome's reward is the sum of the rewards of its own turns,
those before its anchor left out. A retry knows the rewards of the turns it samples itself and reports their
sum; each turn carries its own, and the allocator, which has them all, sets the reward to the sum of all.
An infrastructure failure is a `Failed` message and never an outcome.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.engines.base import Ids, StopReason
from actors.lease_table import Attempt
from actors.restore import restore_anchor
from actors.turns import Tools, features_of, play, sample, turn_of
from common.errors import EngineError, EnvironmentFault, TreewardError
from common.messages import Expanded, Failed, Finished, HorizonReached, Message, Starting
from common.nouns import Ending, Lease, Outcome, RewardSource, TurnStatus, ids
from common.seeds import turn_seed
from envs.base import Environment

MAX_REASON = 2000
"""Characters of a reason that are sent; the wire allows a little more."""

ENDINGS = {TurnStatus.TERMINATED: Ending.TERMINATED, TurnStatus.TRUNCATED: Ending.TRUNCATED}

Emit = Callable[[Message], None]


async def expand(attempt: Attempt, tools: Tools, emit: Emit) -> TreewardError | None:
    """Run one lease to its end and report each turn through `emit`, which returns at once.

    Exactly one of `Finished`, `HorizonReached` and `Failed` is emitted, last.

    Returns:
        What went wrong, after it was reported as `Failed`; None if nothing did.
    """
    lease = attempt.lease
    expansion = Expansion(attempt, tools, emit)
    try:
        with tools.worlds.borrow(lease.task, salt=str(lease.id)) as world:
            await expansion.run(world)
        return None
    except TreewardError as error:
        emit(Failed(lease.id, str(error)[:MAX_REASON], True, expansion.undelivered))
        return error
    finally:
        tools.engine.release(str(lease.id))


class Expansion:
    """The state of one lease while it runs."""

    def __init__(self, attempt: Attempt, tools: Tools, emit: Emit) -> None:
        self.attempt, self.tools, self.emit = attempt, tools, emit
        self.lease: Lease = attempt.lease
        self.session = str(attempt.lease.id)
        self.reward = 0.0
        self.undelivered = 0
        """Action tokens that were sampled and not reported as a turn."""

    async def run(self, world: Environment) -> None:
        """Restore the anchor, then take turns until something ends the lease."""
        context: Ids = ids(self.lease.prefix)
        if self._over_before_the_first_turn(world, context):
            return
        while not self._stopped():
            if 0 < self.lease.horizon <= self.attempt.turns:
                self.emit(HorizonReached(self.lease.id, self.attempt.turns))
                return
            following = await self._turn(world, context)
            if following is None:
                return
            context = following

    def _over_before_the_first_turn(self, world: Environment, context: Ids) -> bool:
        """True if an earlier attempt had already sampled the last turn; its end is then reported."""
        last = restore_anchor(world, self.lease)
        over = last is not None and last.is_over
        if not over and self.tools.has_room(context):
            return False
        if self.lease.offset == 0:
            raise EnvironmentFault(
                f"{self.lease.id} cannot start: its anchor is {'a leaf' if over else 'where no turn fits'}"
            )
        self.reward = last.reward if last is not None else 0.0
        terminated = last is not None and last.terminated
        self._finish(Ending.TERMINATED if terminated else Ending.TRUNCATED)
        return True

    async def _turn(self, world: Environment, context: Ids) -> Ids | None:
        """Sample, play and report one turn; the context after it, None if the lease is over."""
        lease, tools = self.lease, self.tools
        if self.attempt.turns == lease.offset:
            self._announce()
        seed = turn_seed(lease.seed, self.attempt.turns)
        generation = await sample(tools, self.session, context, seed)
        self.undelivered = len(generation.ids)
        if generation.stop_reason is StopReason.ABORTED:
            self._stopped(aborted=True)
            return None
        played = play(tools, world, generation, context, seed)
        features = await features_of(tools, played.context, self.session) if played.is_open else None
        if self._stopped():
            return None
        self.emit(Expanded(lease.id, self.attempt.turns, turn_of(played, world, features)))
        self.undelivered = 0
        self.attempt.turns += 1
        self.reward += played.step.reward
        if played.is_open:
            return played.context
        self._finish(ENDINGS[played.status])
        return None

    def _announce(self) -> None:
        version = self.tools.engine.version
        if version is None:
            raise EngineError(f"{self.lease.id} cannot start: the engine has no weights")
        self.emit(Starting(self.lease.id, version))

    def _finish(self, ending: Ending) -> None:
        outcome = Outcome(self.reward, self.reward, RewardSource.ENVIRONMENT, ending)
        self.emit(Finished(self.lease.id, self.attempt.turns, outcome))

    def _stopped(self, aborted: bool = False) -> bool:
        """True, and reported, if the attempt was told to stop (or its turn was aborted)."""
        attempt = self.attempt
        if not attempt.stop_reason and not aborted:
            return False
        reason = attempt.stop_reason or "the engine aborted the turn"
        retry = attempt.stop_retry or not attempt.stop_reason
        self.emit(Failed(self.lease.id, reason, retry, self.undelivered))
        return True
