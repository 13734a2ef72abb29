"""What a budget is: how many continuations each prompt gets, decided alone or over many prompts.

A budget is told of each prompt once its root is known (`admit`) and answers with whatever allowances it can
name now: that of this prompt, or, where it spreads one sum over the pool of a wave, `{}` until the pool is
whole and then all of them. The rule is not asked about a prompt before it has its allowance.

    admit ─▶ allowances (0 = not selected) ─▶ … rule is done ─▶ extra ─▶ closed ─▶ withdraw
                                                               between waves: wave_done

Whatever a budget learns across prompts it may use from `wave_done` on only: within a wave the order of
arrival would decide.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allocator.rules.base import TreeView
from common.nouns import Node
from common.predictor import Prediction


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose root is known."""

    tree: int
    wave: int
    slot: int
    """Its place in the run; the prompts of a pool have that of their wave's first until they are chosen
    from."""
    root: Node
    prediction: Prediction
    """Success predicted at the root, before anything was sampled."""


class Budget(abc.ABC):
    """Allowances of continuations. It may keep state of its own across prompts, but reads no clock."""

    name: str
    typical: int
    """Continuations a prompt usually gets: how many prompts to prepare for the room there is."""
    pooled: bool = False
    """Whether `admit` names the allowances of a whole wave at once, exactly one batch of them above 0; the
    others are dropped as `not_selected`. A prompt that comes to the wave later gets its own at once."""
    candidates: int = 1
    """Prompts set up for each place in a batch; more than one only where they are pooled."""

    @abc.abstractmethod
    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        """A prompt is ready. Returns the allowances that can be named now, by tree; 0 = not selected."""

    @abc.abstractmethod
    def withdraw(self, tree: int, slot: int) -> Mapping[int, int]:
        """A prompt is closed or dropped, perhaps before it was admitted. Returns allowances that can be named
        because of that."""

    @abc.abstractmethod
    def extra(self, view: TreeView) -> int | None:
        """More continuations for a tree whose rule is done and where nothing is outstanding; 0 = close it.

        None = that depends on trees of its wave in lower places that are not done yet: it is asked again when
        one of its wave got more, or is closed or dropped.
        """

    @abc.abstractmethod
    def weight(self, tree: int) -> float:
        """Weight of one more continuation, fixed at grant from the past only."""

    def closed(self, view: TreeView) -> None:
        """A tree is complete, as it stands; `withdraw` follows."""
        return None

    def wave_done(self, wave: int) -> None:
        """All trees of a wave are complete: what they taught may be used from now on."""
        return None

    def stats(self) -> dict[str, float]:
        """Flat numbers for metrics."""
        return {}

    def to_state(self) -> dict[str, Any]:
        """What it keeps across prompts, as plain values (msgpack-able)."""
        return {}

    def from_state(self, state: dict[str, Any]) -> None:
        """Become what `to_state` described."""
        return None
