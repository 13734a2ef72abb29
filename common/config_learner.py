"""The learner's part of the configuration schema, with the warm start's. See `common.config`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from common.config_backend import BackendConfig, LoraConfig
from common.errors import nearest, require


class NodeWeight(enum.Enum):
    """What a token shared by several branches is worth."""

    GRANTED = "granted"
    """The weight of the continuation that sampled it."""
    LEAF_SHARE = "leaf_share"
    """The sum over the leaves below it, as repeating prefixes does."""
    ONCE = "once"
    """One, however many leaves share it: the mean over them."""


class Packing(enum.Enum):
    """How the branches of a tree go through the model. The gradient is the same."""

    TREE = "tree"
    """A tree as one sequence in which each token is computed once; rows that share next to nothing are not
    packed."""
    ROWS = "rows"
    """Branch by branch; `deterministic=true` always does."""


NODE_VALUES = ("children", "leaves")
EDGE_WEIGHTS = ("granted", "path")
CRITICS = ("grant", "head")


@dataclass(kw_only=True, slots=True)
class CreditConfig:
    """What each token is paid: `granted` (return − baseline at grant), `grpo` (group z-score), `dr_grpo`
    (r − mean), `rloo` (leave one out), `edge` (child − siblings), `tree_vtrace` (V-trace along a branch)."""

    name: str = "granted"
    epsilon: float = 1e-6
    """`grpo`: added to the group's standard deviation."""
    tolerance: float = 1e-8
    """Groups and siblings: raw rewards that differ by no more are equal, and paid exactly 0."""
    node_value: str = "children"
    """`edge`: a node is worth the mean over its `children`, or over all `leaves` below it."""
    edge_weight: str = "granted"
    """`edge`: weight of a branch: as `granted`, or `path`, 1 / children at each fork above its leaf."""
    critic: str = "grant"
    """`tree_vtrace`: V is what was predicted at the `grant`, or a value `head`'s word."""
    critic_lr: float = 1e-3
    """Learning rate of the value head."""
    rho_bar: float = 1.0
    """`tree_vtrace`: ρ̄, cap of a turn's own ratio."""
    c_bar: float = 1.0
    """`tree_vtrace`: c̄, cap of the ratios that carry what comes later."""

    def __post_init__(self) -> None:
        require(0 < self.epsilon < math.inf, "learner.credit.epsilon", "positive", self.epsilon)
        fits = 0 <= self.tolerance < math.inf
        require(fits, "learner.credit.tolerance", "0 or more, and finite", self.tolerance)
        for name, valid in (("node_value", NODE_VALUES), ("edge_weight", EDGE_WEIGHTS), ("critic", CRITICS)):
            value = getattr(self, name)
            rule = f"one of {', '.join(valid)}{nearest(value, valid)}"
            require(value in valid, f"learner.credit.{name}", rule, value)
        require(0 < self.critic_lr < math.inf, "learner.credit.critic_lr", "positive", self.critic_lr)
        require(0 < self.rho_bar < math.inf, "learner.credit.rho_bar", "positive", self.rho_bar)
        rule = f"positive, and at most learner.credit.rho_bar ({self.rho_bar})"
        require(0 < self.c_bar <= self.rho_bar, "learner.credit.c_bar", rule, self.c_bar)
        alone = self.critic == "grant" or self.name == "tree_vtrace"
        require(alone, "learner.credit.critic", "grant unless learner.credit=tree_vtrace", self.critic)


CREDIT_DEMANDS: dict[str, tuple[str, str]] = {"tree_vtrace": ("reinforce", "none")}
"""Loss and behaviour weight of credits that carry their own ratios: with others the data would be corrected
twice, or by another ratio than the targets were."""


def check_credit(credit: CreditConfig, loss: str, weight: str) -> None:
    """Raise `ConfigError` where a credit and the two axes of off-policy correction do not go together."""
    if credit.name in CREDIT_DEMANDS:
        for key, got, needed in zip(
            ("loss", "weight"), (loss, weight), CREDIT_DEMANDS[credit.name], strict=True
        ):
            rule = f"{needed} with learner.credit={credit.name}, which carries its own ratios"
            require(got == needed, f"learner.{key}.name", rule, got)


@dataclass(kw_only=True, slots=True)
class GroupFilterConfig:
    """Which prompts of a batch give a policy gradient: `none` (all), or `mixed` (those with contrast)."""

    name: str = "none"
    tolerance: float = 1e-8
    """`mixed`: raw rewards that differ by no more are equal."""

    def __post_init__(self) -> None:
        fits = 0 <= self.tolerance < math.inf
        require(fits, "learner.filter.tolerance", "0 or more, and finite", self.tolerance)


LOSS_WEIGHTS: dict[str, tuple[str, ...]] = {
    "ppo": ("none", "tis", "icepop", "decoupled"),
    "cispo": ("none", "tis", "icepop", "decoupled"),
    "gspo": ("none", "tis", "icepop", "decoupled"),
    "reinforce": ("none", "tis", "icepop", "decoupled"),
    "topr": ("none",),
    "dppo": ("none",),
}
"""Behaviour weights that are sound beside each policy loss; the modules in `learner/loss` say why."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """The policy loss: `ppo`, `cispo`, `gspo`, `topr`, `dppo` or `reinforce`."""

    name: str = "ppo"
    clip_low: float = 0.2
    """How far the ratio may fall below 1 (`ppo`, `cispo`, `gspo`), or the probability by itself (`dppo`)."""
    clip_high: float = 0.2
    """How far it may rise."""
    dual_clip: float = 0.0
    """`ppo`: bound of the ratio where the advantage is negative, above 1; 0 = none."""
    log_ratio_penalty: float = 1e-3
    """`dppo`: coefficient of (log π / μ)²."""
    epochs: int = 1
    """Passes over a batch."""
    minibatches: int = 4
    """Optimiser steps in one pass."""

    def __post_init__(self) -> None:
        require(0 < self.clip_low <= 1, "learner.loss.clip_low", "in (0, 1]", self.clip_low)
        for name, least in (("clip_high", "positive"), ("log_ratio_penalty", "0 or more")):
            value = getattr(self, name)
            fits = math.isfinite(value) and (value > 0 or (value == 0 and least == "0 or more"))
            require(fits, f"learner.loss.{name}", f"{least}, and finite", value)
        sound = self.dual_clip == 0 or 1 < self.dual_clip < math.inf
        require(sound, "learner.loss.dual_clip", "above 1, or 0 for none", self.dual_clip)
        alone = self.dual_clip == 0 or self.name == "ppo"
        require(alone, "learner.loss.dual_clip", "0 unless learner.loss=ppo", self.dual_clip)
        require(self.epochs >= 1, "learner.loss.epochs", "at least 1", self.epochs)
        require(self.minibatches >= 1, "learner.loss.minibatches", "at least 1", self.minibatches)


class ProximalPolicy(enum.Enum):
    """Where the log-probabilities of the proximal policy come from."""

    RECOMPUTED = "recomputed"
    """A forward pass under the weights at the start of the batch."""
    INTERPOLATED = "interpolated"
    """Between the behaviour and the current policy, by version: no further pass."""


@dataclass(kw_only=True, slots=True)
class WeightConfig:
    """Behaviour weight: `none`, `tis` (proximal ratio cut at `cap`), `icepop` (0 outside `floor` and `cap`),
    `decoupled` (0 above `cap`)."""

    name: str = "none"
    cap: float = 2.0
    floor: float = 0.5
    """`icepop` only."""
    proximal: ProximalPolicy = ProximalPolicy.RECOMPUTED
    """`decoupled` only."""

    def __post_init__(self) -> None:
        require(self.cap > 0, "learner.weight.cap", "positive", self.cap)
        if self.name == "icepop":
            rule = f"0 or more, and below learner.weight.cap ({self.cap})"
            require(0 <= self.floor < self.cap, "learner.weight.floor", rule, self.floor)
        fits = self.proximal is ProximalPolicy.RECOMPUTED or self.name == "decoupled"
        rule = "recomputed unless learner.weight=decoupled"
        require(fits, "learner.weight.proximal", rule, self.proximal.value)


KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(kw_only=True, slots=True)
class RegularizerConfig:
    """Terms of the loss without an advantage; their gradients: `learner/regularizers.py`."""

    kl_coefficient: float = 0.0
    """Of the divergence from the frozen reference model; 0 = none is loaded."""
    kl_estimator: str = "k2"
    """k1, k2 or k3; only k2 has the gradient of KL(π ‖ reference)."""
    entropy_coefficient: float = 0.0
    """Of the entropy of each token's distribution, as a bonus."""
    reference: str = ""
    """Directory of the reference model; empty = the model that the run starts from."""

    def __post_init__(self) -> None:
        for name in ("kl_coefficient", "entropy_coefficient"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"learner.regularizer.{name}", "0 or more, and finite", value)
        known, valid = self.kl_estimator in KL_ESTIMATORS, ", ".join(KL_ESTIMATORS)
        rule = f"one of {valid}{nearest(self.kl_estimator, KL_ESTIMATORS)}"
        require(known, "learner.regularizer.kl_estimator", rule, self.kl_estimator)
        rule = "left out unless learner.regularizer.kl_coefficient is positive"
        used = not self.reference or self.kl_coefficient > 0
        require(used, "learner.regularizer.reference", rule, self.reference)


def check_loss_and_weight(loss: LossConfig, weight: WeightConfig) -> None:
    """Refuse a pair that would correct twice, or correct what is left uncorrected on purpose.

    Raises `ConfigError`."""
    allowed = LOSS_WEIGHTS[loss.name]
    because = "which brings its own ratio against the behaviour policy: another weight would correct twice"
    rule = f"{' or '.join(allowed)} with learner.loss={loss.name}, {because}"
    require(weight.name in allowed, "learner.weight", rule, weight.name)


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = 3e-4
    warmup_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        require(self.lr >= 0 and math.isfinite(self.lr), "learner.optimizer.lr", "0 or more", self.lr)
        require(self.warmup_steps >= 0, "learner.optimizer.warmup_steps", "0 or more", self.warmup_steps)
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1, f"learner.optimizer.{name}", "in [0, 1)", getattr(self, name)
            )
        require(self.weight_decay >= 0, "learner.optimizer.weight_decay", "0 or more", self.weight_decay)
        require(self.grad_clip > 0, "learner.optimizer.grad_clip", "positive", self.grad_clip)


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100
    """Updates of the run."""
    batch_trees: int = 20
    """Trees of one update (a wave)."""
    max_policy_lag: int = 2
    """K: tokens sampled more than K updates ago are context without gradient."""
    node_weight: NodeWeight = NodeWeight.GRANTED
    micro_batch_tokens: int = 2048
    """Most padded tokens of one forward pass."""
    packing: Packing = Packing.TREE
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    keep_versions: int = 4
    """Versions of the weights that stay served, beside K + 1."""
    shuffle_rewards: bool = False
    """Control: permute the outcomes within a batch, so that nothing can be learnt from them."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    filter: GroupFilterConfig = field(default_factory=GroupFilterConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    regularizer: RegularizerConfig = field(default_factory=RegularizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_trees", "micro_batch_tokens", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"learner.{name}", "at least 1", getattr(self, name))
        require(self.max_policy_lag >= 0, "learner.max_policy_lag", "0 or more", self.max_policy_lag)
        require(self.keep_checkpoints >= 2, "learner.keep_checkpoints", "at least 2", self.keep_checkpoints)
        require(self.keep_versions >= 1, "learner.keep_versions", "at least 1", self.keep_versions)


@dataclass(kw_only=True, slots=True)
class WarmstartConfig:
    demonstrations: int = 200
    """Expert trajectories in the fixed set."""
    noise: float = 0.4
    """Probability that the expert's action is replaced by a random one."""
    steps: int = 100
    batch: int = 32
    lr: float = 1e-3

    def __post_init__(self) -> None:
        require(self.demonstrations >= 1, "warmstart.demonstrations", "at least 1", self.demonstrations)
        require(0 <= self.noise <= 1, "warmstart.noise", "in [0, 1]", self.noise)
        require(self.steps >= 0, "warmstart.steps", "0 or more", self.steps)
        require(self.batch >= 1, "warmstart.batch", "at least 1", self.batch)
        require(self.lr > 0, "warmstart.lr", "positive", self.lr)
