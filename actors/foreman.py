"""The work of an actor without its sockets: grants in, running leases, messages out.

    Grant ─▶ table ─▶ one task per running lease ─▶ send(turns, ends)
    Revoke ─▶ table ─▶ the attempt stops within one turn
    Inspect ─▶ one task ─▶ send(Inspected | InspectFailed)

Until `equip` is called (the first weights bring model and tokenizer) grants and inspections wait. A slot is
free again when its lease has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from actors.expand import MAX_REASON, expand
from actors.lease_table import Attempt, Granted, LeaseTable
from actors.ledger import Ledger
from actors.turns import Tools, inspect_root
from common.errors import EngineError, TreewardError
from common.logs import Repeats, fields
from common.messages import (
    Declined,
    Expanded,
    Failed,
    Grant,
    Inspect,
    InspectFailed,
    Message,
    Revoke,
)
from common.nouns import Version
from common.usage import Spending

LOG = logging.getLogger("treeward.actor")

GIVE_BACK_SHARE = 0.8
"""Share of its deadline that a lease may wait for weights: it is given back before it is fenced."""
STALL_DEADLINES = 2.0
"""Lease deadlines without any turn after which the engine counts as hung: its leases are long fenced."""

Spawn = Callable[[Coroutine[Any, Any, None], str], None]
"""Starts a task whose failure ends the process."""


class Foreman:
    """See the module docstring; everything runs in one event loop."""

    def __init__(
        self, table: LeaseTable, ledger: Ledger, send: Callable[[Message], None], spawn: Spawn
    ) -> None:
        self.table, self._ledger, self._send, self._spawn = table, ledger, send, spawn
        self.tools: Tools | None = None
        self.progress = 0
        """Grows with every turn and every end of a lease."""
        self.counts: Counter[str] = Counter()
        """Totals by name, for the tracker."""
        self.spending = Spending()
        """Seconds by what this process did: `work`, or wait for `leases` or `weights`."""
        self._inspecting: dict[int, Inspect] = {}
        self._leaving = ""
        self._still_s = 0.0
        self._seen_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._repeats = Repeats()

    @property
    def version(self) -> Version | None:
        """The weights held."""
        return self.tools.engine.version if self.tools is not None else None

    def equip(self, tools: Tools) -> None:
        """Model and tokenizer are there: begin with what waits."""
        self.tools = tools
        for inspect in self._inspecting.values():
            self._spawn(self._inspect(inspect, tools), f"inspect-{inspect.tree}")
        self.schedule()

    # --- messages ----------------------------------------------------------------------------------------

    def on_grant(self, grant: Grant) -> None:
        """Take the leases, ignoring those that are known."""
        now = asyncio.get_running_loop().time()
        for lease in grant.leases:
            answer = self.table.grant(lease, now)
            if answer in (Granted.KNOWN, Granted.OUTDATED):
                self.counts["grants_ignored"] += 1
                continue
            self._ledger.granted(lease.id)
            if self._leaving:
                self.table.revoke(lease.id, self._leaving)
            if self._leaving or answer is Granted.NO_ROOM:
                held = len(self.table)
                self._decline(Attempt(lease, now), self._leaving or f"no room beside {held} leases")
        self.schedule()

    def on_revoke(self, revoke: Revoke) -> None:
        """Stop the lease; one that never came is answered too, since its slot counts as taken."""
        new = self.table.is_new(revoke.lease)
        attempt = self.table.revoke(revoke.lease, revoke.reason)
        if attempt is not None and attempt.started and self.tools is not None:
            self.tools.engine.abort(str(revoke.lease))
        elif attempt is not None:
            self._report_unstarted(attempt)
        elif new:
            self._send(Failed(revoke.lease, revoke.reason, False))
        self.schedule()

    def on_inspect(self, inspect: Inspect) -> None:
        """Describe the root of a tree; a repeat of one that is at work adds nothing."""
        if inspect.tree in self._inspecting:
            return
        if self._leaving:
            self._send(InspectFailed(inspect.tree, self._leaving))
            return
        self._inspecting[inspect.tree] = inspect
        if self.tools is not None:
            self._spawn(self._inspect(inspect, self.tools), f"inspect-{inspect.tree}")

    # --- work --------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start what may start."""
        tools = self.tools
        for attempt in self.table.fenced():
            self._report_unstarted(attempt)
        if tools is not None:
            for attempt in self.table.start(self.version):
                self._idle.clear()
                self._spawn(self._run(attempt, tools), str(attempt.lease.id))
        self._account()

    def _account(self) -> None:
        """What time is spent on from now on."""
        if self.table.running:
            doing = "work"
        else:
            doing = "weights" if self.tools is None or self.table.queued else "leases"
        self.spending.turn_to(doing, asyncio.get_running_loop().time())

    async def _run(self, attempt: Attempt, tools: Tools) -> None:
        try:
            error = await expand(attempt, tools, lambda message: self._emit(message, attempt))
        finally:
            self.table.end(attempt.lease.id)
            if not self.table.running:
                self._idle.set()
        await self._mind(error, tools)
        self.schedule()

    async def _inspect(self, inspect: Inspect, tools: Tools) -> None:
        error: TreewardError | None = None
        try:
            message: Message = await inspect_root(inspect.tree, inspect.task, tools)
            self.counts["inspected"] += 1
        except TreewardError as failure:
            error, message = failure, InspectFailed(inspect.tree, str(failure)[:MAX_REASON])
        finally:
            del self._inspecting[inspect.tree]
        self._emit(message, None)
        await self._mind(error, tools)

    async def _mind(self, error: TreewardError | None, tools: Tools) -> None:
        """Say what went wrong; find out whether the engine is dead, which raises `EngineError`."""
        if error is None:
            return
        held_back = self._repeats.allow(type(error).__name__, asyncio.get_running_loop().time())
        if held_back is not None:
            LOG.warning("%s", error, extra=fields("lease_failed", held_back=held_back))
        if isinstance(error, EngineError):
            token = np.array([tools.tokenizer.end_id], dtype=np.int32)
            await tools.engine.score(token, token)

    def _emit(self, message: Message, attempt: Attempt | None) -> None:
        # Encoded first: a message that nobody would take raises and is not written down as sent.
        self._send(message)
        self._ledger.sending(message, attempt)
        name = type(message).__name__.lower()
        self.counts["revoked" if attempt is not None and attempt.revoked and name == "failed" else name] += 1
        if isinstance(message, Expanded):
            self.counts["tokens"] += message.turn.num_action_tokens
        elif isinstance(message, Failed):
            self.counts["tokens_discarded"] += message.discarded_tokens
        self.progress += 1

    def _decline(self, attempt: Attempt, reason: str) -> None:
        self._emit(Declined(attempt.lease.id, reason[:MAX_REASON]), attempt)

    def _report_unstarted(self, attempt: Attempt) -> None:
        self._emit(Failed(attempt.lease.id, attempt.stop_reason, False), attempt)

    # --- time --------------------------------------------------------------------------------------------

    def tick(self, interval_s: float) -> None:
        """Called every `interval_s`: give back what waits too long, notice an engine that stands still.

        Raises:
            EngineError: leases run and none has got on for `STALL_DEADLINES` deadlines.
        """
        now = asyncio.get_running_loop().time()
        self._account()
        for attempt in self.table.waiting_for_weights(self.version, now, GIVE_BACK_SHARE):
            reason = f"weights {attempt.lease.min_version} have not arrived, this actor holds {self.version}"
            self._decline(attempt, reason)
        # Counted in ticks: a process that was stopped and goes on has not stood still by itself.
        moved = self.progress != self._seen_progress or not self.table.running
        self._still_s = 0.0 if moved else self._still_s + interval_s
        self._seen_progress = self.progress
        limit = STALL_DEADLINES * max((a.lease.deadline_s for a in self.table.attempts), default=0.0)
        if self._still_s > limit:
            raise EngineError(
                f"{self.table.running} leases run and none took a turn for {self._still_s:.0f} s: the engine "
                "hangs, this actor must be restarted"
            )

    def stop(self, reason: str, *, retry: bool) -> None:
        """Begin to leave: decline what waits, stop what runs, take nothing new."""
        self._leaving = reason
        for attempt in self.table.drain(reason, retry):
            self._decline(attempt, reason)
        if self.tools is not None:
            for attempt in self.table.attempts:
                self.tools.engine.abort(str(attempt.lease.id))

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no lease runs; False if that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            return False
