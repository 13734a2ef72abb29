"""What the command lines of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cli import fresh_run, guarded, numbers, split
from common.errors import ConfigError, StorageError


def test_words_behind_two_dashes_are_overrides() -> None:
    assert split(["--quick", "--", "learner.steps=3"]) == (["--quick"], ["learner.steps=3"])
    assert split(["--quick"]) == (["--quick"], [])
    assert numbers("0,1,5") == [0, 1, 5]


@pytest.mark.parametrize("word", ["role=eval", "run=x", "seed=1", "eval.tasks=3", "runs_dir=x", "--seeds=1"])
def test_what_a_benchmark_sets_itself_cannot_be_overridden(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot override"):
        split(["--", word])


def test_an_unfinished_run_makes_way_and_anything_else_does_not(tmp_path: Path) -> None:
    unfinished, foreign = tmp_path / "run", tmp_path / "thesis"
    for folder in (unfinished, foreign):
        folder.mkdir()
    (unfinished / "run.json").write_text("{}")
    (foreign / "chapter-1").write_text("…")
    assert fresh_run(unfinished) == unfinished and not unfinished.exists()
    with pytest.raises(StorageError, match="is no run directory"):
        fresh_run(foreign)
    assert (foreign / "chapter-1").exists()


def test_a_mistake_is_one_sentence_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(words: list[str]) -> int:
        raise ConfigError("seeds must be numbers")

    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    assert (guarded(mistaken), guarded(interrupted), guarded(lambda words: 0)) == (2, 130, 0)
    assert capsys.readouterr().err.splitlines()[0] == "error: seeds must be numbers"
