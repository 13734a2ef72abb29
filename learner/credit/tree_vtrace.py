"""`tree_vtrace`: V-trace along each branch, a turn being one action.

    turn t of a branch:   V_t ──(ρ_t)──▶ r_t ──▶ V_{t+1} … V_T = 0      v from the leaf upwards

Continuations of an anchor are independent draws, so each of them gives its own target of what lies above: a
branch uses its own turns, and nothing of its siblings. There is one term a continuation, with the weight
fixed at its grant; where a lease ended at a horizon, each heir's branch carries the recursion on into the
lease's turns, and the shares 1 / m of the heirs' weights make the mean over them. Averaging v over the
children that came about would bring their number back in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.config_learner import CreditConfig
from common.nouns import Continuation, Node, Tree
from learner.credit.base import BranchCredit, Evidence, branch_turns, owners_of, turn_baselines

MAX_LOG_RATIO = 20.0
"""Log-ratios of a turn are clamped to ± this before exp: far beyond any cap, and finite."""


@dataclass(frozen=True, slots=True)
class VTrace:
    """Of one chain, `[T]` each."""

    targets: tuple[float, ...]
    """v_t."""
    advantages: tuple[float, ...]
    """min(ρ̄, ρ_t) (r_t + v_{t+1} − V_t)."""


def vtrace(
    rewards: Sequence[float],
    values: Sequence[float],
    log_ratios: Sequence[float],
    rho_bar: float,
    c_bar: float,
) -> VTrace:
    """V-trace targets and policy-gradient advantages of a chain that ends after its last step, γ = λ = 1.

    See "IMPALA" (arXiv 1802.01561, §4.1, eq. 1 and remark 1; §4.2 for the advantage):
    δ_t = ρ_t (r_t + V_{t+1} − V_t), v_t = V_t + δ_t + c_t (v_{t+1} − V_{t+1}), with ρ_t = min(ρ̄, π / μ),
    c_t = min(c̄, π / μ) and V_T = v_T = 0. ρ̄ = c̄ = 1 as there and in torchbeast.

    Args:
        rewards: r_t, `[T]`.
        values: V_t of the state before step t, `[T]`.
        log_ratios: log π / μ of step t, `[T]`.
        rho_bar, c_bar: ρ̄ and c̄.
    """
    targets, advantages = [0.0] * len(rewards), [0.0] * len(rewards)
    v_next = value_next = 0.0
    for t in reversed(range(len(rewards))):
        ratio = math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_ratios[t])))
        rho, c = min(rho_bar, ratio), min(c_bar, ratio)
        advantages[t] = rho * (rewards[t] + v_next - values[t])
        delta = rho * (rewards[t] + value_next - values[t])
        targets[t] = values[t] + delta + c * (v_next - value_next)
        v_next, value_next = targets[t], values[t]
    return VTrace(tuple(targets), tuple(advantages))


def tree_vtrace(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """V-trace of every branch from the prompt to its leaf, weight as granted.

    ρ_t = π_current / μ of turn t is the product over its tokens: the turn is the action, and a mean of ratios
    would be another estimator. V is what was predicted when the turn's continuation was granted, or when the
    node before was made (`credit.critic=grant`), or a value head's word on that prefix (`head`). Predictions
    at a grant speak of a continuation's whole return, so that what its earlier turns earned is subtracted;
    the head speaks of what is still to come. An outcome that is not the sum of its turns' rewards (a stopped
    path, a pseudo-reward) pays the difference with the last turn.

    On policy with ρ̄, c̄ ≥ 1 the recursion telescopes, and every advantage is `granted`'s (with the head: the
    rewards still to come less its value). It corrects a turn and what follows; how often the allocator or an
    older policy led to its prefix is not corrected, as in IMPALA.

    The ratios are in the advantage: it is paid by the loss `reinforce`, and a behaviour weight would correct
    twice (`common.config_learner.CREDIT_DEMANDS`).

    Raises:
        ValueError: the log-ratio of a sampled turn, or a value that the head owes, is missing.
    """
    baselines = turn_baselines(tree)
    credits = []
    for continuation in tree.leaves():
        turns = branch_turns(tree, continuation)
        rewards, earned = _rewards(turns, continuation)
        if settings.critic == "head":
            values = [evidence.value(node.parent) for node in turns]
        else:
            values = [baselines[node.index] - sum_ for node, sum_ in zip(turns, earned, strict=True)]
        ratios = [evidence.log_ratio(node) for node in turns]
        found = vtrace(rewards, values, ratios, settings.rho_bar, settings.c_bar)
        credits.append(
            BranchCredit(continuation, turns, found.advantages, continuation.weight, found.targets)
        )
    return credits


def _rewards(turns: Sequence[Node], continuation: Continuation) -> tuple[list[float], list[float]]:
    """r_t of each turn of a branch, and what its own continuation had earned on this branch before it."""
    rewards = [node.turn.reward for node in turns]
    earned, sums = list[float](), dict[int, float]()
    for node in turns:
        earned.append(sums.get(node.lease, 0.0))
        sums[node.lease] = earned[-1] + node.turn.reward
    outcome = continuation.outcome
    if turns and outcome is not None:
        last = turns[-1]
        own = last.lease == continuation.number
        rewards[-1] += outcome.reward - (sums[last.lease] if own else 0.0)
    return rewards, earned


@dataclass(frozen=True, slots=True)
class ValueTerm:
    """One term of a value head's loss: what should have been said of a prefix."""

    node: int
    """Whose prefix, its observation included."""
    turn: int
    """The node that was sampled next."""
    target: float
    weight: float


def value_terms(tree: Tree, credits: Sequence[BranchCredit]) -> list[ValueTerm]:
    """What a critic learns from a tree: one term a continuation and turn that it sampled, never one for each
    branch that passes, with the weight as granted; none of a demonstration, which says what others' turns are
    worth there.

    Args:
        tree: as finished.
        credits: with targets.
    """
    return [
        ValueTerm(node.parent, node.index, target, credit.weight)
        for credit in credits
        for owners in (owners_of(tree, credit.continuation),)
        for node, target in zip(credit.turns, credit.targets, strict=True)
        if node.lease in owners and node.turn.logprobs
    ]
