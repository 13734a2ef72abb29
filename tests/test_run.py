"""The door: what a person may type, and what each mistake is answered with."""

import copy
import functools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import run
from common import cli
from common.config import Config, Role
from common.errors import PeerLost
from common.journal import JournalWriter
from common.rundir import RunDir

ROOT = Path(run.__file__).resolve().parent


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal choices compose to equal configurations: Hydra's work is done once for each."""
    monkeypatch.setattr(
        run, "_compose_groups", lambda choices: copy.deepcopy(composed(run.CONFIGS, *choices.items()))
    )


@functools.cache
def composed(configs: Path, *choices: tuple[str, str]) -> Config:
    return COMPOSE_GROUPS(dict(choices))


COMPOSE_GROUPS = run._compose_groups


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty directory, so that one sees what is left there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Configurations that got as far as starting a role; none is started."""
    seen: list[object] = []
    monkeypatch.setattr(run, "start", lambda config: seen.append(config) or 0)
    return seen


def compose(*words: str):  # type: ignore[no-untyped-def]
    return run.compose(cli.parse(words, cli.groups(run.CONFIGS)))


# ------------------------------------------------------------------------------------- mistakes

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


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_typo_in_a_config_file_names_the_file_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(run.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/experiment/mine.yaml").write_text("# @package _global_\nlearner:\n  stepz: 3\n")
    monkeypatch.setattr(run, "CONFIGS", tmp_path / "configs")
    assert run.main(["experiment=mine"]) == 2
    error = capsys.readouterr().err
    assert "experiment/mine" in error and "stepz" in error and error.count("\n") == 1


# ------------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize("words", [["role=actor"], ["--role", "actor"], ["--role=actor"]])
def test_a_role_is_chosen_in_three_ways(words: list[str], started: list[object]) -> None:
    assert run.main(words) == 0
    assert [config.role for config in started] == [Role.ACTOR]  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", Role)
def test_every_role_has_an_option_in_the_group(role: Role, started: list[object]) -> None:
    assert run.main([f"role={role.value}"]) == 0
    assert started[0].role is role  # type: ignore[attr-defined]


def test_values_are_read_as_their_settings_say() -> None:
    config = compose(
        "actor.name=007", "run='a b=c'", "learner.optimizer.lr=1", "learner.optimizer.beta1=1e-3",
        "deterministic=False", "learner.node_weight=ONCE", "audit.actor_dirs=[a,'b c']", "tracking.uri=http://h:1/?x=1",
    )  # fmt: skip
    assert config.actor.name == "007" and config.run == "a b=c" and config.tracking.uri == "http://h:1/?x=1"
    assert config.learner.optimizer.lr == 1.0 and config.learner.optimizer.beta1 == 1e-3
    assert config.deterministic is False and config.learner.node_weight.value == "once"
    assert config.audit.actor_dirs == ["a", "b c"]


@pytest.mark.parametrize(
    "word", ["node=tree=5/node=17", "replay.node=tree=5/node=17", "node='tree=5/node=17'"]
)
def test_a_node_is_named_as_logs_and_mlflow_name_it(word: str) -> None:
    config = compose("role=replay", "run=x", word)
    assert config.replay.node == "tree=5/node=17" and config.replay.wanted() == (5, 17)


def test_a_setting_may_be_repeated_with_the_same_value() -> None:
    assert compose("seed=1", "model=tiny", "seed=1", "model=tiny").seed == 1


def test_programs_that_lay_settings_over_others_keep_the_last() -> None:
    words = ["learner.steps=20", "seed=1", "learner.steps=7", "experiment=smoke"]
    assert cli.latest(words) == ["learner.steps=7", "seed=1", "experiment=smoke"]


@pytest.mark.parametrize(
    "uri",
    ["", "./mlruns", "/a/b", "http://h:5000", "https://u:p@h", "sqlite:///x.db", "mysql+pymysql://h/db"],
)
def test_places_where_mlflow_can_record_are_taken(uri: str) -> None:
    assert compose(f"tracking.uri={uri}").tracking.uri == uri


def test_the_command_line_wins_over_the_experiment() -> None:
    assert compose("experiment=smoke", "learner.steps=9").learner.steps == 9
    assert compose("experiment=smoke", "model=small").model.hidden_size == 128


def test_composing_leaves_nothing_in_the_directory(elsewhere: Path) -> None:
    before = os.getcwd()
    assert run.main(["--cfg", "job"]) == 0
    assert os.getcwd() == before and list(elsewhere.iterdir()) == []


# -------------------------------------------------------------------------------------- recorded runs


def recorded(path: Path, *words: str) -> str:
    """A run directory with the settings of these words; returns the word that names it."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(run.to_yaml(compose(*words)))
    return f"run={path}"


def test_a_run_that_exists_is_the_base_and_the_command_line_goes_on_top(tmp_path: Path) -> None:
    word = recorded(tmp_path / "r", "experiment=smoke", "allocator/rule=random", "allocator.rule.chains=1",
                    "allocator.rule.expansions=5", "seed=5", "learner.optimizer.lr=1e-05")  # fmt: skip
    config = compose(word, "role=learner", "env.size=5")
    assert (config.seed, config.env.size, config.role) == (5, 5, Role.LEARNER)
    assert config.learner.optimizer.lr == 1e-05 and config.learner.steps == 4
    assert config.allocator.rule.chains == 1 and config.allocator.rule.expansions == 5


def resumable(path: Path, *words: str) -> str:
    RunDir.create(path.parent, path.name).config_file.write_text(run.to_yaml(compose(*words)))
    return f"resume={path}"


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
    error = capsys.readouterr().err
    assert all(part in error for part in parts) and error.count("\n") == 1, error
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
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1, error


@pytest.mark.parametrize("role", ["local", "warmstart", "allocator", "eval", "audit", "actor"])
@pytest.mark.parametrize("text, what", [(None, "is missing"), ("", "is empty"), ("# nothing\n", "is empty")])
def test_a_run_whose_settings_are_gone_is_not_taken_for_one_with_the_defaults(
    text: str | None, what: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDir.create(tmp_path, "r")
    if text is not None:
        rundir.config_file.write_text(text)
    assert run.main([f"run={rundir.path}", f"role={role}"]) == 4
    error = capsys.readouterr().err
    assert f"r/config.yaml {what}" in error and error.count("\n") == 1, error


def test_a_run_that_never_had_an_allocator_has_nothing_to_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDir.create(tmp_path, "r")
    rundir.config_file.write_text(run.to_yaml(compose()))
    assert run.main(["role=replay", f"run={rundir.path}"]) == 4
    error = capsys.readouterr().err
    assert "allocator/journal.tw: the run has no allocator journal" in error and error.count("\n") == 1, error
    assert sorted(path.name for path in rundir.path.iterdir()) == ["config.yaml", "run.json"]


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


def test_a_model_that_is_not_there_starts_nothing_and_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "half").mkdir()
    (elsewhere / "half/config.json").write_text("{}")
    assert run.main(["model.path=half", "experiment=smoke"]) == 2
    error = capsys.readouterr().err
    assert "model.path" in error and "lacks model.safetensors, tokenizer.json" in error
    assert [path.name for path in elsewhere.iterdir()] == ["half"]


def test_a_place_for_runs_that_is_a_file_is_named(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "taken").write_text("")
    assert run.main(["runs_dir=taken"]) == 4
    error = capsys.readouterr().err
    assert "cannot make the directory of runs taken: File exists; name another with runs_dir=" in error


# ------------------------------------------------------------------------------------ help and endings


def test_help_is_quick_and_serves_a_newcomer(elsewhere: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("--help", cwd=elsewhere)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    for role in Role:
        assert f"  {role.value} " in done.stdout
    for group, options in cli.groups(run.CONFIGS).items():
        assert group == "role" or f"\n  {group}\n" in done.stdout
        for option, text in options.items():
            assert option in done.stdout and text and text in done.stdout
    assert done.stdout.count("  python run.py") >= 3
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


def test_the_composed_configuration_can_be_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["experiment=smoke", "allocator/rule=random", "learner.node_weight=once", "seed=3"]
    assert run.main([*words, "--cfg", "job"]) == 0
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(capsys.readouterr().out)
    again = compose(f"run={tmp_path / 'r'}")
    again.run = ""
    assert again == compose(*words)


def test_a_roles_error_is_its_sentence_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: object) -> int:
        raise PeerLost("the allocator has been silent for 60 s")

    monkeypatch.setattr(run, "start", fail)
    assert run.main([]) == 6
    assert capsys.readouterr().err == "error: the allocator has been silent for 60 s\n"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(config: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "start", interrupt)
    assert run.main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_early_is_no_error(elsewhere: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 141


def test_threads_are_limited_unless_the_user_says_otherwise(elsewhere: Path) -> None:
    script = "import os, run; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    environment = {**os.environ, "MKL_NUM_THREADS": "3", "PYTHONPATH": str(ROOT)}
    del environment["OMP_NUM_THREADS"]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "3"]
