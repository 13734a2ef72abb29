"""A results file says what was measured, how, where and when, and the headline is one line of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import begin, finish, git_state, headline_line, machine, read_results, shown
from common.errors import StorageError


def test_the_headline_is_name_and_key_value_pairs_in_the_order_given() -> None:
    line = headline_line("ring", {"rollout_tokens_per_s": 3120.4, "actor_wait": 0.1042, "events": 3})
    assert line == "ring: rollout_tokens_per_s=3120 actor_wait=0.104 events=3"


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0.000"), (-0.25, "-0.250"), (99.9996, "100.000"), (100.0, "100"), (-1234.5, "-1234"), (7, "7")],
)
def test_numbers_are_short_and_never_in_powers_of_ten(value: float, text: str) -> None:
    assert shown(value) == text


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    session = begin("ring", ["--seed", "3", "--", "a=b c"], quick=False)
    line = finish(session, {"actor_wait": 0.5}, [{"seed": 3, "actor_wait": 0.5}], tmp_path, noise={"x": 0.1})
    found = read_results("ring", tmp_path)
    assert found is not None
    assert line == found["last_line"] == "ring: actor_wait=0.500"
    assert found["command"] == "python -m benchmarks.ring --seed 3 -- 'a=b c'"
    assert (found["headline"], found["noise"]) == ({"actor_wait": 0.5}, {"x": 0.1})
    assert found["runs"] == [{"seed": 3, "actor_wait": 0.5}]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", found["date"])
    assert len(found["load_average"]["start"]) == len(found["load_average"]["end"]) == 3
    assert found["seconds"] >= 0
    assert list(tmp_path.iterdir()) == [tmp_path / "ring.json"], "no half-written neighbour stays"


def test_the_quick_tier_has_a_file_of_its_own_and_the_same_name_in_the_headline(tmp_path: Path) -> None:
    session = begin("fleet", [], module="allocator_fleet", quick=True)
    assert finish(session, {"events": 5}, [], tmp_path) == "fleet: events=5"
    assert (tmp_path / "fleet-quick.json").is_file()
    assert session.command == "python -m benchmarks.allocator_fleet"


def test_nothing_measured_is_none_and_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    assert read_results("ring", tmp_path) is None
    for text in ("{", "[1]"):
        (tmp_path / "ring.json").write_text(text)
        with pytest.raises(StorageError, match="measure again"):
            read_results("ring", tmp_path)


def test_the_machine_is_described_without_its_name() -> None:
    found = machine()
    assert set(found) == {"cpu", "cores", "memory_gib", "system", "python", "torch"}
    assert found["cores"] >= 1 and found["memory_gib"] > 0
    assert os.uname().nodename not in str(found)


def test_outside_of_git_there_is_no_commit_and_the_tree_counts_as_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": "none", "dirty": True}


@pytest.mark.parametrize("status, dirty", [("", False), (" M learner/main.py", True)])
def test_a_commit_is_named_with_whether_the_tree_differs_from_it(
    status: str, dirty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def git(root: Path, *words: str) -> str:
        asked.append(words)
        return "abc123" if words[0] == "rev-parse" else status

    monkeypatch.setattr(results, "_git", git)
    assert git_state() == {"commit": "abc123", "dirty": dirty}
    assert ":(exclude)benchmarks/results" in asked[1], "what measuring writes makes no tree dirty"
