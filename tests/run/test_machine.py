"""What the machine is asked before anything is started: the environment of a launcher, a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import run
from common.config import Config, Role
from tests.run.door import ROOT, one_sentence

LEFT_OVER: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"RANK": "0"}, ("RANK=0 is in the environment without WORLD_SIZE", "unset RANK")),
    ({"RANK": "first"}, ("RANK in the environment must be a whole number, got 'first': unset it",)),
    (
        {"WORLD_SIZE": "1"},
        ("WORLD_SIZE is in the environment without RANK, MASTER_ADDR, MASTER_PORT", "unset it"),
    ),
    ({"RANK": "2", "WORLD_SIZE": "2"}, ("without MASTER_ADDR, MASTER_PORT", "or unset it")),
    (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        ("RANK in the environment must be below WORLD_SIZE, got 2 and '2'", "unset both"),
    ),
    ({"LOCAL_RANK": "x"}, ("LOCAL_RANK in the environment must be a whole number, got 'x': unset it",)),
]


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("role", ["local", "learner"])
@pytest.mark.parametrize("left, parts", LEFT_OVER, ids=[" ".join(left) for left, _ in LEFT_OVER])
def test_half_of_a_launchers_environment_is_told_before_anything_is_started_or_written(
    role: str, left: dict[str, str], parts: tuple[str, ...], elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The learner of role=local found it when the warm start was over."""
    for name, word in left.items():
        monkeypatch.setenv(name, word)
    assert run.main([f"role={role}", "experiment=smoke"]) == 2
    error = one_sentence(capsys)
    assert error.startswith("error: ") and all(part in error for part in parts), error
    assert list(elsewhere.iterdir()) == []


@pytest.mark.usefixtures("no_launcher")
def test_several_ranks_of_everything_are_refused_and_of_the_learner_are_none_of_the_doors_business(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, word in given.items():
        monkeypatch.setenv(name, word)
    assert run.main(["experiment=smoke"]) == 2
    error = one_sentence(capsys)
    assert "WORLD_SIZE in the environment must be 1 or unset with role=local" in error and "got 2" in error
    assert list(elsewhere.iterdir()) == []
    run.check_machine(Config(role=Role.LEARNER))
    monkeypatch.setenv("WORLD_SIZE", "1")
    run.check_machine(Config())


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("role", ["local", "learner"])
def test_a_gpu_that_is_not_there_is_told_before_anything_is_started_or_written(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([f"role={role}", "experiment=smoke", "learner.backend.device=cuda"]) == 2
    error = one_sentence(capsys)
    assert error.startswith("error: learner.backend.device must be cpu or auto, got cuda: torch sees no GPU")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "word, loads, says",
    [("cuda", True, "torch sees no GPU"), ("auto", False, "got 'half'"), ("cpu", False, "got 'half'")],
)
def test_torch_is_loaded_by_the_door_only_to_look_for_a_gpu_that_is_insisted_on(
    word: str, loads: bool, says: str, elsewhere: Path
) -> None:
    """In a process of its own, without any GPU, for a mistake that comes after the look."""
    script = (
        "import sys, run; code = run.main(sys.argv[1:]); "
        "print(code, *(name for name in ('torch', 'transformers') if name in sys.modules))"
    )
    words = ["model.path=half", f"learner.backend.device={word}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=elsewhere, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == (["2", "torch"] if loads else ["2"]), done.stderr
    assert says in done.stderr and done.stderr.count("\n") == 1 and list(elsewhere.iterdir()) == []
