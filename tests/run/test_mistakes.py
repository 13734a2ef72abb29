"""What each mistake is answered with: one sentence and an exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import run
from tests.run.door import one_sentence, python

MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    # words typed: parts that the one sentence must contain
    ("learner.step=3", ("learner.step", "did you mean 'learner.steps'?")),
    ("lr=0.1", ("unknown setting 'lr'", "'learner.optimizer.lr'", "'warmstart.lr'")),
    ("xyzzy=1", ("unknown setting 'xyzzy'", "python run.py --cfg job")),
    ("learner=3", ("learner is a section", "learner.steps=…")),
    ("role=acter", ("role must be one of local, allocator, actor", "'acter'", "did you mean 'actor'?")),
    ("--role acter", ("role must be one of", "did you mean 'actor'?")),
    ("--role", ("role must be one of", "got ''")),
    ("--rol actor", ("unknown option --rol", "did you mean --role?")),
    ("--seed 3", ("unknown option --seed", "seed=…")),
    ("--cfg all", ("--cfg must be job", "'all'")),
    ("actor", ("cannot read 'actor'", "role=actor")),
    ("+seed=1", ("cannot read '+seed=1'", "write seed=value")),
    ("~seed=1", ("write seed=value",)),
    ("experiment=smok", ("experiment must be one of", "'smok'", "did you mean 'smoke'?")),
    ("learner/credit=gpro", ("learner/credit must be one of", "did you mean 'grpo'?")),
    ("allocator/rule=ucb", ("allocator/rule must be one of", "'ucb'")),
    ("allocator.rule=random", ("write allocator/rule=random",)),
    ("allocator.rule.name=random", ("write allocator/rule=random",)),
    ("allocator/rule=flat allocator.rule.chains=2", ("allocator.rule.chains", "allocator/rule=random")),
    ("hydra.run.dir=x", ("unknown setting 'hydra.run.dir'",)),
    ("learner.steps=abc", ("learner.steps must be a whole number", "'abc'")),
    ("learner.steps=1.5", ("learner.steps must be a whole number", "'1.5'")),
    ("learner.steps=1,2", ("learner.steps must be a whole number", "'1,2'")),
    ("learner.steps=", ("learner.steps must be a whole number", "''")),
    ("engine.temperature=warm", ("engine.temperature must be a finite number", "'warm'")),
    ("allocator.lease_deadline_s=inf", ("allocator.lease_deadline_s must be a finite number", "'inf'")),
    ("learner.weight.cap=nan", ("learner.weight.cap must be a finite number", "'nan'")),
    ("deterministic=perhaps", ("deterministic must be true or false", "'perhaps'")),
    ("learner.node_weight=grnted", ("learner.node_weight must be one of", "did you mean 'granted'?")),
    ("audit.actor_dirs=x", ("audit.actor_dirs must be a list like [a,b]", "'x'")),
    ("learner.steps=0", ("learner.steps must be at least 1", "got 0")),
    ("learner.optimizer.lr=nan", ("learner.optimizer.lr must be a finite number", "nan")),
    ("learner.optimizer.lr=-1", ("learner.optimizer.lr must be 0 or more", "-1")),
    ("engine.temperature=0", ("engine.temperature must be above 0", "0.0")),
    ("engine.top_p=0.9", ("engine.top_p must be 1", "0.9")),
    ("cluster.allocator=localhost:5555", ("cluster.allocator must be a tcp:// or ipc:// endpoint",)),
    ("security.mode=curve", ("security.mode must be none",)),
    ("deterministic=true", ("learner.max_policy_lag must be 0 when deterministic=true", "got 2")),
    ("allocator/rule=random allocator.budget.continuations=5", ("allocator.budget.continuations", "got 5")),
    ("learner.steps=3 learner.steps=4", ("learner.steps is given twice", "steps=3", "steps=4", "leave one")),
    ("role=actor role=learner", ("role is given twice", "role=actor", "role=learner")),
    ("--role actor role=learner", ("role is given twice",)),
    ("model=tiny seed=1 model=small", ("model is given twice, as model=tiny and as model=small",)),
    ("eval.split=nosuch", ("eval.split must be one of train, eval", "'nosuch'")),
    ("role=eval run=x eval.split=evil", ("eval.split must be one of", "did you mean 'eval'?")),
    (
        "tracking.uri=foo://bar",
        ("tracking.uri must be a folder or a URI", "http, https, sqlite", "'foo://bar'"),
    ),
    ("model.path=no/such", ("model.path must be a folder with a saved model", "'no/such'", "no such folder")),
    (
        "learner/regularizer=kl learner.regularizer.reference=no/such",
        ("learner.regularizer.reference must be a folder with a saved model", "'no/such'", "no such folder"),
    ),
    ("role=learner", ("run must be a run directory for role=learner", "got ''")),
    ("role=audit run=nowhere", ("nowhere is not a run directory",)),
    ("seed=null", ("seed must be a whole number", "'null'")),
    ("seed=", ("seed must be a whole number", "''")),
    ("resume=gone", ("resume must be the directory of a run, got 'gone'", "there is nothing")),
    ("resume=x run=y", ("resume=x names the run already", "leave run=y out")),
    ("role=replay", ("run must be a run directory for role=replay", "got ''")),
    ("role=replay run=nowhere", ("nowhere is not a run directory",)),
    ("role=replay run=x node=tree=5", ("replay.node must be tree=<number>/node=<number>", "'tree=5'")),
    ("role=replay run=x node=5/17", ("replay.node must be", "as in node=tree=5/node=17", "'5/17'")),
    ("node=tree=5/node=17", ("replay.node must be left out unless role=replay", "'tree=5/node=17'")),
    ("role=audit run=x replay.json=y", ("replay.json must be left out unless role=replay",)),
    ("node=tree=1/node=2 replay.node=tree=1/node=3", ("replay.node is given twice",)),
    ("nodes=tree=5/node=17", ("unknown setting 'nodes'", "'replay.node'")),
]


@pytest.mark.parametrize("words, parts", MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_2_or_4(
    words: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    code = run.main(words.split())
    printed = capsys.readouterr()
    assert code == (4 if "nowhere" in words else 2)
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    assert all(part in printed.err for part in parts), printed.err
    assert list(elsewhere.iterdir()) == []


def test_a_mistake_in_a_process_of_its_own_has_no_traceback_either(elsewhere: Path) -> None:
    done = python("learner.steps=x", cwd=elsewhere)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: learner.steps must be a whole number, got 'x'\n"


def test_a_typo_in_a_config_file_names_the_file_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/experiment/mine.yaml").write_text("# @package _global_\nlearner:\n  stepz: 3\n")
    monkeypatch.setattr(run, "CONFIGS", tmp_path / "configs")
    assert run.main(["experiment=mine"]) == 2
    error = one_sentence(capsys)
    assert "experiment/mine" in error and "stepz" in error


def test_a_model_that_is_not_there_starts_nothing_and_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "half").mkdir()
    (elsewhere / "half/config.json").write_text("{}")
    assert run.main(["model.path=half", "experiment=smoke"]) == 2
    error = one_sentence(capsys)
    assert "model.path" in error and "lacks model.safetensors, tokenizer.json" in error
    assert [path.name for path in elsewhere.iterdir()] == ["half"]


def test_a_place_for_runs_that_is_a_file_is_named(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "taken").write_text("")
    assert run.main(["runs_dir=taken"]) == 4
    wanted = "cannot make the directory of runs taken: File exists; name another with runs_dir="
    assert wanted in one_sentence(capsys)
