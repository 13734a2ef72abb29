"""The learner's choices end to end: real processes over real sockets, audited.

    warm start (once) ─▶ run.py: evaluation, allocator, learner of several ranks, actor, evaluation ─▶ exit 0

Nothing here is about learning: that ranks, shards, precision, adapters and a critic go through a whole run.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import run as door
from common.audit import audit_run
from common.manifest import last_step
from common.rundir import RunDir
from tests.oracle.ring import PATIENCE_S, Ring, warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = [sys.executable, str(Path(door.__file__))]
STEPS = 3
SHARDED = ["model.hidden_size=384", "model.layers=1", "model.intermediate_size=512"]
"""Large enough that ZeRO 3 really shards its weights."""
LEARNT = {
    "ratio_ess", "ratio_q50", "clip_fraction", "weight_limited_fraction", "drop_fraction", "kl_behaviour",
    "kl_term", "entropy", "lag_share_0", "logprob_gap", "grad_norm", "loss", "rifb", "advantage_mass",
    "tokens_generated", "tokens_trained", "tokens_stale", "tokens_without_contrast", "stale_branch_success",
}  # fmt: skip
"""What each step says, as the documentation has it."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Starting weights that reach the goal now and then, so that there is something to predict."""
    longer = ["warmstart.steps=150", "warmstart.lr=0.005"]
    return warm_start(tmp_path_factory.mktemp("warm"), "experiment=smoke", *longer)


def words(*more: str, steps: int = STEPS) -> list[str]:
    return ["experiment=smoke", f"learner.steps={steps}", "run=runs/x", "cluster.actors=1", *more]


def local(folder: Path, *typed: str) -> list[str]:
    """What a run printed that ended well, in one piece, with nothing lost."""
    done = subprocess.run(
        [*COMMAND, *typed], cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    audit = audit_run(RunDir(folder / "runs" / "x"))
    assert audit.ok, list(audit.lines())
    lines = done.stdout.splitlines()
    assert any(re.search(r"step \d+/\d+  success \d", line) for line in lines), lines
    assert lines[-1].startswith("held-out success ")
    return lines


def test_two_ranks_with_shards_in_bfloat16_go_through_a_whole_run(tmp_path: Path) -> None:
    local(
        tmp_path,
        *words(*SHARDED, "learner/regularizer=kl", "learner/loss=cispo", "learner/weight=icepop"),
        "learner/backend=deepspeed", "learner.backend.processes=2", "learner.backend.zero_stage=3",
        "learner.backend.dtype=bfloat16", "learner.backend.gradient_checkpointing=true",
    )  # fmt: skip
    newest = RunDir(tmp_path / "runs" / "x").checkpoints / f"step-{STEPS:08d}"
    assert len(list(newest.glob("optimizer-zero3-rank*-of-0002.safetensors"))) == 2
    tracked = json.loads((tmp_path / "runs" / "x" / "tracking" / "mlflow.json").read_text())
    from mlflow import MlflowClient

    metrics = MlflowClient(tracked["uri"]).get_run(tracked["run_id"]).data.metrics
    assert {f"learner/{name}" for name in LEARNT} <= set(metrics)


def test_adapters_are_trained_saved_evaluated_and_taken_up_again(start: Path, tmp_path: Path) -> None:
    local(tmp_path, *words("tracking=none", f"model.path={start}", "learner.lora.rank=4"))
    rundir = RunDir(tmp_path / "runs" / "x")
    first = rundir.checkpoints / f"step-{STEPS:08d}"
    lines = local(tmp_path, "resume=runs/x", f"learner.steps={STEPS + 1}")
    assert any(f"resumed at step {STEPS} as lineage 1" in line for line in lines)
    second = rundir.checkpoints / f"step-{STEPS + 1:08d}"
    base = (start / "model.safetensors").read_bytes()
    assert all((folder / "model.safetensors").read_bytes() == base for folder in (first, second))
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert any(not one[name].equal(other[name]) for name in one if "lora_B" in name)
    found = json.loads(rundir.eval_file("after").read_text())
    assert found["checkpoint"] == str(second)


def test_a_value_head_goes_through_a_run_of_two_ranks(start: Path, tmp_path: Path) -> None:
    method = ["learner/credit=tree_vtrace", "learner.credit.critic=head", "learner/loss=reinforce"]
    ranks = ["learner.backend.processes=2", f"learner.steps={STEPS}", f"model.path={start}"]
    with Ring(tmp_path, ["experiment=smoke", *ranks, *method]) as ring:
        ring.train(actors=1)
    audit = audit_run(RunDir(ring.path), [tmp_path / "actor-0"])
    assert audit.ok and audit.given_up == 0, list(audit.lines())
    heads = [
        load_file(RunDir(ring.path).checkpoints / f"step-{step:08d}" / "critic.safetensors")["head/weight"]
        for step in (2, STEPS)
    ]
    assert float((heads[1] - heads[0]).abs().max()) > 0


def test_a_rank_that_is_killed_ends_the_whole_run_with_a_sentence_and_resume_goes_on(
    start: Path, tmp_path: Path
) -> None:
    rundir = RunDir(tmp_path / "runs" / "x")
    ranks = ["learner.backend.processes=2", "learner.checkpoint_every=1"]
    typed = words("tracking=none", f"model.path={start}", *ranks, steps=40)
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen([*COMMAND, *typed], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for_step(rundir, 1, launcher)
            everyone = psutil.Process(launcher.pid).children(recursive=True)
            rank_of(1, everyone).send_signal(signal.SIGKILL)
            assert launcher.wait(60) == 6, (tmp_path / "out").read_text()
        finally:
            launcher.kill()
    *_, last = (tmp_path / "out").read_text().strip().splitlines()
    assert last.startswith("error: learner stopped (exit code 6)")
    assert "rank 1 of the learner ended with killed by SIGKILL" in last and "Traceback" not in last
    assert psutil.wait_procs(everyone, timeout=10)[1] == []
    done = last_step(rundir.checkpoints)
    assert done is not None
    assert f"runs/x at step {done}/40" in local(tmp_path, "resume=runs/x")[0]


def wait_for_step(rundir: RunDir, step: int, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not rundir.path.is_dir() or (last_step(rundir.path / "learner" / "checkpoints") or 0) < step:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def rank_of(rank: int, processes: list[psutil.Process]) -> psutil.Process:
    (found,) = [
        process
        for process in processes
        if "role=learner" in process.cmdline() and process.environ().get("RANK") == str(rank)
    ]
    return found
