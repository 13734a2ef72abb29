"""What a budget is: how many continuations each prompt gets, decided alone or over many prompts.

A budget is told of each prompt once its root is known (`admit`) and answers with whatever allowances it can
name now, of this prompt or of others that were waiting with it: a budget that spreads one sum over a pool of
prompts answers `{}` until the pool is full. The rule is not asked about a prompt before it has its allowance.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

from allocator.rules.base import TreeView
from common.nouns import Node


class Budget(abc.ABC):
    """Allowances of continuations. It may keep state of its own across prompts, but reads no clock."""

    name: str
    typical: int
    """Continuations a prompt usually gets: how many prompts to prepare for the room there is."""

    @abc.abstractmethod
    def admit(self, tree: int, wave: int, root: Node) -> Mapping[int, int]:
        """A prompt is ready. Returns the allowances that can be named now, by tree."""

    @abc.abstractmethod
    def withdraw(self, tree: int) -> Mapping[int, int]:
        """A prompt is closed or dropped. Returns allowances that can be named because of that."""

    @abc.abstractmethod
    def extra(self, view: TreeView) -> int:
        """More continuations for a tree whose rule is done and where nothing is outstanding; 0 = close it."""

    @abc.abstractmethod
    def weight(self, tree: int) -> float:
        """Weight of one more continuation, fixed at grant from the past only."""
