"""One message of every type with every field filled, and their golden frames.

The golden file pins the protocol: if a test says that it changed, other releases no longer understand this
one. Raise PROTOCOL_VERSION, then write it anew with

    python -m tests.common.message_samples
"""

from __future__ import annotations

import json
from pathlib import Path

from common import messages as m
from common.codec import encode
from common.nouns import (
    BranchScore,
    Continuation,
    Ending,
    Lease,
    LeaseId,
    Node,
    Outcome,
    Probe,
    RewardSource,
    Segment,
    TaskId,
    Tree,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)

GOLDEN_FILE = Path(__file__).with_name("golden_frames.json")
RUN, SENDER = "run-7", "actor-1/5f3c"
MSG_ID = bytes(range(16))

TASK = TaskId(env="frozenlake", split="train", index=7)
OLD, NEW = Version(lineage=1, step=11), Version(lineage=1, step=12)
LEASE_ID = LeaseId(tree=5, number=3, epoch=2)
OUTCOME = Outcome(reward=0.5, raw_reward=1.0, source=RewardSource.ENVIRONMENT, ending=Ending.TERMINATED)
SCORE = BranchScore(value=0.25, source="predictor", stamp=9)
PROBE = Probe(name="gold", context=ids_to_bytes([4, 5, 6]), targets=ids_to_bytes([7, 8]))
ROOT_TURN = Turn(
    observation=ids_to_bytes([10, 11, 12]),
    snapshot=b"\x00state",
    state_hash="00ff",
    features=floats_to_bytes([1.5]),
)
TURN = Turn(
    action=ids_to_bytes([21, 2, 70000]),
    logprobs=floats_to_bytes([-0.5, -1.25, 0.0]),
    entropies=floats_to_bytes([0.75, 0.5, 0.25]),
    versions=[VersionRun(version=OLD, count=2), VersionRun(version=NEW, count=1)],
    observation=ids_to_bytes([31, 32]),
    action_text="go right",
    seed=(1 << 63) - 1,
    status=TurnStatus.TERMINATED,
    reward=1.0,
    snapshot=b"\x01state",
    state_hash="a1b2",
    stop_reason="stop",
    process_score=0.125,
    features=floats_to_bytes([0.5, -0.5]),
    demonstration=True,
    probes=[PROBE],
)
TREE = Tree(
    id=5,
    task=TASK,
    wave=2,
    nodes=[
        Node(index=0, parent=-1, lease=-1, offset=0, depth=0, turn=ROOT_TURN),
        Node(
            index=1,
            parent=0,
            lease=3,
            offset=4,
            depth=1,
            turn=TURN,
            scores=[SCORE],
            value=0.375,
            value_version=6,
        ),
    ],
    continuations=[
        Continuation(
            number=3,
            anchor=0,
            nodes=[1],
            weight=0.125,
            baseline=0.5,
            predictor_version=6,
            score_stamp=9,
            speculative=True,
            heir_of=2,
            outcome=OUTCOME,
            ended="finished",
        )
    ],
    planned_weight=1.0,
    opened_at=OLD,
    demonstration=True,
    gold_answer="goal",
)
GRANTED = Lease(
    id=LEASE_ID,
    task=TASK,
    anchor=1,
    prefix=ids_to_bytes([10, 11, 12, 21]),
    snapshot=b"\x02state",
    history=[Segment(action="go down", seed=77)],
    state_hash="c3",
    depth=1,
    offset=1,
    seed=123456789,
    horizon=4,
    score_stamp=9,
    weight=0.125,
    baseline=0.5,
    predictor_version=6,
    min_version=OLD,
    deadline_s=30.0,
    demonstration=True,
)
MANIFEST = m.WeightsManifest(
    version=NEW, files=[m.FileEntry(name="model.safetensors", size=1 << 33, sha256="ab" * 32)]
)
CAPABILITIES = m.Capabilities(
    slots=64, prefetch=16, engine="torch", features=16, scores=True, process_scores=True, deterministic=True
)

SAMPLES: tuple[m.Message, ...] = (
    m.Received(ids=[MSG_ID, bytes(16)]),
    m.Durable(ids=[MSG_ID]),
    m.Bye(code=5, reason="superseded"),
    m.Heartbeat(progress=1 << 40, running=3),
    m.Hello(
        role="learner",
        peer="learner-0",
        incarnation="5f3c",
        protocol=1,
        capabilities=CAPABILITIES,
        agreed={"env.name": '"frozenlake"', "engine.temperature": "1.0"},
        weights_endpoint="tcp://127.0.0.1:5556",
        hints_endpoint="tcp://127.0.0.1:5557",
        tokenizer_hash="cd" * 32,
        version=NEW,
    ),
    m.Welcome(
        run=RUN,
        config_hash="ef" * 32,
        tokenizer_hash="cd" * 32,
        weights_endpoint="tcp://127.0.0.1:5556",
        hints_endpoint="tcp://127.0.0.1:5557",
        version=NEW,
        heartbeat_s=1.0,
        dead_after_s=10.0,
        seed=1 << 61,
        deterministic=True,
    ),
    m.Inspected(tree=5, task=TASK, root=ROOT_TURN, gold_answer="goal"),
    m.InspectFailed(tree=5, reason="no such task"),
    m.Starting(lease=LEASE_ID, version=NEW),
    m.Expanded(lease=LEASE_ID, offset=4, turn=TURN, scores=[SCORE]),
    m.HorizonReached(lease=LEASE_ID, turns=4),
    m.Finished(lease=LEASE_ID, turns=5, outcome=OUTCOME),
    m.Failed(lease=LEASE_ID, reason="environment raised: boom", retry=True, discarded_tokens=17),
    m.Declined(lease=LEASE_ID, reason="draining"),
    m.Inspect(tree=5, task=TASK, version=NEW, weights_endpoint="tcp://10.0.0.7:5556"),
    m.Grant(leases=[GRANTED], version=NEW, weights_endpoint="tcp://127.0.0.1:5556"),
    m.Revoke(lease=LEASE_ID, reason="score too old"),
    m.TreeReady(tree=TREE),
    m.Credit(total=64),
    m.Consumed(trees=[5, 6, 1 << 40], version=NEW),
    m.Dropped(tree=5, reason="too stale"),
    m.Committed(version=NEW, trees=[5, 6]),
    m.WeightsPublished(manifest=MANIFEST),
    m.GetManifest(version=NEW),
    m.Manifest(manifest=MANIFEST),
    m.GetChunk(version=NEW, file="model.safetensors", offset=1 << 20),
    m.Chunk(version=NEW, file="model.safetensors", offset=1 << 20, data=b"\x00weights"),
    m.Refused(reason="version v1.2 is gone"),
    m.Metrics(role="learner", peer="learner-0", step=12, values={"loss": 0.5, "reward/mean": -1.0}),
)


def name_of(sample: m.Message) -> str:
    return type(sample).__name__


def frames_of(sample: m.Message) -> list[bytes]:
    return encode(sample, run=RUN, sender=SENDER, msg_id=MSG_ID)


def golden() -> dict[str, list[str]]:
    """Message type to the hex of its three frames."""
    return {name_of(sample): [frame.hex() for frame in frames_of(sample)] for sample in SAMPLES}


if __name__ == "__main__":
    GOLDEN_FILE.write_text(json.dumps(golden(), indent=1) + "\n", encoding="utf-8")
