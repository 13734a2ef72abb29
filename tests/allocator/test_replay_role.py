"""`role=replay` on a run directory: what it prints, its exit code, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import run as door
from allocator import replay_role
from allocator.replay_role import SHOWN, fates, ranges, run_replay
from common.config import Config, ReplayConfig, Role
from common.config_allocator import RandomRuleConfig
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter, Record
from common.rundir import RunDir
from common.settings import to_yaml
from tests.allocator.journaled import Journalled, configuration
from tests.allocator.test_replay import worked

ROOT = Path(door.__file__).resolve().parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Journalled:
    """Two trees finished, none trained: the learner never asked for more."""
    rig = worked(tmp_path_factory.mktemp("run"))
    rig.writer.flush(sync=True)
    rig.rundir.config_file.write_text(to_yaml(rig.config))
    return rig


def asked(config: Config, node: str = "", json: str = "") -> Config:
    copy = configuration(config.allocator.rule, config.allocator.budget.continuations)
    copy.role, copy.replay = Role.REPLAY, ReplayConfig(node=node, json=json)
    return copy


def altered(folder: Path, records: list[Record]) -> RunDir:
    """A run directory with this allocator journal."""
    rundir = RunDir.create(folder, "altered")
    with JournalWriter(rundir.allocator_journal) as journal:
        for record in records:
            journal.append(record.kind, **record.fields)
    return rundir


# ------------------------------------------------------------------------------------ the comparison


def test_equal_decisions_end_in_one_line_and_exit_0(
    run: Journalled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_replay(asked(run.config), run.rundir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "run r: rule random (chains 2, expansions 2), budget fixed (continuations 6), predictor history, D = 0"
    )
    records = run.records()
    told = sum(record.kind in ("input", "tick") for record in records)
    assert lines[1:] == [f"replay: inputs={told} decisions={len(records) - told - 1} differences=0"]


def test_the_first_differences_are_told_all_are_counted_and_the_exit_code_is_1(
    run: Journalled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        Record(r.kind, {**r.fields, "tokens": 9} if r.kind == "turn_accepted" else r.fields, 0)
        for r in run.records()
    ]
    turns = sum(record.kind == "turn_accepted" for record in records)
    assert run_replay(asked(run.config), altered(tmp_path, records)) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("difference: ")]
    assert len(found) == SHOWN + 1 and found[-1] == f"difference: and {turns - SHOWN} more"
    assert "turn_accepted tree=0 number=0 epoch=0 offset=0: tokens was 9, is 1 in the replay" in found[0]
    assert lines[-1].endswith(f" differences={turns}")


def test_other_settings_and_other_code_are_named_before_anyone_wonders(
    run: Journalled, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked(run.config)
    config.allocator.rule = RandomRuleConfig(chains=2, expansions=1)
    config.allocator.budget.continuations = 4
    monkeypatch.setattr(replay_role, "code_of_decisions", lambda: "another")
    assert run_replay(config, run.rundir) == 1
    out = capsys.readouterr().out
    assert "note: allocator.rule.expansions is 1 here and was 2 when the allocator ran" in out
    assert "note: allocator.budget.continuations is 4 here and was 6 when the allocator ran" in out
    assert "note: the code of allocator/ and common/ is not what it was when the allocator ran" in out
    older = [Record("start", {"run": "r", "sender": "a/1", "now": 0.0}, 0), *run.records()[1:]]
    assert run_replay(asked(run.config), altered(tmp_path, older)) == 0
    assert "the journal does not say with which settings it was made" in capsys.readouterr().out


def test_a_run_that_still_goes_on_is_replayed_as_far_as_it_is_written(
    run: Journalled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run.records()
    index = next(i for i, record in enumerate(records) if record.kind == "decided")
    rundir = altered(tmp_path, records[:index])
    with rundir.allocator_journal.open("ab") as file:
        file.write(b"\x07\x00")  # half a record
    assert run_replay(asked(run.config), rundir) == 0
    out = capsys.readouterr().out
    assert "note: the journal breaks off: " in out and out.endswith(" differences=0\n")


def test_a_replay_that_meets_the_impossible_stops_there(
    run: Journalled, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(self: object, view: object) -> None:
        raise RuntimeError("rule 'random' stops lease 1 of tree 0, which is outstanding")

    monkeypatch.setattr("allocator.rules.random.RandomRule.decide", impossible)
    assert run_replay(asked(run.config), run.rundir) == 1
    out = capsys.readouterr().out
    assert "difference: at byte " in out and "the replay fails: rule 'random' stops lease 1" in out
    assert out.endswith(" differences=1\n")


def test_the_run_is_only_read(run: Journalled) -> None:
    def state() -> list[tuple[str, int, int]]:
        paths = sorted(run.rundir.path.rglob("*"))
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    before = state()
    assert run_replay(asked(run.config), run.rundir) == 0
    assert run_replay(asked(run.config, "tree=1/node=3"), run.rundir) == 0
    assert state() == before


def test_nothing_heavy_is_imported(run: Journalled) -> None:
    """Through the door, in a process of its own."""
    code = (
        "import sys, run; code = run.main(sys.argv[1:]); "
        "heavy = {'zmq', 'torch', 'mlflow', 'transformers'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    words = ["role=replay", f"run={run.rundir.path}", "node=tree=1/node=3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "node 3 of tree 1" in done.stdout and done.stdout.splitlines()[-1].endswith("differences=0")


# ------------------------------------------------------------------------------------- the explanation


def test_a_node_is_explained_from_the_journal_up_to_the_end_of_its_tree(
    run: Journalled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_replay(asked(run.config, "tree=0/node=9"), run.rundir) == 0
    out = capsys.readouterr().out
    assert "\n\nnode 9 of tree 0 (frozenlake/train/0, wave 0) is turn " in out
    assert any(line.startswith("*") for line in out.splitlines())
    assert out.splitlines()[-1].startswith("replay: inputs=")
    assert run_replay(asked(run.config, "tree=0/node=0"), run.rundir) == 0
    assert "is its prompt" in capsys.readouterr().out


def test_an_explanation_off_the_path_of_the_run_says_so(
    run: Journalled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run.records()
    index = next(i for i, record in enumerate(records) if record.kind == "lease_issued")
    records[index] = Record("lease_issued", {**records[index].fields, "peer": "z/1"}, 0)
    assert run_replay(asked(run.config, "tree=0/node=1"), altered(tmp_path, records)) == 1
    out = capsys.readouterr().out
    assert "note: the replay left the path of the run: what it explains may not be what happened" in out
    assert "peer was 'z/1'" in out


def test_a_tree_that_the_replay_does_not_finish_is_a_difference(
    run: Journalled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run.records()
    lost = [r for r in records if not (r.kind == "input" and r.fields["message"]["type"] == "Finished")]
    assert run_replay(asked(run.config, "tree=0/node=1"), altered(tmp_path, lost)) == 1
    assert "tree 0 was finished in the run, and is not in the replay" in capsys.readouterr().out


def test_the_same_for_programs(run: Journalled, tmp_path: Path) -> None:
    file = tmp_path / "why.json"
    assert run_replay(asked(run.config, "tree=0/node=9", str(file)), run.rundir) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert (found["run"], found["differing"], found["rule"]["name"]) == ("r", 0, "random")
    explanation = found["explanation"]
    assert (explanation["tree"], explanation["node"], explanation["allowance"]) == (0, 9, None)
    chosen = [a for a in explanation["sight"]["anchors"] if explanation["owner"]["number"] in a["started"]]
    assert [anchor["node"] for anchor in chosen] == [explanation["owner"]["anchor"]]
    assert run_replay(asked(run.config, "", str(file)), run.rundir) == 0
    assert json.loads(file.read_text())["explanation"] is None


def test_numbers_that_json_lacks_are_told_by_name() -> None:
    inf = float("inf")
    assert replay_role._finite({"a": [inf, -inf, 1.5], "b": float("nan")}) == {
        "a": ["inf", "-inf", 1.5],
        "b": "nan",
    }


# -------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "node, sentence",
    [
        ("tree=99/node=1", "tree 99 is not in the journal; the finished trees are 0 to 1"),
        ("tree=2/node=1", "tree 2 is not finished in the journal; the finished trees are 0 to 1"),
        ("tree=3/node=1", r"tree 3 was dropped \(no_outcome\); the finished trees are 0 to 1"),
        ("tree=1/node=999", r"replay.node must be one of nodes 0 to \d+ of tree 1, got tree=1/node=999"),
    ],
)
def test_a_node_that_is_not_there_is_one_sentence_with_what_there_is(
    node: str, sentence: str, run: Journalled, tmp_path: Path
) -> None:
    more = [
        Record("tree_opened", {"tree": 2, "task": "t", "wave": 1}, 0),
        Record("tree_opened", {"tree": 3, "task": "t", "wave": 1}, 0),
        Record("tree_dropped", {"tree": 3, "reason": "no_outcome", "tokens": 0}, 0),
    ]
    with pytest.raises(ConfigError, match=sentence):
        run_replay(asked(run.config, node), altered(tmp_path, [*run.records(), *more]))


def test_where_no_tree_is_finished_yet_it_says_so(run: Journalled, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tree 0 is not finished in the journal; none is finished yet"):
        run_replay(asked(run.config, "tree=0/node=1"), altered(tmp_path, run.records()[:20]))


def test_a_finished_tree_stays_finished_when_the_learner_drops_it() -> None:
    records = [
        Record(kind, {"tree": 0, "reason": "stale"}, 0)
        for kind in ("tree_opened", "tree_ready", "tree_dropped")
    ]
    assert fates(records) == {0: "finished"}


def test_a_run_without_an_allocator_journal_is_one_sentence_and_stays_untouched(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "r")
    before = sorted(rundir.path.rglob("*"))
    with pytest.raises(StorageError, match="has no allocator journal, so nothing to replay"):
        run_replay(Config(role=Role.REPLAY), rundir)
    assert sorted(rundir.path.rglob("*")) == before


@pytest.mark.parametrize(
    "numbers, text",
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 4, 6, 7], "0 to 2, 4, 6 to 7"),
        (range(0, 60, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, …, 58"),
    ],
)
def test_many_numbers_are_told_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_an_emptied_journal_is_no_clean_replay(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "r")
    rundir.allocator_journal.write_bytes(b"")
    with pytest.raises(StorageError, match="holds no record"):
        run_replay(configuration(RandomRuleConfig(), 6), rundir)
