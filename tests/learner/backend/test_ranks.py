"""Several processes: the same weights from either backend at any stage, real shards, and a rank that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.learner.backend.ranks import MICRO_BATCH, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each process imports torch and transformers anew
ROOT = Path(__file__).resolve().parents[3]
STAGES = (1, 2, 3)
TOLERANCE = 1e-5
"""Largest difference of a weight after all steps: sums in another order, in float32."""
SMALL_STEP = 3e-4
"""Of a model with a million weights: where a gradient is all rounding, AdamW's step is about as large as its
rate, in any direction."""
METHODS: dict[str, dict[str, Any]] = {
    "decoupled": {"weight": {"name": "decoupled", "cap": 5.0}, "kl": 0.1},
    "vtrace": {"credit": {"name": "tree_vtrace", "critic": "head"}, "loss": {"name": "reinforce"}},
}
"""What makes passes without gradient, which gather sharded weights too: of the proximal policy, for ratios,
and of the critic; and a reference beside the model that is trained."""


def start(place: Path, jobs: list[Job]) -> "subprocess.Popen[str]":
    (place / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.learner.backend.ranks", str(place)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(place: Path, jobs: list[Job], timeout_s: float = 240) -> None:
    process = start(place, jobs)
    _, errors = process.communicate(timeout=timeout_s)
    printed = "".join(path.read_text()[-2000:] for path in place.glob("*.out"))
    assert process.returncode == 0, errors[-4000:] + printed


def backend(name: str, processes: int, stage: int = 1, **more: Any) -> dict[str, Any]:
    settings = {"name": name, "processes": processes, "zero_stage": stage, "collective_timeout_s": 30.0}
    return {**settings, "device": "cpu", **more}


def result(place: Path, name: str) -> dict[str, Any]:
    return json.loads((place / f"{name}.json").read_text())  # type: ignore[no-any-return]


def difference(place: Path, name: str, other: Path) -> float:
    mine, theirs = load_file(place / f"{name}.safetensors"), load_file(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[key] - theirs[key]).abs().max()) for key in mine)


def agrees(place: Path, name: str, other: Path) -> None:
    """The same weights, and the same word of every step."""
    assert difference(place, name, other) < TOLERANCE
    mine, theirs = result(place, name)["metrics"], result(other.parent, other.stem)["metrics"]
    for step, (found, expected) in enumerate(zip(mine, theirs, strict=True)):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), (name, step)


def methods(backend: dict[str, Any], suffix: object = "", **more: Any) -> list[Job]:
    """A model whose weights are large enough to be sharded, under each of the methods."""
    common: dict[str, Any] = {"steps": 2, "large": True, "lr": SMALL_STEP, **more}
    return [Job(name=f"{name}{suffix}", backend=backend, **common, **how) for name, how in METHODS.items()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain backend in one process: what all others are compared with."""
    place = tmp_path_factory.mktemp("alone")
    one = backend("torch", 1)
    jobs = [
        Job(name="plain", backend=one),
        Job(name="lora", backend=one, lora={"rank": 2}),
        Job(name="poisoned", backend=one, poison=1),
        *methods(one),
        *(Job(name=f"deepspeed{stage}", backend=backend("deepspeed", 1, stage)) for stage in STAGES),
    ]
    finish(place, jobs)
    return place


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes of DeepSpeed, all stages one after the other."""
    place = tmp_path_factory.mktemp("pair")
    jobs = []
    for stage in STAGES:
        two = backend("deepspeed", 2, stage)
        jobs += [
            Job(name=f"plain{stage}", backend=two),
            Job(name=f"resumed{stage}", backend=two, resume_after=2),
            Job(name=f"poisoned{stage}", backend=two, poison=1),
            Job(name=f"lora{stage}", backend=two, lora={"rank": 2}),
            *methods(two, stage, measure=True),
        ]
    everywhere = backend("deepspeed", 2, 3, gradient_checkpointing=True)
    jobs.append(Job(name="parts", backend=everywhere, shards_above=10, logits_at_once=5 * 24))
    finish(place, jobs)
    return place


def test_the_batches_are_what_ranks_must_agree_on(alone):
    """Several micro-batches a step, tokens that are clipped, and a value head that has learnt something."""
    steps = result(alone, "plain")["metrics"]
    assert all(step["tokens_trained"] > 3 * MICRO_BATCH and 0 < step["clip_fraction"] < 1 for step in steps)
    assert result(alone, "vtrace")["metrics"][1]["critic_loss"] > 0
    assert result(alone, "decoupled")["metrics"][1]["kl_term"] > 0


def test_two_processes_of_torch_give_the_weights_of_one(alone, tmp_path):
    two = backend("torch", 2)
    resumed = Job(name="resumed", backend=two, resume_after=1)
    finish(tmp_path, [Job(name="plain", backend=two), resumed, *methods(two)])
    for name in ("plain", *METHODS):
        agrees(tmp_path, name, alone / f"{name}.safetensors")
    assert result(tmp_path, "resumed")["hashes"] == result(tmp_path, "plain")["hashes"]


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_of_deepspeed_gives_the_weights_of_torch(alone, stage):
    agrees(alone, f"deepspeed{stage}", alone / "plain.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_of_deepspeed_give_the_weights_of_torch(alone, pair, stage):
    for name in ("plain", "lora", *METHODS):
        agrees(pair, f"{name}{stage}", alone / f"{name}.safetensors")


def test_ranks_whose_logits_would_be_made_in_unequal_numbers_of_parts_do_not_wait_forever(alone, pair):
    """And where every weight is sharded, and each layer is computed twice."""
    agrees(pair, "parts", alone / "plain.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_resumed_from_the_shards_of_its_ranks_continues_bit_for_bit(pair, stage):
    folder = pair / f"resumed{stage}.checkpoint"
    names = sorted(path.name for path in folder.glob("optimizer*"))
    assert names == [f"optimizer-zero{stage}-rank000{rank}-of-0002.safetensors" for rank in (0, 1)]
    assert result(pair, f"resumed{stage}")["hashes"] == result(pair, f"plain{stage}")["hashes"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_one_rank_that_is_not_finite_stops_the_step_of_all(alone, pair, stage):
    found = result(pair, f"poisoned{stage}")
    assert [step["skipped"] for step in found["metrics"]] == [0, 2, 0]
    assert found["hashes"][1] == found["hashes"][0]
    assert difference(pair, f"poisoned{stage}", alone / "poisoned.safetensors") < TOLERANCE


def test_each_stage_holds_less_than_the_one_before(pair):
    """The optimiser's state from stage 1, gradients from stage 2, weights from stage 3: half on each rank."""
    for rank in (0, 1):
        held = {stage: result(pair, f"decoupled{stage}.rank{rank}") for stage in STAGES}
        whole = held[1]["all"]
        for stage in STAGES:
            assert held[stage]["state"] < 0.55 * 2 * whole
            # A tensor that two ranks share is held whole by both until the step.
            assert (held[stage]["gradients"] < 0.75 * whole) == (stage >= 2), held
            # Small ones stay whole beside their shards.
            assert (held[stage]["weights"] < 0.6 * whole) == (stage >= 3), held


def wait_for(path: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def dies(name: str, place: Path) -> None:
    """kill -9 rank 1 in the middle of its work."""
    jobs = [
        Job(name="first", backend=backend(name, 2, 3), steps=1),
        Job(name="long", backend=backend(name, 2, 3), steps=400, pause_s=0.05),
    ]
    process = start(place, jobs)
    wait_for(place / "first.json")
    time.sleep(1.0)
    os.kill(int((place / "rank1.pid").read_text()), signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=40)
    assert time.monotonic() - began < 15
    assert process.returncode == 6, errors[-3000:]
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: ") and "rank 1 of the learner ended with killed by SIGKILL" in last
    assert "Traceback" not in errors


def test_a_rank_that_is_killed_ends_the_run_with_a_sentence(tmp_path):
    dies("torch", tmp_path)


def test_a_rank_of_deepspeed_that_is_killed_ends_the_run_with_a_sentence(tmp_path):
    dies("deepspeed", tmp_path)


def test_ranks_do_not_outlive_rank_0(tmp_path):
    process = start(tmp_path, [Job(name="first", backend=backend("torch", 2), steps=1000, pause_s=0.05)])
    wait_for(tmp_path / "rank1.pid")
    other = int((tmp_path / "rank1.pid").read_text())
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() < deadline, "rank 1 is still there"
        time.sleep(0.05)
