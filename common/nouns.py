"""The nouns of the project: tasks, versions, turns, nodes, trees, leases, outcomes.

All are frozen `msgspec.Struct`s, so that one definition serves memory, wire and disk: the `msgpack`
package encodes them, `msgspec` validates them on decode (closed fields, types, bounds).

Shapes: token ids travel as little-endian int32 bytes, log-probabilities and features as little-endian
float32 bytes. `ids`, `floats` and their inverses convert. `None` means *never scored*, never zero.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

MAX_TURN_TOKENS = 1 << 16
"""Most tokens one turn may sample or be answered with: bounds a frame, far above any chat turn."""
MAX_CONTEXT_TOKENS = 1 << 20
MAX_NODES = 1 << 16
MAX_SNAPSHOT_BYTES = 1 << 20
MAX_TEXT = 1 << 14

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Reason = Annotated[str, Meta(max_length=2048)]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TurnArray = Annotated[bytes, Meta(max_length=4 * MAX_TURN_TOKENS)]
ContextArray = Annotated[bytes, Meta(max_length=4 * MAX_CONTEXT_TOKENS)]
FeatureArray = Annotated[bytes, Meta(max_length=4 * 4096)]
Snapshot = Annotated[bytes, Meta(max_length=MAX_SNAPSHOT_BYTES)]

ROOT = 0
"""Index of the root node: the prompt."""
NO_PARENT = -1
NO_LEASE = -1
"""Owner of the root: no lease sampled it."""


def ids_to_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids `[n]` to little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids(data: bytes) -> np.ndarray:
    """Little-endian int32 bytes to token ids `[n]` (read-only view)."""
    return np.frombuffer(data, dtype="<i4")


def floats_to_bytes(values: Sequence[float] | np.ndarray) -> bytes:
    """Numbers `[n]` to little-endian float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def floats(data: bytes) -> np.ndarray:
    """Little-endian float32 bytes to numbers `[n]` (read-only view)."""
    return np.frombuffer(data, dtype="<f4")


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of nouns and messages: immutable and closed."""


class TaskId(Struct, frozen=True, order=True):
    """One prompt. An environment can always rebuild the task from it.

    Example: `TaskId(env="frozenlake", split="train", index=7)`.
    """

    env: Name
    split: Name
    index: Count

    def __str__(self) -> str:
        return f"{self.env}/{self.split}/{self.index}"


class Version(Struct, frozen=True, order=True):
    """Of the weights. `lineage` grows by one with each learner restart, `step` with each update.

    Example: `Version(lineage=0, step=12)`, rendered `v0.12`.
    """

    lineage: Count
    step: Count

    def __str__(self) -> str:
        return f"v{self.lineage}.{self.step}"


class NodeId(Struct, frozen=True, order=True):
    """Identity of a node, one rendering everywhere: `tree=5/node=17`."""

    tree: Count
    index: Count

    def __str__(self) -> str:
        return f"tree={self.tree}/node={self.index}"


class LeaseId(Struct, frozen=True, order=True):
    """Identity of one attempt at a continuation. `epoch` fences attempts: only the newest may report."""

    tree: Count
    number: Count
    """Which continuation of the tree; draws are keyed on (tree, number), so a retry draws the same."""
    epoch: Count

    def __str__(self) -> str:
        return f"tree={self.tree}/lease={self.number}.{self.epoch}"


class VersionRun(Struct, frozen=True):
    """`count` consecutive tokens sampled under `version`; a turn is a list of runs."""

    version: Version
    count: Annotated[int, Meta(ge=1, le=MAX_TURN_TOKENS)]


class PolicySpan(Struct, frozen=True):
    """Oldest and newest weights under which some tokens were sampled."""

    oldest: Version
    newest: Version


class Ending(enum.Enum):
    """How a path ended. An infrastructure failure is a `Failed` message, never an ending."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    PRUNED = "pruned"


class TurnStatus(enum.Enum):
    """State of the world after a turn. Only an `OPEN` turn may be an anchor."""

    OPEN = "open"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"


class RewardSource(enum.Enum):
    """Who said the outcome. Only `ENVIRONMENT` is a target for the success predictor."""

    ENVIRONMENT = "environment"
    PRUNE_RULE = "prune_rule"
    PSEUDO_REWARD = "pseudo_reward"


class Outcome(Struct, frozen=True):
    """What was finally said of a leaf."""

    reward: float
    """What credit uses: finite."""
    raw_reward: float
    """What the environment returned, before shaping; group filters look at this."""
    source: RewardSource
    ending: Ending


class BranchScore(Struct, frozen=True):
    """A speculation about a node; `stamp` is the tree clock it was computed at."""

    value: float
    source: Name
    stamp: Count


class Probe(Struct, frozen=True):
    """Tokens to be scored after a context, never sampled and never part of a sampled context."""

    name: Name
    context: ContextArray
    targets: TurnArray


class Turn(Struct, frozen=True):
    """What one turn added: the action that was sampled and what the environment answered.

    `action`, `logprobs` and `entropies` have equal lengths `[k]`; `logprobs` are those of the distribution
    that was sampled from. The root's turn has an empty action and the prompt as its observation.
    """

    action: TurnArray = b""
    logprobs: TurnArray = b""
    entropies: TurnArray = b""
    versions: Annotated[list[VersionRun], Meta(max_length=1024)] = []
    observation: TurnArray = b""
    action_text: Text = ""
    seed: Seed = 0
    """Seed of this turn's draws and of the environment's step (see `common.seeds.turn_seed`)."""
    status: TurnStatus = TurnStatus.OPEN
    reward: float = 0.0
    snapshot: Snapshot | None = None
    """State after the turn, or None where the environment replays the action history."""
    state_hash: Annotated[str, Meta(max_length=128)] = ""
    stop_reason: Annotated[str, Meta(max_length=32)] = ""
    process_score: float | None = None
    features: FeatureArray | None = None
    demonstration: bool = False
    probes: Annotated[list[Probe], Meta(max_length=256)] = []

    @property
    def num_action_tokens(self) -> int:
        return len(self.action) // 4

    def token_versions(self) -> list[Version]:
        """The version of each action token, `[k]`."""
        return [run.version for run in self.versions for _ in range(run.count)]

    def span(self) -> PolicySpan | None:
        """Oldest and newest version of the action tokens, None for the root."""
        if not self.versions:
            return None
        seen = [run.version for run in self.versions]
        return PolicySpan(oldest=min(seen), newest=max(seen))


class Node(Struct, frozen=True):
    """One turn in a tree. It stores only the tokens it adds; its context is the walk from the root."""

    index: Count
    parent: Annotated[int, Meta(ge=NO_PARENT)]
    lease: Annotated[int, Meta(ge=NO_LEASE)]
    """Owner: number of the continuation that sampled it."""
    offset: Count
    """0-based turn within its owner."""
    depth: Count
    """Turns from the root; the root has 0."""
    turn: Turn
    scores: Annotated[list[BranchScore], Meta(max_length=64)] = []
    value: float | None = None
    """Success predicted when its `Expanded` was handled, under `value_version`: the baseline of a
    continuation's next turn. None where nothing was predicted."""
    value_version: Count = 0


class Continuation(Struct, frozen=True, kw_only=True):
    """One lease as it ended, with everything that was fixed when it was granted."""

    number: Count
    anchor: Count
    """Node it started from."""
    nodes: Annotated[list[Count], Meta(max_length=MAX_NODES)]
    """The nodes it sampled, in order."""
    weight: float
    baseline: float | None
    predictor_version: Count
    score_stamp: Count
    speculative: bool
    heir_of: int = NO_LEASE
    """The lease whose horizon this one continues, with its share already in `weight`."""
    outcome: Outcome | None
    """None where it ended at a horizon (its heirs carry the return) or was dropped."""
    ended: Annotated[str, Meta(max_length=64)]
    """`finished`, `horizon`, or the reason it was dropped."""


class Tree(Struct, frozen=True):
    """A finished rollout tree: nodes with parent indices, root first, and its continuations.

    Nodes are in canonical order (owner, offset), so that arrival order leaves no trace. A branch is a walk
    from a leaf to the root (`walk`).
    """

    id: Count
    task: TaskId
    wave: Count
    nodes: Annotated[list[Node], Meta(min_length=1, max_length=MAX_NODES)]
    continuations: Annotated[list[Continuation], Meta(max_length=MAX_NODES)]
    planned_weight: float
    """Sum of the weights granted: a constant of the plan, the denominator of this prompt."""
    opened_at: Version
    demonstration: bool = False
    gold_answer: Text | None = None

    def walk(self, index: int) -> list[Node]:
        """Nodes from the root to `index`, both included."""
        path = []
        while index != NO_PARENT:
            path.append(self.nodes[index])
            index = self.nodes[index].parent
        return path[::-1]

    def num_action_tokens(self) -> int:
        return sum(node.turn.num_action_tokens for node in self.nodes)

    def leaves(self) -> Iterator[Continuation]:
        """Continuations that ended with an outcome."""
        return (c for c in self.continuations if c.outcome is not None)


class Segment(Struct, frozen=True):
    """One past turn of a replayed prefix: the action and the seed of the step it was taken with."""

    action: Text
    seed: Seed


class Lease(Struct, frozen=True):
    """One continuation to run from one anchor, with all that is fixed now and never changed later.

    A retry (higher `epoch`) resumes behind the turns already accepted: `prefix`, `snapshot` and `history`
    then reach to the last of them and `offset` counts them.
    """

    id: LeaseId
    task: TaskId
    anchor: Count
    prefix: ContextArray
    """Token ids from the root to where sampling starts."""
    snapshot: Snapshot | None
    history: Annotated[list[Segment], Meta(max_length=MAX_NODES)]
    """Actions and seeds that replay to the same place where there is no snapshot."""
    state_hash: Annotated[str, Meta(max_length=128)]
    depth: Count
    """Turns from the root at which sampling starts."""
    offset: Count
    """Turns of this continuation that earlier attempts already delivered."""
    seed: Seed
    horizon: Count
    """Turns after which to report `HorizonReached`; 0 = run to the end."""
    score_stamp: Count
    weight: float
    baseline: float | None
    predictor_version: Count
    min_version: Version
    """Oldest weights the continuation may start with."""
    deadline_s: float
    """Renewed by progress; a duration, since no wall-clock time crosses hosts."""
    demonstration: bool = False
