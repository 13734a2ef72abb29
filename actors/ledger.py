"""The actor's journal: each lease it was granted, started and ended, each turn it reported.

    start  granted  starting  turn …  ended(kind, turns, discarded_tokens)  inspected  usage  end

Written before the message about it leaves, so that the audit can compare what this actor says it did with
what the allocator says it was told. `ended` stands exactly once for each `granted`, unless the process died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.lease_table import Attempt
from common.journal import JournalWriter
from common.messages import (
    Declined,
    Expanded,
    Failed,
    Finished,
    HorizonReached,
    Inspected,
    Message,
    Starting,
)
from common.nouns import LeaseId

FILE_NAME = "journal.tw"


class Ledger:
    """Appends records; `flush` makes them outlive the process."""

    def __init__(self, directory: Path) -> None:
        self._journal = JournalWriter(directory / FILE_NAME)

    def start(self, peer: str, incarnation: str) -> None:
        """This process begins."""
        self._journal.append("start", peer=peer, incarnation=incarnation)

    def granted(self, lease: LeaseId) -> None:
        """A lease was taken into the table, or will be declined at once."""
        self._journal.append("granted", **_key(lease))

    def sending(self, message: Message, attempt: Attempt | None = None) -> None:
        """What `message`, about to be sent for `attempt`, says has happened."""
        match message:
            case Starting(lease=lease):
                self._journal.append("starting", **_key(lease))
            case Expanded(lease=lease, offset=offset, turn=turn):
                self._journal.append("turn", **_key(lease), offset=offset, tokens=turn.num_action_tokens)
            case Finished(lease=lease, turns=turns):
                self.ended(lease, "finished", turns)
            case HorizonReached(lease=lease, turns=turns):
                self.ended(lease, "horizon", turns)
            case Failed(lease=lease, discarded_tokens=tokens):
                kind = "revoked" if attempt is not None and attempt.revoked else "failed"
                self.ended(lease, kind, attempt.turns if attempt is not None else 0, tokens)
            case Declined(lease=lease):
                self.ended(lease, "declined", attempt.turns if attempt is not None else 0)
            case Inspected(tree=tree):
                self._journal.append("inspected", tree=tree)
            case _:
                pass

    def ended(self, lease: LeaseId, kind: str, turns: int, discarded_tokens: int = 0) -> None:
        """A lease is over here."""
        self._journal.append(
            "ended", **_key(lease), kind=kind, turns=turns, discarded_tokens=discarded_tokens
        )

    def usage(self, **totals: Any) -> None:
        """Where time and bytes went; see `common.usage`."""
        self._journal.append("usage", **totals)

    def flush(self) -> None:
        """Hand everything to the system: it survives this process, not the machine."""
        self._journal.flush(sync=False)

    def close(self, *, in_order: bool) -> None:
        """Close the file. `in_order`: nothing is held any more, and the journal says so with `end`."""
        if in_order:
            self._journal.append("end")
        self._journal.close()


def _key(lease: LeaseId) -> dict[str, int]:
    return {"tree": lease.tree, "number": lease.number, "epoch": lease.epoch}
