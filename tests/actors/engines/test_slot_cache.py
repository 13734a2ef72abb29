import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.packed_attention import KeyValueStore
from actors.engines.slot_cache import SlotCache

CONTEXT = 24


class RecordingStore(KeyValueStore):
    """Remembers copies as (source, target, start, stop)."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, CONTEXT)
        self.copies: list[tuple[int, int, int, int]] = []

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.copies.append((source, target, start, stop))


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_session_gets_its_own_slot_back() -> None:
    cache = SlotCache(3, CONTEXT)
    slot = cache.acquire("a")
    assert slot is not None
    assert cache.acquire("a") is None  # busy
    cache.settle(slot)
    assert cache.acquire("b") != slot
    assert cache.acquire("a") == slot


def test_the_session_idle_for_longest_gives_up_its_slot_first() -> None:
    cache = SlotCache(2, CONTEXT)
    for session in ("a", "b", "a"):
        slot = cache.acquire(session)
        assert slot is not None
        cache.settle(slot)
    kept = cache.acquire("a")
    taken = cache.acquire("c")
    assert (kept, taken) == (0, 1)
    assert cache.acquire("b") is None  # evicted, and every slot is busy
    assert cache.sessions == 2


def test_a_released_slot_is_free_at_once_or_when_its_row_ends() -> None:
    cache = SlotCache(1, CONTEXT)
    assert cache.acquire("a") == 0
    cache.release("a")
    assert cache.acquire("b") is None
    cache.settle(0)
    assert cache.acquire("b") == 0
    cache.settle(0)
    cache.release("b")
    cache.release("unknown")
    assert cache.acquire(None) == 0
    assert cache.sessions == 0


def test_without_a_store_nothing_is_reused() -> None:
    cache = SlotCache(1, CONTEXT)
    cache.seat(0, ids(1, 2, 3, 4), 3, RecordingStore(1))
    cache.cached[0] = 4
    assert cache.seat(0, ids(1, 2, 3, 4), 3, None) == 0


def test_forgetting_keeps_tokens_and_drops_what_was_computed() -> None:
    cache = SlotCache(2, CONTEXT)
    cache.seat(0, ids(*range(20)), 19, RecordingStore(2))
    cache.cached[0] = 20
    cache.forget_all()
    assert cache.tokens[0, :20].tolist() == list(range(20))
    assert cache.seat(0, ids(*range(20)), 19, RecordingStore(2)) == 0


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT)


@given(st.lists(st.tuples(st.integers(0, 3), sequences), min_size=1, max_size=12))
def test_what_is_reused_was_computed_for_exactly_these_tokens(seats: list[tuple[int, list[int]]]) -> None:
    """Follows the origin of each stored position: it must be a computation over the same prefix."""
    cache, store = SlotCache(4, CONTEXT), RecordingStore(4)
    computed: list[list[tuple[int, ...]]] = [[() for _ in range(CONTEXT)] for _ in range(4)]
    for slot, tokens in seats:
        reusable = len(tokens) - 1
        store.copies.clear()
        kept = cache.seat(slot, ids(*tokens), reusable, store)
        assert kept <= reusable
        for source, target, start, stop in store.copies:
            computed[target][start:stop] = computed[source][start:stop]
        for position in range(kept):
            assert computed[slot][position] == tuple(tokens[: position + 1])
        for position in range(kept, len(tokens)):
            computed[slot][position] = tuple(tokens[: position + 1])
        cache.cached[slot] = len(tokens)
