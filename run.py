"""Compose the configuration, validate it, start a role: the only door, and the only file that knows Hydra.

    words ─▶ cli.parse ─▶ compose configs/ over the schema ─▶ recorded run ─▶ settings ─▶ validate ─▶ role
             (no Hydra)   (group choices)                 (run= or resume=)   (key=value)

Every mistake up to `validate` is one sentence on stderr and exit 2, before any process starts. Nothing heavy
is imported here: Hydra comes with the first composition, torch and the rest with the role that needs them.

`run=runs/x` of a run that exists takes its recorded `config.yaml` as the base; what the command line says
goes on top, a group chosen there replacing the whole section. `resume=runs/x` does so too, and role=local
goes on with the run, under settings that differ only where they may (`common.resuming`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # The threads of OpenMP busy-wait: with several processes on a few cores they starve one another.
    # Read once, when torch or numpy is imported, hence here. Whoever sets one keeps it.
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from common import cli, processes  # noqa: E402 - after the lines above
from common.config import Config, Role, validate  # noqa: E402
from common.config_allocator import (  # noqa: E402
    BUDGET_SCHEMAS,
    RULE_SCHEMAS,
    AllocatorConfig,
    BudgetConfig,
    RuleConfig,
)
from common.errors import ConfigError, StorageError, TreewardError  # noqa: E402
from common.ranks import check_ranks  # noqa: E402
from common.resuming import differences, refuse  # noqa: E402
from common.settings import NAMED_GROUPS, check, convert, set_value, settings, to_yaml, unknown_key  # noqa: E402

CONFIGS = Path(__file__).resolve().parent / "configs"
SCHEMAS: dict[str, Mapping[str, type]] = {"allocator/rule": RULE_SCHEMAS, "allocator/budget": BUDGET_SCHEMAS}
"""Groups whose options differ in what can be set, and the schema of each option (`schema_<option>`)."""

NOT_RECORDED = ("role", "run", "resume", "actor.", "audit.", "replay.", "eval.checkpoint", "eval.name")
"""Settings that belong to one process and are not taken over from a run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is the return value. Prints sentences, never a traceback, for the
    mistakes of a user."""
    try:
        processes.follow_parent()
        return run(sys.argv[1:] if argv is None else argv)
    except TreewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`run.py --help | head`): nothing is left to say to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(words: Sequence[str]) -> int:
    """Print what was asked for, or start the role. Raises `TreewardError`."""
    line = cli.parse(words, cli.groups(CONFIGS))
    if line.help:
        print(cli.help_text(CONFIGS), flush=True)
        return 0
    config = compose(line)
    if line.show:
        print(to_yaml(config), end="", flush=True)
        return 0
    return start(config)


# ------------------------------------------------------------------------------------------- composition


def compose(line: cli.CommandLine) -> Config:
    """The validated configuration of a command line.

    Raises:
        ConfigError: an unknown key, a wrong type, a value outside its bounds, or a contradiction.
    """
    recorded = _recorded(line)
    config = _compose_groups(_choices(line, recorded))
    kinds = {key: kind for key, kind, _ in settings(config)}
    for key, text in {**_kept(recorded, line), **line.values}.items():
        if key not in kinds:
            raise _no_such_setting(key, kinds, line)
        set_value(config, key, convert(key, kinds[key], text))
    check(config)
    validate(config)
    if config.resume:
        refuse(config.resume, differences(recorded, config))
        config.run = config.resume
    return config


def _compose_groups(choices: dict[str, str]) -> Config:
    """The configuration that these choices give, before any single setting is changed."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = [f"{group}={option}" for group, option in choices.items()]
    store = ConfigStore.instance()
    # These sections start as the base of all their options: a chosen one may bring any schema of its own.
    base = AllocatorConfig(rule=RuleConfig(), budget=BudgetConfig())
    store.store(name="schema", node=Config(allocator=base))
    for group, schemas in SCHEMAS.items():
        for option, schema in schemas.items():
            store.store(group=group, name=f"schema_{option}", node=schema)
    try:
        # The compose API alone: Hydra changes no directory, writes no outputs/ and sets up no logging.
        with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
            config = OmegaConf.to_object(hydra_compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the files in {CONFIGS} do not compose: {_one_line(error)}") from None
    if not isinstance(config, Config):
        raise ConfigError(f"{CONFIGS / 'config.yaml'} must list `schema` first in its defaults")
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _no_such_setting(key: str, valid: Mapping[str, Any], line: cli.CommandLine) -> ConfigError:
    section, _, last = key.rpartition(".")
    below = [name for name in valid if name.startswith(f"{key}.")]
    if below:
        return ConfigError(f"{key} is a section, not a setting: set one of its keys, such as {below[0]}=…")
    group = section.replace(".", "/")
    for option, schema in SCHEMAS.get(group, {}).items():
        if last in {item.name for item in dataclasses.fields(schema)}:
            chosen = line.choices.get(group, "another one")
            return ConfigError(f"{key} is a setting of {group}={option}, got it with {chosen}")
    return unknown_key(key, valid)


# ------------------------------------------------------------------------------------------ recorded runs


def _recorded(line: cli.CommandLine) -> dict[str, Any]:
    """Flat settings of the run named by `run=` or `resume=`, empty where there is none yet.

    Raises:
        ConfigError: they cannot be read, an experiment was asked for on top of them, or there is no run to
            resume.
        StorageError: the directory exists and holds no settings: those of `configs/` may be quite others.
    """
    folder = _named_run(line)
    if folder is None or not folder.is_dir():
        return {}
    path = folder / "config.yaml"
    settings_there = _read_yaml(path) if path.is_file() else {}
    if not settings_there:
        what = "is empty" if path.is_file() else "is missing"
        raise StorageError(
            f"{path} {what}, so the settings of this run are not known: put the file back from a copy, or "
            "give run= the directory of another run"
        )
    if "experiment" in line.choices:
        raise ConfigError(
            f"experiment={line.choices['experiment']} cannot be laid over the settings recorded in {path}: "
            "leave it out, or name a new run"
        )
    return {key: value for key, value in settings_there.items() if not key.startswith(NOT_RECORDED)}


def _named_run(line: cli.CommandLine) -> Path | None:
    run, resume = (str(convert(key, str, line.values.get(key, ""))) for key in ("run", "resume"))
    if run and resume:
        raise ConfigError(f"resume={resume} names the run already: leave run={run} out")
    if resume and not (Path(resume) / "run.json").is_file():
        what = "it has no run.json" if Path(resume).exists() else "there is nothing"
        raise ConfigError(f"resume must be the directory of a run, got {resume!r}: {what}")
    return Path(run or resume) if run or resume else None


def _read_yaml(path: Path) -> dict[str, Any]:
    """Dotted keys and scalars (or lists) of a YAML file."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped] # comes with omegaconf, without types

    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {_one_line(error)}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must hold the settings of a run, got {type(plain).__name__}")
    return dict(_flat(plain))


def _flat(plain: dict[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in plain.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
        found += inner
    return found


def _choices(line: cli.CommandLine, recorded: dict[str, Any]) -> dict[str, str]:
    """The command line's choices; below them, the options that a recorded run names."""
    if not recorded:
        return line.choices
    available = cli.groups(CONFIGS)
    named = {group: str(recorded.get(f"{group.replace('/', '.')}.name", "")) for group in NAMED_GROUPS}
    kept = {group: option for group, option in named.items() if option in available[group]}
    return {"experiment": "none", **kept, **line.choices}


def _kept(recorded: dict[str, Any], line: cli.CommandLine) -> dict[str, Any]:
    """Recorded settings outside the sections that the command line chose anew."""
    chosen = tuple(f"{group.replace('/', '.')}." for group in line.choices)
    return {key: value for key, value in recorded.items() if not key.startswith(chosen)}


# ------------------------------------------------------------------------------------------------- roles


def start(config: Config) -> int:
    """Start the role that `config` names, and return its exit code. Raises `TreewardError`."""
    if config.role in (Role.LOCAL, Role.LEARNER):
        check_machine(config)
    if config.role is Role.LOCAL:
        from common.launcher import run_local

        return run_local(config)
    if config.role is Role.ACTOR:
        from actors.main import run_actor

        return run_actor(config)
    return _start_on_run(config)


def check_machine(config: Config) -> None:
    """What a learner on this machine would refuse, before anything is started or written.

    Raises:
        ConfigError: half of a launcher's environment is set, or a GPU is insisted on that is not there.
    """
    check_ranks(config.learner.backend.processes, local=config.role is Role.LOCAL)
    if config.learner.backend.device == "cuda":  # torch is asked only where somebody insists
        from learner.device import check_device

        check_device("cuda")


def _start_on_run(config: Config) -> int:
    """Roles that work on a run directory."""
    from common.opening import before_training, open_run

    rundir = open_run(config)
    match config.role:
        case Role.ALLOCATOR:
            from allocator.main import run_allocator

            return run_allocator(config, rundir)
        case Role.LEARNER:
            from learner.main import run_learner

            return run_learner(config, rundir)
        case Role.WARMSTART:
            with before_training(rundir):
                from actors.demonstrate import write_demonstrations
                from learner.warmstart import run_warmstart_training

                write_demonstrations(config, rundir)
                return run_warmstart_training(config, rundir)
        case Role.EVAL:
            from actors.evaluate import run_eval

            return run_eval(config, rundir)
        case Role.TRACKER:
            from common.tracker import run_tracker

            return run_tracker(config, rundir)
        case Role.REPLAY:
            from allocator.replay_role import run_replay

            return run_replay(config, rundir)
        case _:
            from common.audit import run_audit

            return run_audit(config, rundir)


if __name__ == "__main__":
    sys.exit(main())
