"""The configuration schema: plain dataclasses, validated once. Only `run.py` knows Hydra.

A misspelt key or a wrong type fails at composition; the rules below fail in `__post_init__` with the key,
the rule and the value. `validate` adds what spans several sections. Each raises `ConfigError` (exit 2).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from common.config_allocator import (
    BUDGETS,
    PREDICTORS,
    RULES,
    AllocatorConfig,
    check_allocator,
)
from common.config_backend import BACKENDS, check_backend
from common.config_learner import (
    LOSS_WEIGHTS,
    LearnerConfig,
    WarmstartConfig,
    check_credit,
    check_loss_and_weight,
)
from common.errors import nearest, require

NODE = re.compile(r"tree=([0-9]{1,18})/node=([0-9]{1,18})")
"""How a node is written, as `common.nouns.NodeId` renders it."""


class Role(enum.Enum):
    LOCAL = "local"
    ALLOCATOR = "allocator"
    ACTOR = "actor"
    LEARNER = "learner"
    WARMSTART = "warmstart"
    EVAL = "eval"
    AUDIT = "audit"
    REPLAY = "replay"
    TRACKER = "tracker"


class SecurityMode(enum.Enum):
    NONE = "none"
    CURVE = "curve"


@dataclass(kw_only=True, slots=True)
class SecurityConfig:
    """CURVE has its door here and is refused until it exists."""

    mode: SecurityMode = SecurityMode.NONE
    allow_insecure_bind: bool = False
    """Allow binding outside loopback without keys (prints a banner at each start)."""

    def __post_init__(self) -> None:
        require(
            self.mode is SecurityMode.NONE,
            "security.mode",
            "none (curve is not available yet)",
            self.mode.value,
        )


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    allocator: str = "tcp://127.0.0.1:5555"
    weights: str = "tcp://127.0.0.1:5556"
    hints: str = "tcp://127.0.0.1:5557"
    tracker: str = "tcp://127.0.0.1:5558"
    actors: int = 2
    """Actors that role=local starts."""
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    connect_timeout_s: float = 120.0
    """How long a role waits for its peers before it gives up with exit 6."""
    max_restarts: int = 5
    """Times role=local restarts one actor, the allocator or the learner, before it stops the run."""

    def __post_init__(self) -> None:
        for name in ("allocator", "weights", "hints", "tracker"):
            value = getattr(self, name)
            require(
                value.startswith(("tcp://", "ipc://")),
                f"cluster.{name}",
                "a tcp:// or ipc:// endpoint",
                value,
            )
        require(self.actors >= 1, "cluster.actors", "at least 1", self.actors)
        require(self.heartbeat_s > 0, "cluster.heartbeat_s", "positive seconds", self.heartbeat_s)
        require(
            self.dead_after_s > 2 * self.heartbeat_s,
            "cluster.dead_after_s",
            "more than two heartbeats (cluster.heartbeat_s)",
            self.dead_after_s,
        )
        require(
            self.connect_timeout_s > 0,
            "cluster.connect_timeout_s",
            "positive seconds",
            self.connect_timeout_s,
        )
        require(self.max_restarts >= 0, "cluster.max_restarts", "0 or more", self.max_restarts)


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    name: str = "frozenlake"
    size: int = 4
    """Cells along one side of the map."""
    hole_probability: float = 0.3
    is_slippery: bool = False
    max_turns: int = 12
    """Turns after which an episode is truncated (not terminated)."""
    faults: float = 0.0
    """Share of steps at which the environment raises, to test what is done about it."""

    def __post_init__(self) -> None:
        require(3 <= self.size <= 10, "env.size", "between 3 and 10", self.size)
        require(
            0 <= self.hole_probability <= 0.6, "env.hole_probability", "in [0, 0.6]", self.hole_probability
        )
        require(self.max_turns >= 1, "env.max_turns", "at least 1", self.max_turns)
        require(0 <= self.faults < 1, "env.faults", "in [0, 1)", self.faults)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The embedded default model, a Llama-style transformer; `path` starts from a saved one instead."""

    path: str = ""
    """A directory with config.json, model.safetensors and tokenizer.json; empty = the run's warm start."""
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    intermediate_size: int = 384
    max_context: int = 256

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "intermediate_size", "max_context"):
            require(getattr(self, name) >= 1, f"model.{name}", "at least 1", getattr(self, name))
        require(
            self.hidden_size % (2 * self.heads) == 0,
            "model.hidden_size",
            f"divisible by twice model.heads ({self.heads})",
            self.hidden_size,
        )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    name: str = "torch"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 4
    """Most tokens of one action."""
    max_batch: int = 64
    """Sequences decoded together, and continuations an actor runs at once."""
    prefetch: int = 16
    """Leases an actor holds beyond the running ones."""
    features: int = 0
    """Width of the projected hidden state reported for a prefix; 0 = none. The `shared` predictor
    reads it (`allocator/predictor=shared`)."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.temperature) and self.temperature > 0,
            "engine.temperature",
            "above 0 in training (the learner cannot recompute the distribution of a greedy choice)",
            self.temperature,
        )
        require(
            self.top_p == 1.0,
            "engine.top_p",
            "1 (the learner cannot recompute a truncated distribution)",
            self.top_p,
        )
        require(
            self.top_k == 0,
            "engine.top_k",
            "0 (the learner cannot recompute a truncated distribution)",
            self.top_k,
        )
        require(self.max_new_tokens >= 1, "engine.max_new_tokens", "at least 1", self.max_new_tokens)
        require(self.max_batch >= 1, "engine.max_batch", "at least 1", self.max_batch)
        require(self.prefetch >= 0, "engine.prefetch", "0 or more", self.prefetch)
        require(0 <= self.features <= 4096, "engine.features", "between 0 and 4096", self.features)


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    tasks: int = 200
    """Held-out tasks."""
    split: str = "eval"
    checkpoint: str = ""
    """A checkpoint or warm-start directory; empty = the newest of the run."""
    name: str = ""
    """Name of the result in the run's `eval/`; empty = one made from the checkpoint's."""

    def __post_init__(self) -> None:
        require(self.tasks >= 1, "eval.tasks", "at least 1", self.tasks)


@dataclass(kw_only=True, slots=True)
class AuditConfig:
    actor_dirs: list[str] = field(default_factory=list)
    """Directories of actors that kept their journal elsewhere than in the run directory."""


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    node: str = ""
    """A node of a finished tree, as in `tree=5/node=17`: why was its anchor chosen? `node=` for short."""
    json: str = ""
    """A file that gets what is printed as JSON; empty = none."""

    def __post_init__(self) -> None:
        rule = "tree=<number>/node=<number>, as in node=tree=5/node=17"
        require(not self.node or self.wanted() is not None, "replay.node", rule, self.node)

    def wanted(self) -> tuple[int, int] | None:
        """(tree, node) to be explained."""
        found = NODE.fullmatch(self.node)
        return (int(found[1]), int(found[2])) if found else None


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    name: str = ""
    """Stable name of this actor; empty = one made from host and process."""
    dir: str = ""
    """Where it keeps its journal and weights; empty = ./actor-<name> in the current directory."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    enabled: bool = True
    uri: str = ""
    """MLflow tracking URI; empty = sqlite:///<runs_dir>/mlflow.db."""
    experiment: str = "treeward"

    def __post_init__(self) -> None:
        scheme, colon, _ = self.uri.partition("://")
        known = not colon or scheme.partition("+")[0] in TRACKING_SCHEMES
        rule = f"a folder or a URI that starts with one of {', '.join(TRACKING_SCHEMES)}"
        require(known, "tracking.uri", rule, self.uri)


@dataclass(kw_only=True, slots=True)
class Config:
    role: Role = Role.LOCAL
    run: str = ""
    """Run directory; empty = a new one under runs_dir (role=local and warmstart only)."""
    resume: str = ""
    """role=local: run directory to go on with, where it was interrupted or with more learner.steps."""
    runs_dir: str = "runs"
    seed: int = 0
    deterministic: bool = False
    """Bit-for-bit reproducible: one sequence at a time, one thread, canonical order. Needs K = D = 0."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < (1 << 62), "seed", "in [0, 2^62)", self.seed)


CREDITS = ("granted", "grpo", "dr_grpo", "rloo", "edge", "tree_vtrace")
GROUP_FILTERS = ("none", "mixed")
LOSSES = tuple(LOSS_WEIGHTS)
BEHAVIOUR_WEIGHTS = ("none", "tis", "icepop", "decoupled")
ENGINES = ("torch",)
ENVIRONMENTS = ("frozenlake",)
SPLITS: dict[str, tuple[str, ...]] = {"frozenlake": ("train", "eval")}
"""Sets of tasks that each environment has; named here so that a wrong one is found before it is built."""
HELD_OUT = "eval"
"""The split that no training task comes from."""
TRACKING_SCHEMES = (
    "http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc",
)  # fmt: skip
"""Where MLflow can record; a driver may be named too, as in mysql+pymysql://. A plain path is a folder."""


def validate(config: Config) -> None:
    """Rules across sections. Raises `ConfigError` naming the keys and the remedy."""
    for key, value, valid in (
        ("env.name", config.env.name, ENVIRONMENTS),
        ("engine.name", config.engine.name, ENGINES),
        ("allocator.rule.name", config.allocator.rule.name, RULES),
        ("allocator.budget.name", config.allocator.budget.name, BUDGETS),
        ("allocator.predictor.name", config.allocator.predictor.name, PREDICTORS),
        ("learner.backend.name", config.learner.backend.name, BACKENDS),
        ("learner.credit.name", config.learner.credit.name, CREDITS),
        ("learner.filter.name", config.learner.filter.name, GROUP_FILTERS),
        ("learner.loss.name", config.learner.loss.name, LOSSES),
        ("learner.weight.name", config.learner.weight.name, BEHAVIOUR_WEIGHTS),
    ):
        require(value in valid, key, f"one of {', '.join(valid)}{nearest(value, valid)}", value)
    splits, split = SPLITS[config.env.name], config.eval.split
    require(split in splits, "eval.split", f"one of {', '.join(splits)}{nearest(split, splits)}", split)
    for key, text in (("replay.node", config.replay.node), ("replay.json", config.replay.json)):
        require(not text or config.role is Role.REPLAY, key, "left out unless role=replay", text)
    whole = "left out unless role=local (a single role takes run=, and goes on by itself)"
    require(not config.resume or config.role is Role.LOCAL, "resume", whole, config.resume)
    if config.deterministic:
        lag, staleness = config.learner.max_policy_lag, config.allocator.max_score_staleness
        require(lag == 0, "learner.max_policy_lag", "0 when deterministic=true", lag)
        require(staleness == 0, "allocator.max_score_staleness", "0 when deterministic=true", staleness)
    parts, trees = config.learner.loss.minibatches, config.learner.batch_trees
    require(parts <= trees, "learner.loss.minibatches", f"at most learner.batch_trees ({trees})", parts)
    check_loss_and_weight(config.learner.loss, config.learner.weight)
    check_credit(config.learner.credit, config.learner.loss.name, config.learner.weight.name)
    check_allocator(config.allocator, config.learner.batch_trees)
    check_backend(
        config.learner.backend, config.learner.lora, deterministic=config.deterministic,
        trains=config.role in (Role.LOCAL, Role.LEARNER),
    )  # fmt: skip


def to_plain(config: Any) -> Any:
    """The configuration as JSON-ready dicts, enums by value."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, enum.Enum):
        return config.value
    if isinstance(config, (list, tuple)):
        return [to_plain(item) for item in config]
    return config


def agreed_settings(config: Config) -> dict[str, str]:
    """Flat settings that allocator, actors and learner must share, compared at `Hello` key by key."""
    agreed: dict[str, str] = {"deterministic": json.dumps(config.deterministic)}
    for section in ("env", "engine"):
        for key, value in to_plain(getattr(config, section)).items():
            if (section, key) not in LOCAL_CHOICES:
                agreed[f"{section}.{key}"] = json.dumps(value)
    return agreed


LOCAL_CHOICES = {("engine", "max_batch"), ("engine", "prefetch"), ("env", "faults")}
"""Settings of the agreed sections that each actor may choose for itself."""


def config_hash(config: Config) -> str:
    """SHA-256 of the agreed settings, the same in every process."""
    return hashlib.sha256(json.dumps(agreed_settings(config), sort_keys=True).encode()).hexdigest()
