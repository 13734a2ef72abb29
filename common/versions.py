"""Numbered values that never change once they are put down: what a lease pins stays what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shelf(Generic[T]):
    """The newest version, and older ones for as long as somebody pins them."""

    def __init__(self, first: T) -> None:
        self.version = 0
        self.pins: Counter[int] = Counter()
        self._kept = {0: first}

    def get(self, version: int | None = None) -> T:
        """The value under `version` (None = newest). Raises KeyError for one no longer kept."""
        return self._kept[self.version if version is None else version]

    def put(self, value: T) -> int:
        """A new version; the one before goes unless it is pinned."""
        if not self.pins[self.version]:
            del self.pins[self.version]
            del self._kept[self.version]
        self.version += 1
        self._kept[self.version] = value
        return self.version

    def pin(self, version: int) -> None:
        """Keep `version` until as many `unpin` calls. Raises KeyError for one no longer kept."""
        if version not in self._kept:
            raise KeyError(f"predictor version {version} is no longer kept (newest is {self.version})")
        self.pins[version] += 1

    def unpin(self, version: int) -> None:
        """Undo one `pin`."""
        self.pins[version] -= 1
        if self.pins[version] <= 0:
            del self.pins[version]
            if version != self.version:
                self._kept.pop(version, None)

    def kept(self) -> list[int]:
        """Versions that can still be had."""
        return sorted(self._kept)

    def to_state(self, plain: Callable[[T], Any]) -> dict[str, Any]:
        """All of it, each value by `plain`."""
        return {
            "version": self.version,
            "pins": [[version, count] for version, count in sorted(self.pins.items())],
            "kept": [[version, plain(value)] for version, value in sorted(self._kept.items())],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], value: Callable[[Any], T]) -> Shelf[T]:
        """What `to_state` described. Raises KeyError for a state of another kind."""
        kept = {version: value(plain) for version, plain in state["kept"]}
        shelf = cls(kept[state["version"]])
        shelf.version, shelf._kept = state["version"], kept
        shelf.pins = Counter({version: count for version, count in state["pins"]})
        return shelf
