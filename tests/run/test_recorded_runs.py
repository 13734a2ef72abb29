"""Runs that exist: their settings are the base, and not everything may be laid over them."""

from __future__ import annotations

from pathlib import Path

import pytest

import run
from common.config import Config, Role
from common.journal import JournalWriter
from common.rundir import RunDir
from tests.run.door import compose, one_sentence, recorded, resumable


def test_a_run_that_exists_is_the_base_and_the_command_line_goes_on_top(tmp_path: Path) -> None:
    word = recorded(tmp_path / "r", "experiment=smoke", "allocator/rule=random", "allocator.rule.chains=1",
                    "allocator.rule.expansions=5", "seed=5", "learner.optimizer.lr=1e-05")  # fmt: skip
    config = compose(word, "role=learner", "env.size=5")
    assert (config.seed, config.env.size, config.role) == (5, 5, Role.LEARNER)
    assert config.learner.optimizer.lr == 1e-05 and config.learner.steps == 4
    assert config.allocator.rule.chains == 1 and config.allocator.rule.expansions == 5


def test_resuming_takes_the_runs_settings_and_what_may_differ_from_the_command_line(
    tmp_path: Path, started: list[Config]
) -> None:
    word = resumable(tmp_path / "r", "experiment=smoke", "seed=5", "learner/credit=grpo", "learner.steps=9")
    assert run.main([word, "learner.steps=12", "cluster.actors=7", "tracking=none"]) == 0
    (config,) = started
    assert config.role is Role.LOCAL and config.run == config.resume == str(tmp_path / "r")
    assert (config.seed, config.learner.credit.name) == (5, "grpo")
    assert (config.learner.steps, config.cluster.actors, config.tracking.enabled) == (12, 7, False)


def test_a_setting_that_is_emptied_stays_empty_when_it_is_recorded_and_taken_up_again(tmp_path: Path) -> None:
    """prime-rl #2981: an override to nothing was left out of what was written, and the old value came back."""
    resumable(tmp_path / "r", "experiment=smoke", "tracking.uri=http://h:1")
    again = compose(f"resume={tmp_path / 'r'}", "tracking.uri=")
    assert again.tracking.uri == ""
    (tmp_path / "r" / "config.yaml").write_text(run.to_yaml(again))
    assert compose(f"resume={tmp_path / 'r'}").tracking.uri == ""


@pytest.mark.parametrize(
    "words, parts",
    [
        (["env.size=5", "seed=1"], ("seed must be 5, got 1", "env.size must be 3, got 5")),
        (["allocator/rule=flat"], ("allocator.rule.name must be random, got flat",)),
        (["learner.steps=2"], ("learner.steps must be 4 or more, got 2",)),
        (["role=learner"], ("resume must be left out unless role=local",)),
        (["experiment=smoke"], ("experiment=smoke cannot be laid over",)),
    ],
)
def test_what_must_not_differ_is_told_before_anything_starts(
    words: list[str], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    started: list[object],
) -> None:  # fmt: skip
    word = resumable(tmp_path / "r", "experiment=smoke", "seed=5", "learner.steps=4")
    before = sorted(tmp_path.rglob("*"))
    assert run.main([word, *words]) == 2
    error = one_sentence(capsys)
    assert all(part in error for part in parts)
    assert not started and sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r").mkdir()
    assert run.main([f"resume={tmp_path / 'r'}"]) == 2
    assert "it has no run.json" in capsys.readouterr().err


def test_what_belongs_to_one_process_is_not_taken_over_from_a_run(tmp_path: Path) -> None:
    word = recorded(tmp_path / "r", "role=actor", "actor.name=x", "eval.checkpoint=c", "audit.actor_dirs=[a]")
    config = compose(word)
    assert config.role is Role.LOCAL and config.run == str(tmp_path / "r")
    assert config.actor.name == "" and config.eval.checkpoint == "" and config.audit.actor_dirs == []
    again = recorded(tmp_path / "s", "role=replay", "run=x", "node=tree=5/node=17", "replay.json=y")
    assert compose(again).replay == Config().replay


def test_a_group_chosen_on_the_command_line_replaces_the_recorded_section(tmp_path: Path) -> None:
    word = recorded(
        tmp_path / "r", "allocator/rule=random", "learner/credit=grpo", "learner.credit.epsilon=0.5"
    )
    config = compose(word, "allocator/rule=flat")
    assert config.allocator.rule.name == "flat" and not hasattr(config.allocator.rule, "chains")
    assert config.learner.credit.name == "grpo" and config.learner.credit.epsilon == 0.5


def test_an_experiment_cannot_be_laid_over_a_recorded_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([recorded(tmp_path / "r"), "experiment=smoke"]) == 2
    assert "experiment=smoke cannot be laid over" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, part",
    [
        ("learner: [", "cannot read"),
        ("- a\n", "must hold the settings of a run"),
        ("learner:\n  stepz: 3\n", "did you mean 'learner.steps'?"),
        ("learner:\n  steps: many\n", "learner.steps must be a whole number"),
        ("learner:\n  steps: null\n", "learner.steps must be a whole number, got None"),
    ],
)
def test_a_damaged_recorded_config_is_one_sentence(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(text)
    assert run.main([f"run={tmp_path / 'r'}"]) == 2
    assert part in one_sentence(capsys)


@pytest.mark.parametrize("role", ["local", "warmstart", "allocator", "eval", "audit", "actor"])
@pytest.mark.parametrize("text, what", [(None, "is missing"), ("", "is empty"), ("# nothing\n", "is empty")])
def test_a_run_whose_settings_are_gone_is_not_taken_for_one_with_the_defaults(
    text: str | None, what: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDir.create(tmp_path, "r")
    if text is not None:
        rundir.config_file.write_text(text)
    assert run.main([f"run={rundir.path}", f"role={role}"]) == 4
    assert f"r/config.yaml {what}" in one_sentence(capsys)


def test_a_run_that_never_had_an_allocator_has_nothing_to_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumable(tmp_path / "r")
    assert run.main(["role=replay", f"run={tmp_path / 'r'}"]) == 4
    assert "allocator/journal.tw: the run has no allocator journal" in one_sentence(capsys)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["config.yaml", "run.json"]


def test_a_warm_start_is_refused_before_it_touches_a_run_that_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = recorded(tmp_path / "made" / "r")
    rundir = RunDir.create(tmp_path, "r")
    (tmp_path / "made/r/config.yaml").rename(rundir.config_file)
    with JournalWriter(rundir.allocator_journal) as journal:
        journal.append("tree_opened", tree=0, task="t", wave=0)
    before = sorted(rundir.path.rglob("*"))
    for role in ("warmstart", "local"):
        assert run.main([word.replace("made/", ""), f"role={role}"]) == 4, role
        assert "has been trained already" in capsys.readouterr().err
        if role == "warmstart":
            assert sorted(rundir.path.rglob("*")) == before
