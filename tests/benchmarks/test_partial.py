"""What a long benchmark keeps of itself, and takes up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.partial import Partial
from common.errors import StorageError

SETTINGS = {"tasks": 200, "words": ["seed=1"]}
ORDER = [(0, "lag0"), (1, "lag0"), (0, "lag4")]


def test_what_has_finished_is_not_run_again_by_the_next_process(tmp_path: Path) -> None:
    first = Partial.take_up(tmp_path, SETTINGS, False, print)
    for seed, arm in first.missing(ORDER[:2], lambda line: None):
        first.keep(seed, arm, [{"arm": arm, "rate": 0.5 + seed}])
    said: list[str] = []
    second = Partial.take_up(tmp_path, SETTINGS, False, said.append)
    assert list(second.missing(ORDER, said.append)) == [(0, "lag4")]
    assert second.get(1, "lag0") == [{"arm": "lag0", "rate": 1.5}]
    assert said == [
        "[1/3] seed 0, lag0: finished before",
        "[2/3] seed 1, lag0: finished before",
        "[3/3] seed 0, lag4",
    ]


def test_an_arm_that_was_interrupted_is_run_again(tmp_path: Path) -> None:
    partial = Partial.take_up(tmp_path, SETTINGS, False, print)
    assert next(partial.missing(ORDER, lambda line: None)) == ORDER[0]
    assert next(partial.missing(ORDER, lambda line: None)) == ORDER[0]


@pytest.mark.parametrize("other", [{**SETTINGS, "tasks": 1000}, {**SETTINGS, "commit": "1f"}, {}])
def test_what_was_made_under_other_settings_does_not_count_and_that_is_said(
    tmp_path: Path, other: dict[str, object]
) -> None:
    Partial.take_up(tmp_path, SETTINGS, False, print).keep(0, "lag0", [{}])
    said: list[str] = []
    assert Partial.take_up(tmp_path, other, False, said.append).get(0, "lag0") is None
    assert said == ["1 finished arms were made under other settings and do not count"]


def test_a_fresh_start_forgets_what_has_finished_even_when_nothing_is_run_after_it(tmp_path: Path) -> None:
    Partial.take_up(tmp_path, SETTINGS, False, print).keep(0, "lag0", [{}])
    said: list[str] = []
    assert Partial.take_up(tmp_path, SETTINGS, True, said.append).get(0, "lag0") is None
    assert Partial.take_up(tmp_path, SETTINGS, False, said.append).get(0, "lag0") is None
    assert said == []


def test_once_the_results_are_written_nothing_is_kept(tmp_path: Path) -> None:
    partial = Partial.take_up(tmp_path, SETTINGS, False, print)
    partial.keep(0, "lag0", [{}])
    partial.remove()
    assert partial.finished == {} and list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "partial.json").write_text('{"settings": {', encoding="utf-8")
    with pytest.raises(StorageError, match=r"partial\.json.*remove it to start from the beginning"):
        Partial.take_up(tmp_path, SETTINGS, False, print)
