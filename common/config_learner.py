"""The learner's part of the configuration schema, with the warm start's. See `common.config`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from common.errors import require


class NodeWeight(enum.Enum):
    """What a token shared by several branches is worth."""

    GRANTED = "granted"
    """The weight of the continuation that sampled it."""
    LEAF_SHARE = "leaf_share"
    """The sum over the leaves below it, as repeating prefixes does."""
    ONCE = "once"
    """One, however many leaves share it: the mean over them."""


@dataclass(kw_only=True, slots=True)
class CreditConfig:
    """What each token is paid: `granted` (return − baseline at grant) or `grpo` (group z-score)."""

    name: str = "granted"
    epsilon: float = 1e-6
    """`grpo`: added to the group's standard deviation."""

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "learner.credit.epsilon", "positive", self.epsilon)


@dataclass(kw_only=True, slots=True)
class LossConfig:
    name: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    epochs: int = 1
    """Passes over a batch."""
    minibatches: int = 4
    """Optimiser steps in one pass."""

    def __post_init__(self) -> None:
        require(0 < self.clip_low < 1, "learner.loss.clip_low", "in (0, 1)", self.clip_low)
        require(self.clip_high > 0, "learner.loss.clip_high", "positive", self.clip_high)
        require(self.epochs >= 1, "learner.loss.epochs", "at least 1", self.epochs)
        require(self.minibatches >= 1, "learner.loss.minibatches", "at least 1", self.minibatches)


@dataclass(kw_only=True, slots=True)
class WeightConfig:
    """Behaviour weight: `none`, `tis` (ratio cut at `cap`), `decoupled` (proximal ratio, weight masked)."""

    name: str = "none"
    cap: float = 2.0

    def __post_init__(self) -> None:
        require(self.cap > 0, "learner.weight.cap", "positive", self.cap)


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
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    keep_versions: int = 4
    """Versions of the weights that stay served, beside K + 1."""
    shuffle_rewards: bool = False
    """Control: permute the outcomes within a batch, so that nothing can be learnt from them."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weight: WeightConfig = field(default_factory=WeightConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

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
