"""The line on the terminal is made from logs that may be missing, half written or of another kind."""

import json
from pathlib import Path

import pytest

from common.progress import Progress, Tail, duration, success_on


def add(path: Path, *entries: object, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write(
            "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + end
        )


def test_the_newest_numbers_of_each_kind_are_shown(tmp_path: Path) -> None:
    progress = Progress(
        60, {"learner": Tail(tmp_path / "learner.log"), "allocator": Tail(tmp_path / "none.log")}
    )
    add(tmp_path / "learner.log", {"event": "progress", "step": 3, "success": 0.5, "trees_per_s": 2.25})
    add(tmp_path / "learner.log", {"event": "progress", "step": 4, "success": 0.625, "lag": 1})
    assert progress.update() == []
    assert progress.line(75, 2, 3) == "1m15s  step 4/60  success 0.62  2.2 trees/s  lag 1.0  actors 2/3"


def test_without_any_numbers_the_line_still_tells_the_time(tmp_path: Path) -> None:
    progress = Progress(60, {"learner": Tail(tmp_path / "none.log")})
    assert progress.update() == []
    assert progress.line(5, 2, 2) == "0m05s  step 0/60  actors 2/2"


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    add(path, {"a": 1}, '{"a": ', end="")
    assert tail.new_entries() == [{"a": 1}]
    assert tail.new_entries() == []
    add(path, "2}")
    assert tail.new_entries() == [{"a": 2}]


@pytest.mark.parametrize("line", ["no json", "[1]", "null", '{"event": "progress", "step": "x"}', "\x00\xff"])
def test_lines_of_another_kind_are_passed_over(line: str, tmp_path: Path) -> None:
    progress = Progress(9, {"learner": Tail(tmp_path / "log")})
    add(tmp_path / "log", line, {"event": "progress", "step": 2})
    assert progress.update() == [] and progress.newest == {"step": 2}


def test_a_roles_newest_warning_is_passed_on_once_and_cannot_steer_the_terminal(tmp_path: Path) -> None:
    progress = Progress(9, {"allocator": Tail(tmp_path / "log")})
    add(tmp_path / "log", {"level": "warning", "message": "waiting for actors for 10 s"})
    add(
        tmp_path / "log",
        {"level": "error", "message": "waiting \x1b[2J for 20 s"},
        {"level": "info", "message": "x"},
    )
    assert progress.update() == ["allocator: waiting \\x1b[2J for 20 s"]
    assert progress.update() == []


def test_an_error_is_not_hidden_by_a_warning_that_comes_right_after_it(tmp_path: Path) -> None:
    """A learner that sets a damaged checkpoint aside says next from which it goes on."""
    progress = Progress(9, {"learner": Tail(tmp_path / "log")})
    said = (("warning", "old"), ("error", "damaged"), ("warning", "hm"), ("warning", "resumed"))
    add(tmp_path / "log", *({"level": level, "message": message} for level, message in said))
    assert progress.update() == ["learner: damaged", "learner: resumed"]


def test_only_the_held_out_split_is_called_held_out() -> None:
    assert success_on("eval") == "held-out success"
    assert success_on("train") == "success on the split train"


def test_times_are_written_in_minutes_and_seconds() -> None:
    assert [duration(s) for s in (0, 59.6, 312, 3601)] == ["0m00s", "1m00s", "5m12s", "60m01s"]
