"""Which slot of the key-value store holds which tokens, and for whom.

A slot is *free* (nobody's), *idle* (kept for a session between turns) or *busy* (in the running batch).
Whatever its state, the tokens whose keys and values it holds are known, so that any new context can
start from the longest prefix it shares with any slot: siblings of a tree from their anchor, prompts
from their common beginning. Prefixes are compared by ids, never by name or length.

    acquire ─▶ busy ─ settle ─▶ idle (session) or free (none) ─ least recently used ─▶ acquired anew
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from actors.engines.base import Ids
from actors.engines.packed_attention import KeyValueStore

SEARCH_WORTH = 8
"""Tokens a row must still compute before all slots are searched for a better prefix: the search costs
about as much as computing one token, and a usual turn has fewer."""


class SlotCache:
    """Owners, tokens and lengths of the slots. Pure bookkeeping apart from copying keys and values."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.tokens: Ids = np.zeros((num_slots, max_context), dtype=np.int32)
        """[S, C] known tokens of each slot, computed or not."""
        self.cached: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """[S] leading tokens whose keys and values are in the store."""
        self._free = list(range(num_slots))  # a heap: low slots first keeps the used range dense
        self._idle: OrderedDict[int, str] = OrderedDict()  # least recently used first
        self._slot_of: dict[str, int] = {}
        self._owner: dict[int, str] = {}

    @property
    def sessions(self) -> int:
        """Sessions that hold a slot."""
        return len(self._slot_of)

    def acquire(self, session: str | None) -> int | None:
        """A slot for one row: the session's own, a free one, or that of the session idle for longest.

        Returns:
            None while the session's slot, or every slot, is busy.
        """
        slot = self._slot_of.get(session) if session is not None else None
        if slot is not None:
            return slot if self._idle.pop(slot, None) is not None else None
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._idle:
            slot, evicted = self._idle.popitem(last=False)
            self._disown(slot, evicted)
        else:
            return None
        if session is not None:
            self._slot_of[session], self._owner[slot] = slot, session
        return slot

    def settle(self, slot: int) -> None:
        """The row of a busy slot is done: keep the slot for its session, or free it."""
        session = self._owner.get(slot)
        if session is None:
            heapq.heappush(self._free, slot)
        else:
            self._idle[slot] = session

    def release(self, session: str) -> None:
        """Take a session's slot away. A busy slot is freed when it settles."""
        slot = self._slot_of.get(session)
        if slot is not None:
            self._disown(slot, session)
            if self._idle.pop(slot, None) is not None:
                heapq.heappush(self._free, slot)

    def _disown(self, slot: int, session: str) -> None:
        del self._slot_of[session], self._owner[slot]

    def forget_all(self) -> None:
        """New weights: no key or value is worth anything. The tokens stay, to be computed again."""
        self.cached[:] = 0

    def seat(self, slot: int, tokens: Ids, reusable: int, store: KeyValueStore | None) -> int:
        """Put a row's tokens in its slot; keep or copy what is computed already.

        Args:
            tokens: [n]
            reusable: most leading tokens to take from the cache, below n: at least one token must be
                computed to have logits.
            store: copies prefixes of other slots here; None: reuse nothing at all.

        Returns:
            How many leading tokens need no computing.
        """
        kept = 0
        if store is not None:
            kept = min(_shared(self.tokens[slot, : self.cached[slot]], tokens), reusable)
            if reusable - kept >= SEARCH_WORTH:
                donor, shared = self._longest_prefix(tokens[:reusable])
                if shared > kept:
                    store.copy(donor, slot, kept, shared)
                    kept = shared
        self.tokens[slot, : len(tokens)] = tokens
        self.cached[slot] = kept
        return kept

    def _longest_prefix(self, tokens: Ids) -> tuple[int, int]:
        """The slot sharing most computed leading tokens with these, and how many."""
        differs = self.tokens[:, : len(tokens)] != tokens
        shared = np.where(differs.any(1), differs.argmax(1), len(tokens))
        shared = np.minimum(shared, self.cached)
        donor = int(shared.argmax())
        return donor, int(shared[donor])


def _shared(cached: Ids, tokens: Ids) -> int:
    """Leading ids two sequences have in common."""
    length = min(len(cached), len(tokens))
    differs = cached[:length] != tokens[:length]
    return int(differs.argmax()) if differs.any() else length
