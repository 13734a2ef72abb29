"""Someone who looks on while the forest decides, as `allocator.explain` does in a replay.

root known ─▶ admitted ─▶ allowed ─▶ deciding ─▶ the decision is carried out ─▶ deciding …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from allocator.budgets.base import Prompt
from allocator.rules.base import Decision
from allocator.tree import GrowingTree


class Watch(Protocol):
    """What it is told of. It looks, and changes nothing."""

    def admitted(self, prompt: Prompt) -> None:
        """A prompt is ready: the budget is asked about it next."""

    def allowed(self, allowances: Mapping[int, int]) -> None:
        """The budget named these allowances together, by tree; 0 = not selected."""

    def deciding(self, tree: GrowingTree, decision: Decision) -> None:
        """The rule has spoken; everything still stands as it was when it was asked."""
