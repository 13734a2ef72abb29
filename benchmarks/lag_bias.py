"""The bias of each policy loss with each behaviour weight against lag, by enumeration.

    python -m benchmarks.lag_bias

    θ_0 ─ gradient step ─▶ θ_1 ─ … ─▶ θ_16 = π          μ = θ_(16 − lag) sampled, π is trained
     all trajectories, by their probability under μ ─▶ the learner's own loss and weight ─▶ −∇ of the sum
                                                                    compared with the exact ∇ V(π)

A small tabular softmax policy: some turns of some tokens each, one row of logits for each prefix, a fixed
reward for each trajectory. π is what gradient ascent on the exact value makes of random logits; the behaviour
policy is the same some steps before. Every trajectory is one branch whose weight is its probability under μ,
so that the summed loss is the expected one. It goes through the functions that the learner calls, in double
precision. Turns are paid return − V_μ (of the prefix before the turn), as `granted` does with a predictor
that knows the policy that sampled; `tree_vtrace` has that V_μ as its critic.

The gradient is that of the first optimiser step of a batch: π is the proximal policy there. Hence losses that
take their ratio against a recomputed proximal policy do not differ: their ratio is 1.

Errors are |expected − true| / |true|, against two gradients: ∇ V(π), with the cosine between the two, and the
local one, in which prefixes are weighed as μ visits them. No sampling, hence no error bars and no seeds.
Controls: at lag 0 every pair must have both errors 0; at any lag the plain policy gradient with the
untruncated ratio of the whole trajectory (`product`, offered nowhere because of its variance) the first one,
and V-trace without truncation (`untruncated`) the second.

Shapes: J trajectories, T tokens of each, P prefixes, A actions.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import results, tables
from benchmarks.cli import guarded
from common.config_learner import LossConfig, ProximalPolicy, WeightConfig
from learner.credit.tree_vtrace import vtrace
from learner.loss import LOSSES
from learner.streams import Streams
from learner.weight import WEIGHTS

ACTIONS, TURNS, TOKENS = 3, 3, 2
"""729 trajectories of three turns of two tokens, 364 prefixes."""
SUCCESS = 0.3
"""Share of trajectories with reward 1."""
STEPS = 16
LAGS = (0, 1, 2, 4, 8, 16)
STEP_SIZE = 4.0
"""Of exact gradient ascent: the value goes from 0.30 to 0.52 in 16 steps."""
NONE = 1e-9
"""An error that is rounding."""

LOSS_SETTINGS = (
    LossConfig(name="ppo"),
    LossConfig(name="cispo", clip_low=1.0, clip_high=4.0),
    LossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4),
    LossConfig(name="reinforce"),
    LossConfig(name="topr"),
    LossConfig(name="dppo"),
)
WEIGHT_SETTINGS = {
    "none": WeightConfig(),
    "tis": WeightConfig(name="tis", cap=2.0),
    "icepop": WeightConfig(name="icepop", cap=5.0),
    "decoupled": WeightConfig(name="decoupled", cap=5.0),
    "interpolated": WeightConfig(name="decoupled", cap=5.0, proximal=ProximalPolicy.INTERPOLATED),
}
"""As offered in configs/learner; `interpolated` is `decoupled` with an interpolated proximal policy."""


# ------------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class World:
    """All trajectories of a small problem."""

    prefixes: Tensor
    """`[J, T]` the prefix before each token."""
    actions: Tensor
    """`[J, T]`"""
    rewards: Tensor
    """`[J]`"""
    logits: Tensor
    """`[P, A]` of the first policy."""
    tokens: int
    """Of one turn."""

    def logprobs(self, logits: Tensor) -> Tensor:
        """log π of each token, `[J, T]`."""
        return torch.log_softmax(logits, -1)[self.prefixes, self.actions]

    def value(self, logits: Tensor) -> Tensor:
        """Expected reward, a scalar with gradient."""
        return (self.logprobs(logits).sum(1).exp() * self.rewards).sum()

    def gradient(self, logits: Tensor) -> Tensor:
        """∇ of the expected reward by the logits, `[P, A]`."""
        variable = logits.clone().requires_grad_()
        (found,) = torch.autograd.grad(self.value(variable), variable)
        return found

    def local_gradient(self, mu: Tensor, pi: Tensor) -> Tensor:
        """∇ of each turn's expected reward by the logits of that turn, under π from its prefix on, prefixes
        weighed as μ visits them, `[P, A]`: all that can be corrected without the ratio of what came before.
        """
        variable = pi.clone().requires_grad_()
        behaviour, current = self.logprobs(mu), self.logprobs(variable)
        total = torch.zeros((), dtype=current.dtype)
        for start in range(0, current.shape[1], self.tokens):
            end = start + self.tokens
            before, after = behaviour[:, :start].sum(1), current[:, end:].sum(1).detach()
            total = total + ((before + current[:, start:end].sum(1) + after).exp() * self.rewards).sum()
        (found,) = torch.autograd.grad(total, variable)
        return found

    def turn_values(self, logits: Tensor) -> Tensor:
        """Expected reward after the prefix before each turn, `[J, turns]`."""
        logprobs = self.logprobs(logits)
        at = self.prefixes[:, :: self.tokens]
        columns = []
        for turn in range(at.shape[1]):
            rest = logprobs[:, turn * self.tokens :].sum(1).exp()
            sums = torch.zeros(len(self.logits), dtype=rest.dtype)
            columns.append(sums.index_add(0, at[:, turn], rest * self.rewards)[at[:, turn]])
        return torch.stack(columns, 1)


def make_world(actions: int = ACTIONS, turns: int = TURNS, tokens: int = TOKENS, seed: int = 0) -> World:
    """The problem, the same on every machine."""
    rng = random.Random(seed)
    trajectories = list(itertools.product(range(actions), repeat=turns * tokens))
    places: dict[tuple[int, ...], int] = {}
    for path in trajectories:
        for length in range(len(path)):
            places.setdefault(path[:length], len(places))
    rewards = [float(rng.random() < SUCCESS) for _ in trajectories]
    return World(
        prefixes=torch.tensor([[places[path[:at]] for at in range(len(path))] for path in trajectories]),
        actions=torch.tensor(trajectories),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        logits=torch.tensor(
            [[rng.gauss(0, 0.5) for _ in range(actions)] for _ in places], dtype=torch.float64
        ),
        tokens=tokens,
    )


def ascent(world: World, steps: int, size: float) -> list[Tensor]:
    """Policies along exact gradient ascent, the first one and one for each step: `[P, A]` each."""
    path = [world.logits]
    for _ in range(steps):
        path.append(path[-1] + size * world.gradient(path[-1]))
    return path


# ------------------------------------------------------------------------------------------ one gradient


@dataclass(frozen=True)
class Data:
    """What one behaviour policy samples, in expectation."""

    world: World
    behaviour: Tensor
    """`[J, T]` log μ."""
    advantages: Tensor
    """`[J, T]`"""
    lag: int

    @property
    def probabilities(self) -> Tensor:
        """`[J]` under μ."""
        return self.behaviour.sum(1).exp()

    def expected(self, logits: Tensor, loss: LossConfig, weight: WeightConfig) -> Tensor:
        """The expected step that the learner takes, −∇ of the loss by the logits, `[P, A]`."""
        variable = logits.clone().requires_grad_()
        current = self.world.logprobs(variable).flatten()
        behaviour, method = self.behaviour.flatten(), WEIGHTS[weight.name]
        lags = torch.full(current.shape, self.lag)
        proximal = method.proximal_of(current, behaviour, lags, None, weight)
        old = proximal if method.proximal else behaviour
        streams = self.streams(current, old)
        weighed = method.weigh(proximal, behaviour, streams.mask, weight).weight
        objective = (weighed * LOSSES[loss.name].function(streams, loss).loss).sum()
        (found,) = torch.autograd.grad(objective, variable)
        return -found

    def streams(self, current: Tensor, old: Tensor) -> Streams:
        """All trajectories as branches of one micro-batch; nothing is shared."""
        branches, length = self.behaviour.shape
        branch = torch.arange(branches).repeat_interleave(length)
        turns = torch.arange(branches * length) // self.world.tokens
        return Streams.of_rows(
            current, old, self.behaviour.flatten(), self.advantages.flatten(),
            self.probabilities.repeat_interleave(length), branch, turns,
        )  # fmt: skip


def granted(world: World, mu: Tensor, lag: int) -> Data:
    """Return − V_μ of the prefix before the turn, for each token of the turn."""
    paid = world.rewards[:, None] - world.turn_values(mu)
    return Data(world, world.logprobs(mu), paid.repeat_interleave(world.tokens, 1), lag)


def traced(world: World, mu: Tensor, pi: Tensor, lag: int, bound: float = 1.0) -> Data:
    """V-trace advantages with ρ̄ = c̄ = `bound`, and V_μ as the critic."""
    behaviour, values = world.logprobs(mu), world.turn_values(mu).tolist()
    moved = world.logprobs(pi) - behaviour
    ratios = moved.unflatten(1, (-1, world.tokens)).sum(2).tolist()
    paid = [
        vtrace([0.0] * (len(row) - 1) + [reward], row, log_ratios, bound, bound).advantages
        for row, reward, log_ratios in zip(values, world.rewards.tolist(), ratios, strict=True)
    ]
    advantages = torch.tensor(paid, dtype=torch.float64).repeat_interleave(world.tokens, 1)
    return Data(world, behaviour, advantages, lag)


def corrected(data: Data, pi: Tensor) -> Data:
    """Advantages times the ratio of the whole trajectory: exact, at any variance."""
    ratio = (data.world.logprobs(pi) - data.behaviour).sum(1).exp()
    return Data(data.world, data.behaviour, data.advantages * ratio[:, None], data.lag)


# ------------------------------------------------------------------------------------------- measurement


def compare(found: Tensor, true: Tensor, local: Tensor) -> dict[str, float]:
    """`error` and `cosine` against the one gradient, `local_error` against the other."""
    size = float(found.norm() * true.norm())
    return {
        "error": float((found - true).norm() / true.norm()),
        "cosine": float((found * true).sum()) / size if size else math.nan,
        "local_error": float((found - local).norm() / local.norm()),
    }


def methods(world: World, mu: Tensor, pi: Tensor, lag: int) -> Iterator[tuple[str, str, str, Tensor]]:
    """(loss, weight, credit, expected step) of everything that is measured at one lag."""
    data = granted(world, mu, lag)
    for loss in LOSS_SETTINGS:
        for name, weight in WEIGHT_SETTINGS.items():
            if weight.name in LOSSES[loss.name].weights:
                yield loss.name, name, "granted", data.expected(pi, loss, weight)
    others = {
        "tree_vtrace": traced(world, mu, pi, lag),
        "untruncated": traced(world, mu, pi, lag, bound=math.inf),
        "product": corrected(data, pi),
    }
    for credit, other in others.items():
        step = other.expected(pi, LossConfig(name="reinforce"), WEIGHT_SETTINGS["none"])
        yield "reinforce", "none", credit, step


def measure(world: World, path: Sequence[Tensor], lags: Sequence[int]) -> Iterator[dict[str, object]]:
    """One entry for each method and lag; the policy trained is the last of `path`."""
    pi = path[-1]
    true = world.gradient(pi)
    for lag in lags:
        mu = path[-1 - lag]
        local = world.local_gradient(mu, pi)
        for loss, weight, credit, found in methods(world, mu, pi, lag):
            yield {
                "loss": loss, "weight": weight, "credit": credit, "lag": lag, **compare(found, true, local)
            }  # fmt: skip


def distances(world: World, path: Sequence[Tensor], lags: Sequence[int]) -> list[dict[str, float]]:
    """How far apart the two policies are at each lag, tokens weighed as μ visits them."""
    found = []
    for lag in lags:
        behaviour, current = world.logprobs(path[-1 - lag]), world.logprobs(path[-1])
        moved, chance = current - behaviour, behaviour.sum(1).exp()
        ratio = moved.sum(1).exp()
        found.append(
            {
                "lag": lag,
                "moved": float((chance[:, None] * moved.abs()).sum()) / moved.shape[1],
                "kl": float((chance * -moved.sum(1)).sum()),
                "ess": float((chance * ratio).sum() ** 2 / (chance * ratio**2).sum()),
            }
        )
    return found


def check(runs: Sequence[dict[str, object]]) -> None:
    """The null controls. Raises `BenchmarkFailed` where a bias is seen that cannot be there."""
    for run in runs:
        exact = {"error": run["credit"] == "product", "local_error": run["credit"] == "untruncated"}
        for name, known in exact.items():
            if (run["lag"] == 0 or known) and not float(str(run[name])) < NONE:
                raise results.BenchmarkFailed(f"the measurement is wrong, {name} must be 0 here: {run}")


def error(runs: Sequence[dict[str, object]], lag: int, loss: str, weight: str, credit: str) -> float:
    wanted = {"loss": loss, "weight": weight, "credit": credit, "lag": lag}
    return float(str(next(run for run in runs if wanted.items() <= run.items())["error"]))


def main(words: list[str]) -> int:
    """Enumerate, write, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lag_bias")
    parser.add_argument("--step", type=float, default=STEP_SIZE, help="step size of the gradient ascent")
    size = parser.parse_args(words).step
    session = results.begin("lag_bias", words)
    world = make_world()
    path = ascent(world, STEPS, size)
    runs = list(measure(world, path, LAGS))
    check(runs)
    headline = {
        "none_lag4": error(runs, 4, "ppo", "none", "granted"),
        "tis_lag4": error(runs, 4, "ppo", "tis", "granted"),
        "decoupled_lag4": error(runs, 4, "ppo", "decoupled", "granted"),
        "vtrace_lag4": error(runs, 4, "reinforce", "none", "tree_vtrace"),
    }
    values = [float(world.value(policy)) for policy in (path[0], path[-1])]
    moved = distances(world, path, LAGS)
    line = results.finish(session, headline, runs, step_size=size, values=values, distances=moved)
    tables.update_if_committed(results.RESULTS)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
