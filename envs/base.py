"""The environment protocol: what a world must offer so that its rollouts can branch.

    task --reset--> prompt text --(action text, seed)--step--> Step ... terminated | truncated
                        |                                       ^
                        +------ snapshot ... restore -----------+

Every step takes its seed as an argument, and draws nothing from anywhere else. A fork, a replay and a
resumed run are therefore exact, and two forks of one state share no randomness. A world that can be copied
writes its state into `snapshot`; one that cannot derives from `ReplayEnvironment`, which keeps the action
history and plays it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import msgspec

from common.errors import EnvironmentFault
from common.nouns import TaskId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """What one action brought.

    Example: `Step(observation="at b1", reward=0.0, terminated=False, truncated=False)`.
    """

    observation: str
    """Text the environment adds after the action; the last one of an episode is kept too."""
    reward: float
    """Reward of this step alone."""
    terminated: bool
    """The world ended the episode: its return is final and nothing is bootstrapped."""
    truncated: bool
    """The turn limit ended the episode: the world would have gone on."""

    @property
    def is_over(self) -> bool:
        """True if no further step may follow."""
        return self.terminated or self.truncated


class Environment(ABC):
    """One world, holding one episode at a time. See the module docstring for the flow.

    Law: after `restore(snapshot)`, `state_hash()` equals that of the environment the snapshot was taken
    from, and the same (action, seed) sequence gives the same steps in both.
    """

    name: ClassVar[str]
    """The key of this class in the registry, and `TaskId.env` of its tasks."""
    action_format: str
    """One sentence that tells a reader, or a model, how to write an action."""
    words: tuple[str, ...]
    """Every word that prompts, observations and valid actions can contain; a word-level vocabulary."""
    max_turns: int
    """Turns after which an episode is truncated."""

    @abstractmethod
    def reset(self, task: TaskId) -> str:
        """Start `task` and return its prompt; the same task always gives the same prompt and world."""

    @abstractmethod
    def step(self, action: str, seed: int) -> Step:
        """Play one action text (without end token); all chance in this step comes from `seed`.

        Raises:
            EnvironmentFault: there is no running episode.
        """

    @abstractmethod
    def snapshot(self) -> bytes:
        """The running episode as bytes that any process with the same options can `restore`."""

    @abstractmethod
    def restore(self, snapshot: bytes) -> None:
        """Continue from `snapshot`.

        Raises:
            EnvironmentFault: the bytes do not fit this environment, or lead to another state.
        """

    @abstractmethod
    def state_hash(self) -> str:
        """Hex digest of everything the future depends on, seeds aside; equal in every process."""

    def close(self) -> None:
        """Free what the world holds (processes, windows); nothing by default."""
        return None

    def gold_answer(self) -> str | None:
        """The known right answer of the running task; None where there is no single one."""
        return None

    def process_score(self) -> float | None:
        """How promising the current state is, in [0, 1]; None where the world cannot tell."""
        return None

    def expert_action(self, seed: int | None = None) -> str | None:
        """What a scripted expert would do now; None where there is no expert or no way left.

        Args:
            seed: decides between equally good actions; without it the first in a fixed order is taken.
        """
        return None


class _Replay(msgspec.Struct, frozen=True, array_like=True, tag="replay-1"):
    """What a `ReplayEnvironment` writes as its snapshot."""

    env: str
    """Registry name of the environment that wrote it."""
    task: TaskId
    history: list[tuple[str, int]]
    """(action, seed) of every step since the reset."""
    state_hash: str
    """Digest that the replayed world must show."""


class ReplayEnvironment(Environment):
    """Base for worlds that cannot be copied: a snapshot is the way that led there.

    Subclasses write `_reset`, `_step` and `state_hash`. A replayed prefix uses the seed each step first had,
    so chance inside the prefix comes out as it did; the state hash proves that it did. The world must take
    all its chance from those seeds: one that does not is found out at the first `restore`.
    """

    _task: TaskId | None = None
    _history: tuple[tuple[str, int], ...] = ()

    @abstractmethod
    def _reset(self, task: TaskId) -> str:
        """Start the task in the world itself."""

    @abstractmethod
    def _step(self, action: str, seed: int) -> Step:
        """Play the action in the world itself."""

    def reset(self, task: TaskId) -> str:
        """Start `task` with an empty history; see `Environment.reset`."""
        prompt = self._reset(task)
        self._task, self._history = task, ()
        return prompt

    def step(self, action: str, seed: int) -> Step:
        """Play one action and remember it; see `Environment.step`."""
        if self._task is None:
            raise EnvironmentFault(f"{self.name}: step before reset; call reset or restore first")
        step = self._step(action, seed)
        self._history += ((action, seed),)
        return step

    def snapshot(self) -> bytes:
        """Task, history and state hash; see `Environment.snapshot`."""
        if self._task is None:
            raise EnvironmentFault(f"{self.name}: nothing to snapshot before the first reset")
        return msgspec.msgpack.encode(_Replay(self.name, self._task, list(self._history), self.state_hash()))

    def restore(self, snapshot: bytes) -> None:
        """Play the history again and compare the state hash; see `Environment.restore`."""
        replay = decode_snapshot(snapshot, _Replay, self.name)
        if replay.env != self.name:
            raise EnvironmentFault(f"{self.name}: this snapshot was written by {replay.env!r}")
        self.reset(replay.task)
        for action, seed in replay.history:
            self.step(action, seed)
        if (found := self.state_hash()) != replay.state_hash:
            raise EnvironmentFault(
                f"{self.name}: replaying {len(replay.history)} steps of {replay.task} led to state "
                f"{found[:12]}, but the snapshot was taken in {replay.state_hash[:12]}; the world draws "
                "chance from something other than the step seeds, or its version differs"
            )


def decode_snapshot(snapshot: bytes, kind: type[T], name: str) -> T:
    """Decode snapshot bytes into `kind`, or raise EnvironmentFault naming the environment `name`."""
    try:
        return msgspec.msgpack.decode(snapshot, type=kind)
    except msgspec.MsgspecError as error:
        raise EnvironmentFault(f"{name}: this is not one of its snapshots ({error})") from error
