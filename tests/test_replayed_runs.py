"""The replay of a run that real processes made: the same decisions, and a reason for every node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import run as door
from tests.oracle.ring import Ring, warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORDS = ["experiment=smoke", "allocator.max_score_staleness=2"]


def replayed(path: Path, *words: str) -> list[str]:
    """What `role=replay` prints; it must find nothing."""
    command = [sys.executable, str(Path(door.__file__)), "role=replay", f"run={path}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and done.stdout.endswith(" differences=0\n")
    return done.stdout.splitlines()


def test_a_real_run_replays_without_a_difference_and_its_nodes_have_reasons(tmp_path: Path) -> None:
    model = warm_start(tmp_path / "start", *WORDS)
    with Ring(tmp_path / "ring", [*WORDS, f"model.path={model}"]) as ring:
        ring.train(2)
    lines = replayed(ring.path)
    assert len(lines) == 2, "nothing to note: the settings and the code are those of the run"
    trees = ring.decisions().trees
    assert len(trees) == 16
    for number in (0, 7, 15):
        tree, file = trees[number], tmp_path / f"{number}.json"
        for node in (tree.nodes[1], tree.nodes[-1]):
            lines = replayed(ring.path, f"node=tree={number}/node={node.index}", f"replay.json={file}")
            one = next(each for each in tree.continuations if each.number == node.lease)
            (row,) = [line for line in lines if line.startswith("*")]
            assert row.split()[1] == str(one.anchor) and f" {one.number}" in row.partition("chosen for")[2]
            found = json.loads(file.read_text())["explanation"]
            assert (found["owner"]["weight"], found["owner"]["baseline"]) == (one.weight, one.baseline)
    assert "is its prompt" in replayed(ring.path, "node=tree=3/node=0")[2]
