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
import torch
from safetensors.torch import load_file

from tests.learner.backend.ranks import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each process imports torch and transformers anew
ROOT = Path(__file__).resolve().parents[3]
STAGES = (1, 2, 3)
TOLERANCE = 1e-5
"""Largest difference of a weight after three steps of size 0.01: sums in another order, in float32."""


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain backend in one process: what all others are compared with."""
    place = tmp_path_factory.mktemp("alone")
    jobs = [
        Job(name="plain", backend=backend("torch", 1)),
        Job(name="lora", backend=backend("torch", 1), lora={"rank": 2}),
        Job(name="poisoned", backend=backend("torch", 1), poison=1),
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
            Job(name=f"large{stage}", backend=two, steps=2, large=True),
        ]
    finish(place, jobs)
    return place


def test_two_processes_of_torch_give_the_weights_of_one(alone, tmp_path):
    finish(tmp_path, [
        Job(name="plain", backend=backend("torch", 2)),
        Job(name="resumed", backend=backend("torch", 2), resume_after=1),
    ])  # fmt: skip
    assert difference(tmp_path, "plain", alone / "plain.safetensors") < TOLERANCE
    assert result(tmp_path, "plain")["norms"] == pytest.approx(result(alone, "plain")["norms"], rel=1e-5)
    assert result(tmp_path, "resumed")["hashes"] == result(tmp_path, "plain")["hashes"]


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_of_deepspeed_give_the_weights_of_torch(alone, pair, stage):
    assert difference(pair, f"plain{stage}", alone / "plain.safetensors") < TOLERANCE
    assert difference(pair, f"lora{stage}", alone / "lora.safetensors") < TOLERANCE
    expected = pytest.approx(result(alone, "plain")["norms"], rel=1e-5)
    assert result(pair, f"plain{stage}")["norms"] == expected, "the norm is that of the sum, before the clip"


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_resumed_from_the_shards_of_its_ranks_continues_bit_for_bit(pair, stage):
    folder = pair / f"resumed{stage}.checkpoint"
    names = sorted(path.name for path in folder.glob("optimizer*"))
    assert names == [f"optimizer-zero{stage}-rank000{rank}-of-0002.safetensors" for rank in (0, 1)]
    assert result(pair, f"resumed{stage}")["hashes"] == result(pair, f"plain{stage}")["hashes"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_one_rank_that_is_not_finite_stops_the_step_of_all(alone, pair, stage):
    found = result(pair, f"poisoned{stage}")
    assert not torch.isfinite(torch.tensor(found["norms"][1])) and found["hashes"][1] == found["hashes"][0]
    assert difference(pair, f"poisoned{stage}", alone / "poisoned.safetensors") < TOLERANCE


def test_each_stage_holds_less_than_the_one_before(pair):
    """The optimiser's state from stage 1, gradients from stage 2, weights from stage 3: half on each rank."""
    for rank in (0, 1):
        held = {stage: result(pair, f"large{stage}.rank{rank}") for stage in STAGES}
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
