"""FrozenLake as a text world: cross a frozen lake without falling into a hole.

Squares are named like those of a chess board, column letter and row number from the top left, so that a
small word-level model reads a square as one token:

    prompt        lake holes b1 d2 a4 goal d4 at a1
    action        down
    observation   at a2          over: `goal d4`, `fell b1`, `late a2`; not understood: `what at a1`

Dynamics are those of gymnasium's FrozenLake-v1; this file adds text, tasks, turns and snapshots, and takes
chance from the seed of each step. Reward is 1 on the goal and 0 elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, cast

import gymnasium
import msgspec
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.utils import seeding

from common.errors import ConfigError, EnvironmentFault
from common.nouns import TaskId
from common.seeds import derive_seed
from envs.base import Environment, Step, decode_snapshot
from envs.lake_map import Lake, split_of

ACTIONS = ("left", "down", "right", "up")
"""Action words; the position is gymnasium's action number."""
SPLITS = ("train", "eval")
MIN_SIZE, MAX_SIZE = 3, 10
"""A 2x2 lake has three maps, too few to hold any out; above 10 the squares are too many words to learn."""
MAX_DRAWS = 10_000
"""Maps drawn for one task before giving up: a split that fails one draw in five needs a handful."""


class _Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="lake-1"):
    """One running episode; everything the future depends on."""

    task: TaskId
    rows: list[str]
    is_slippery: bool
    max_turns: int
    square: int
    turn: int
    over: bool


class FrozenLake(Environment):
    """See the module docstring.

    An action is one of four words, in any case and with spaces around it. Any other text wastes the turn:
    the square stays, the turn counts, and the observation starts with `what`.

    Args:
        size: side of the square lake.
        hole_probability: chance of each square to be a hole; maps without a way to the goal are drawn again.
        is_slippery: each move goes where it should with probability 1/3, else to one of the two sides.
        max_turns: turns after which the episode is truncated.
    """

    name: ClassVar[str] = "frozenlake"

    def __init__(
        self,
        size: int = 4,
        hole_probability: float = 0.3,
        is_slippery: bool = False,
        max_turns: int = 12,
    ) -> None:
        if not MIN_SIZE <= size <= MAX_SIZE:
            raise ConfigError(f"env.size={size} must be in {MIN_SIZE}..{MAX_SIZE}")
        if not 0.0 <= hole_probability <= 0.6:
            raise ConfigError(
                f"env.hole_probability={hole_probability} must be in 0..0.6; with more holes hardly any map "
                "has a way to the goal"
            )
        if max_turns < 1:
            raise ConfigError(f"env.max_turns={max_turns} must be at least 1")
        self.size, self.hole_probability, self.is_slippery = size, hole_probability, is_slippery
        self.max_turns = max_turns
        self.action_format = f"Answer with one word: {', '.join(ACTIONS)}."
        squares = Lake.open(size).squares
        self.words = ("lake", "holes", "goal", "at", "fell", "late", "what", *ACTIONS, *squares)
        self._task: TaskId | None = None
        self._lake = Lake.open(size)
        self._world: Any = None
        self._turn, self._over = 0, True

    def reset(self, task: TaskId) -> str:
        """Start `task` on its map; see `Environment.reset`."""
        self._load(self.map_of(task))
        self._world.reset()
        self._task, self._turn, self._over = task, 0, False
        lake = self._lake
        holes = ("holes", *(lake.squares[hole] for hole in sorted(lake.holes)))
        return " ".join(("lake", *holes, "goal", lake.squares[lake.goal], "at", self._here))

    def step(self, action: str, seed: int) -> Step:
        """Move, or waste the turn on a text that is no action; see `Environment.step`."""
        if self._over:
            raise EnvironmentFault(
                f"{self.name}: step without a running episode; call reset or restore first"
            )
        word = action.strip().lower()
        reward, terminated = 0.0, False
        if word in ACTIONS:
            self._world.np_random = seeding.np_random(seed)[0]
            _, gain, terminated, _, _ = self._world.step(ACTIONS.index(word))
            reward, terminated = float(gain), bool(terminated)
        self._turn += 1
        truncated = not terminated and self._turn >= self.max_turns
        self._over = terminated or truncated
        return Step(self._describe(word in ACTIONS, truncated), reward, terminated, truncated)

    def snapshot(self) -> bytes:
        """About 100 bytes: task, map, square, turn; see `Environment.snapshot`."""
        if self._task is None:
            raise EnvironmentFault(f"{self.name}: nothing to snapshot before the first reset")
        rows = list(self._lake.rows)
        state = (self.is_slippery, self.max_turns, self._square, self._turn, self._over)
        return msgspec.msgpack.encode(_Snapshot(self._task, rows, *state))

    def restore(self, snapshot: bytes) -> None:
        """Continue from `snapshot`, whose map may be of another size; see `Environment.restore`."""
        state = decode_snapshot(snapshot, _Snapshot, self.name)
        theirs, ours = (state.is_slippery, state.max_turns), (self.is_slippery, self.max_turns)
        if theirs != ours:
            raise EnvironmentFault(
                f"{self.name}: the snapshot has (is_slippery, max_turns) = {theirs}, this environment "
                f"{ours}; restore with the configuration it was taken under"
            )
        lake = Lake(tuple(state.rows))
        if not lake.is_sound() or not 0 <= state.square < len(lake.squares):
            raise EnvironmentFault(f"{self.name}: the snapshot's map {state.rows} is not a lake")
        self._load(lake)
        self._world.reset()
        self._world.s = state.square
        self._task, self._turn, self._over = state.task, state.turn, state.over

    def state_hash(self) -> str:
        """SHA-256 of the snapshot, which holds no random state; see `Environment.state_hash`."""
        return hashlib.sha256(self.snapshot()).hexdigest()

    def close(self) -> None:
        """Close the gymnasium world."""
        if self._world is not None:
            self._world.close()
        self._world, self._task, self._over = None, None, True

    def process_score(self) -> float | None:
        """Share of the longest way to the goal that is already behind: goal 1.0, hole 0.0."""
        if self._task is None:
            return None
        distance = self._lake.distances.get(self._square)
        if distance is None:
            return 0.0
        return 1.0 - distance / (1 + max(self._lake.distances.values()))

    def expert_action(self, seed: int | None = None) -> str | None:
        """The first step of a shortest way around the holes; see `Environment.expert_action`."""
        if self._over:
            return None
        best = self._lake.best_actions(self._square)
        if not best:
            return None
        return ACTIONS[best[0 if seed is None else derive_seed("expert", seed) % len(best)]]

    def map_of(self, task: TaskId) -> Lake:
        """The map of a task: the first one drawn from (split, index) whose layout belongs to the split.

        Layouts are dealt to splits by a hash of the layout itself, so that no map can be in two splits,
        whatever the seeds. Two tasks of one split may share a map.

        Raises:
            ConfigError: the task is of another environment or of an unknown split.
        """
        if task.env != self.name or task.split not in SPLITS:
            raise ConfigError(f"{task} is no task of {self.name}; its splits are {', '.join(SPLITS)}")
        frozen = 1.0 - self.hole_probability
        for draw in range(MAX_DRAWS):
            seed = derive_seed("lake", task.split, task.index, draw)
            lake = Lake(tuple(generate_random_map(self.size, frozen, seed)))
            if split_of(lake) == task.split:
                return lake
        raise ConfigError(
            f"no {task.split} map among {MAX_DRAWS} draws with env.size={self.size}, "
            f"env.hole_probability={self.hole_probability}; there are too few different maps to split"
        )

    def _load(self, lake: Lake) -> None:
        """Build gymnasium's world for `lake`, unless it is loaded already."""
        if self._world is not None and lake == self._lake:
            return
        # Unwrapped, so that no wrapper counts turns or resets: turns are counted here.
        made = gymnasium.make(
            "FrozenLake-v1",
            desc=list(lake.rows),
            is_slippery=self.is_slippery,
            max_episode_steps=-1,
            disable_env_checker=True,
        )
        self._world, self._lake = cast(Any, made.unwrapped), lake

    @property
    def _square(self) -> int:
        """Number of the square the agent is on, row by row from the top left."""
        return int(self._world.s)

    @property
    def _here(self) -> str:
        return self._lake.squares[self._square]

    def _describe(self, understood: bool, truncated: bool) -> str:
        """The observation after a step."""
        if self._square == self._lake.goal:
            return f"goal {self._here}"
        if self._square in self._lake.holes:
            return f"fell {self._here}"
        head = "" if understood else "what "
        return head + (f"late {self._here}" if truncated else f"at {self._here}")
