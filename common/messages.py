"""Every message of the protocol, one union per direction.

    actor     -> allocator   Hello Heartbeat Starting Expanded HorizonReached Finished Failed Declined
                             Inspected InspectFailed
    allocator -> actor       Welcome Inspect Grant Revoke Bye
    allocator -> learner     Welcome TreeReady Bye
    learner   -> allocator   Hello Heartbeat Credit Consumed Dropped Committed
    either way               Received (in memory: stops resend timers) Durable (journalled: sender may forget)
    puller   <-> weights     GetManifest/Manifest GetChunk/Chunk Refused;  WeightsPublished is a PUB hint
    everyone  -> tracker     Metrics

Types are closed and bounded; `common.codec` turns them into frames and back. Fields that later work needs
are here from the first version, so that the golden byte vectors in the tests need not change. Handlers are
idempotent by identity (lease epoch and offset, tree id, cumulative credit), so a resend does no harm.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.nouns import (
    BranchScore,
    Count,
    Lease,
    LeaseId,
    Name,
    Outcome,
    Reason,
    Struct,
    TaskId,
    Text,
    Tree,
    Turn,
    Version,
)

PROTOCOL_VERSION = 1
MAX_BATCH = 4096
"""Most ids, leases or metrics in one message."""
MAX_CHUNK_BYTES = 1 << 20

MessageId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Seconds = Annotated[float, Meta(gt=0)]
Endpoint = Annotated[str, Meta(max_length=256)]
Digest = Annotated[str, Meta(max_length=128)]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Message(Struct, frozen=True, tag_field="type", tag=True):
    """Base of everything sent. The tag is the class name."""


# --- both ways ------------------------------------------------------------------------------------


class Received(Message, frozen=True):
    """The receiver holds these in memory: stop resending, keep a copy. No ids: it takes the sender for a
    stranger, who has to say `Hello` first."""

    ids: Annotated[list[MessageId], Meta(max_length=MAX_BATCH)]


class Durable(Message, frozen=True):
    """The receiver has written these down: the sender may forget them."""

    ids: Annotated[list[MessageId], Meta(max_length=MAX_BATCH)]


class Bye(Message, frozen=True):
    """The sender is done with the receiver, which exits with `code` and prints `reason`."""

    code: int
    reason: Reason


class Heartbeat(Message, frozen=True):
    """Sent from the work loop; `progress` grows with every turn or step. Leases renew on progress only."""

    progress: Count
    running: Count


class Capabilities(Struct, frozen=True):
    """What a peer can do. Rules and credits that need more are refused at start."""

    slots: Count = 0
    """Continuations run at once."""
    prefetch: Count = 0
    """Leases wanted beyond the running ones."""
    engine: Annotated[str, Meta(max_length=64)] = ""
    features: Count = 0
    """Width of the prefix features; 0 = none."""
    scores: bool = False
    """Whether the engine scores probes."""
    process_scores: bool = False
    """Whether the environment has a process scorer."""
    deterministic: bool = False


class Hello(Message, frozen=True):
    """First message of a peer, and again after every reconnect or allocator restart."""

    role: Name
    peer: Name
    incarnation: Name
    """Random per process start: the newest wins, the older one is told `Bye`."""
    protocol: Count
    capabilities: Capabilities
    agreed: Annotated[dict[Name, Text], Meta(max_length=256)]
    """Settings both sides must share (environment, sampling), flat, so that a mismatch can be named."""
    weights_endpoint: Endpoint = ""
    """Learner only: where its weights are served."""
    hints_endpoint: Endpoint = ""
    tokenizer_hash: Digest = ""
    version: Version | None = None
    """Learner: current weights. Actor: those it holds."""


class Welcome(Message, frozen=True):
    """Answer to `Hello`."""

    run: Name
    config_hash: Digest
    tokenizer_hash: Digest
    weights_endpoint: Endpoint
    hints_endpoint: Endpoint
    version: Version | None
    """Current weights, None until a learner has said hello."""
    heartbeat_s: Seconds
    dead_after_s: Seconds
    seed: Count
    deterministic: bool


# --- actor -> allocator ---------------------------------------------------------------------------


class Inspected(Message, frozen=True):
    """The root of a tree: prompt tokens, snapshot, features. Before the first grant; nothing was sampled."""

    tree: Count
    task: TaskId
    root: Turn
    gold_answer: Text | None = None


class InspectFailed(Message, frozen=True):
    """The task could not be set up here."""

    tree: Count
    reason: Reason


class Starting(Message, frozen=True):
    """The first token is about to be sampled. The actor goes on at once; the allocator may still revoke."""

    lease: LeaseId
    version: Version


class Expanded(Message, frozen=True):
    """One turn ended. `offset` is its 0-based place in the continuation."""

    lease: LeaseId
    offset: Count
    turn: Turn
    scores: Annotated[list[BranchScore], Meta(max_length=64)] = []


class HorizonReached(Message, frozen=True):
    """The continuation ran its horizon and its last turn is open: the rule decides who goes on."""

    lease: LeaseId
    turns: Count


class Finished(Message, frozen=True):
    """The continuation reached a leaf. `turns` counts all its turns, so that a gap is noticed.

    Where the environment paid, the allocator sums the rewards of all its turns; a retry knows its own only.
    """

    lease: LeaseId
    turns: Count
    outcome: Outcome


class Failed(Message, frozen=True):
    """Infrastructure failed, or the lease was revoked: not an outcome, never a reward."""

    lease: LeaseId
    reason: Reason
    retry: bool
    discarded_tokens: Count = 0
    """Action tokens sampled and not delivered as turns; counted even where this crosses a revoke."""


class Declined(Message, frozen=True):
    """The actor gives the lease back unstarted (it is draining, or holds no weights young enough)."""

    lease: LeaseId
    reason: Reason


# --- allocator -> actor ---------------------------------------------------------------------------


class Inspect(Message, frozen=True):
    """Set the task up and describe its root. Samples nothing.

    Like `Grant` it repeats where the newest weights are: an actor that said hello before the learner did has
    no tokenizer yet, and learns here where to pull it.
    """

    tree: Count
    task: TaskId
    version: Version | None = None
    weights_endpoint: Endpoint = ""


class Grant(Message, frozen=True):
    """Continuations to run, and the newest weights there are."""

    leases: Annotated[list[Lease], Meta(max_length=MAX_BATCH)]
    version: Version
    weights_endpoint: Endpoint = ""


class Revoke(Message, frozen=True):
    """Stop at the end of the turn that is under way when this arrives.

    Turns and results that cross it, however many, are discarded whatever their outcome; their tokens count.
    """

    lease: LeaseId
    reason: Reason


# --- allocator <-> learner ------------------------------------------------------------------------


class TreeReady(Message, frozen=True):
    """A finished tree, within the learner's credit."""

    tree: Tree


class Credit(Message, frozen=True):
    """Trees the learner is ready to hold, counted from its `Hello`: cumulative, so a resend adds nothing."""

    total: Count


class Consumed(Message, frozen=True):
    """These trees are in the update that made `version`."""

    trees: Annotated[list[Count], Meta(max_length=MAX_BATCH)]
    version: Version


class Dropped(Message, frozen=True):
    """The learner will never train this tree."""

    tree: Count
    reason: Reason


class Committed(Message, frozen=True):
    """A checkpoint that contains these trees is complete on disk: the allocator may forget them."""

    version: Version
    trees: Annotated[list[Count], Meta(max_length=MAX_BATCH)]


# --- weights --------------------------------------------------------------------------------------


class FileEntry(Struct, frozen=True):
    name: FileName
    size: Count
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]


class WeightsManifest(Struct, frozen=True):
    """Files of one version: `config.json`, `model.safetensors`, `tokenizer.json`."""

    version: Version
    files: Annotated[list[FileEntry], Meta(min_length=1, max_length=64)]


class WeightsPublished(Message, frozen=True):
    """A hint that may be lost; every `Grant` repeats the version and pullers also ask."""

    manifest: WeightsManifest


class GetManifest(Message, frozen=True):
    """Ask for `version`, or for the newest when None."""

    version: Version | None = None


class Manifest(Message, frozen=True):
    manifest: WeightsManifest


class GetChunk(Message, frozen=True):
    version: Version
    file: FileName
    offset: Count


class Chunk(Message, frozen=True):
    version: Version
    file: FileName
    offset: Count
    data: Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]


class Refused(Message, frozen=True):
    """The request cannot be served: the version is gone or the file unknown. Ask for the newest."""

    reason: Reason


# --- tracker --------------------------------------------------------------------------------------


class Metrics(Message, frozen=True):
    """Numbers of one role at one step. Non-finite values are dropped and counted by the writer."""

    role: Name
    peer: Name
    step: Count
    values: Annotated[dict[Name, float], Meta(max_length=MAX_BATCH)]


ActorToAllocator = (
    Hello
    | Heartbeat
    | Starting
    | Expanded
    | HorizonReached
    | Finished
    | Failed
    | Declined
    | Inspected
    | InspectFailed
    | Received
    | Durable
    | Bye
)
LearnerToAllocator = Hello | Heartbeat | Credit | Consumed | Dropped | Committed | Received | Durable | Bye
ToAllocator = ActorToAllocator | LearnerToAllocator
"""What the allocator's one ROUTER accepts; which role may send what is checked by the core."""
AllocatorToActor = Welcome | Inspect | Grant | Revoke | Received | Durable | Bye
AllocatorToLearner = Welcome | TreeReady | Received | Durable | Bye
ToWeights = GetManifest | GetChunk
FromWeights = Manifest | Chunk | Refused
Hint = WeightsPublished
ToTracker = Metrics | Bye
