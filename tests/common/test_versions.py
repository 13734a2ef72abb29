"""Versions that never change and stay while they are pinned."""

from __future__ import annotations

import msgpack
import pytest

from common.versions import Shelf


def test_only_the_newest_and_the_pinned_are_kept() -> None:
    shelf = Shelf("a")
    shelf.pin(0)
    assert [shelf.put("b"), shelf.put("c")] == [1, 2]
    assert shelf.kept() == [0, 2] and (shelf.get(), shelf.get(0)) == ("c", "a")
    shelf.unpin(0)
    assert shelf.kept() == [2]


def test_a_version_stays_until_it_is_unpinned_as_often_as_it_was_pinned() -> None:
    shelf = Shelf("a")
    shelf.pin(0)
    shelf.pin(0)
    shelf.put("b")
    shelf.unpin(0)
    assert shelf.get(0) == "a"
    shelf.unpin(0)
    for ask in (shelf.get, shelf.pin):
        with pytest.raises(KeyError):
            ask(0)


def test_the_newest_stays_when_its_last_pin_goes() -> None:
    shelf = Shelf("a")
    shelf.pin(0)
    shelf.unpin(0)
    assert shelf.get() == "a" and not shelf.pins


def test_a_shelf_comes_back_from_its_state_pins_included() -> None:
    shelf = Shelf("a")
    shelf.pin(0)
    for name in "bc":
        shelf.put(name)
    state = msgpack.unpackb(msgpack.packb(shelf.to_state(str.upper)))
    back = Shelf.from_state(state, str.lower)
    assert back.to_state(str.upper) == shelf.to_state(str.upper)
    back.unpin(0)
    assert back.kept() == [2] and back.put("d") == 3
