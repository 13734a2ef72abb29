"""The GPU script: without a GPU it says so; its checks run on the CPU with a tiny model, and can fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import SMALL, Check, checks, main, make_model, packing
from benchmarks.results import BenchmarkFailed
from benchmarks.training_trees import training_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so() -> None:
    with pytest.raises(BenchmarkFailed, match="no GPU here that torch can use"):
        main([])


def test_all_checks_pass_on_the_cpu_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ok, ")[0] for line in lines] == [
        "packing in float32", "packing in bfloat16", "training in bfloat16", "speed",
    ]  # fmt: skip


def test_attention_that_sees_too_much_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = training_rows(SMALL.sharing, SMALL.trees)
    monkeypatch.setattr(
        gpu_check, "dense_mask", lambda ends: torch.ones(1, 1, *2 * [ends.shape[1]]).tril() > 0
    )
    check = packing(make_model(SMALL, torch.device("cpu")), rows, SMALL, bf16=False)
    assert not check.ok and "FAILED" in check.line()


def test_a_check_that_fails_makes_the_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_check, "checks", lambda device, size: [Check("a", True, ""), Check("b", False, "")]
    )
    assert main(["--device", "cpu", "--small"]) == 1
    assert callable(checks)
