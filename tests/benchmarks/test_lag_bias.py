"""The enumeration of bias against lag: exact where it must be, and it sees a bias where there is one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from benchmarks import lag_bias, tabular
from benchmarks.lag_bias import (
    LOSS_SETTINGS,
    WEIGHT_SETTINGS,
    ascent,
    check,
    compare,
    corrected,
    granted,
    make_world,
    measure,
    traced,
)
from benchmarks.lag_tables import rows
from benchmarks.results import BenchmarkFailed, begin, finish
from benchmarks.tables import render
from common.config_learner import LossConfig
from learner.loss import LOSSES

SMALL = make_world(actions=3, turns=2, tokens=2)
PATH = ascent(SMALL, 4, 4.0)
MU, PI = PATH[0], PATH[-1]
REINFORCE, NO_WEIGHT = LossConfig(name="reinforce"), WEIGHT_SETTINGS["none"]


def as_tabular(logits: torch.Tensor) -> tuple[tabular.World, dict[tuple[int, ...], int]]:
    """The same problem as `benchmarks.tabular` writes it, and the row of each prefix."""
    places, rewards = {}, {}
    for prefixes, actions, reward in zip(SMALL.prefixes, SMALL.actions, SMALL.rewards, strict=True):
        path = tuple(actions.tolist())
        places.update({path[:at]: int(place) for at, place in enumerate(prefixes)})
        rewards[path] = float(reward)
    chances = torch.softmax(logits, -1).tolist()
    return tabular.World({path: tuple(chances[at]) for path, at in places.items()}, rewards), places


def test_value_and_gradient_equal_the_recursion_of_the_tabular_world() -> None:
    world, places = as_tabular(PI)
    assert float(SMALL.value(PI)) == pytest.approx(world.value(()))
    expected = torch.zeros_like(PI)
    for path, at in places.items():
        reached = math.prod(world.policy[path[:length]][path[length]] for length in range(len(path)))
        expected[at] = reached * torch.tensor(world.gradient(path), dtype=PI.dtype)
    torch.testing.assert_close(SMALL.gradient(PI), expected)
    values = SMALL.turn_values(PI)
    for trajectory, actions in enumerate(SMALL.actions.tolist()):
        by_recursion = [world.value(tuple(actions[:at])) for at in (0, 2)]
        assert values[trajectory].tolist() == pytest.approx(by_recursion)


def test_the_policies_are_different_and_get_better() -> None:
    values = [float(SMALL.value(policy)) for policy in PATH]
    assert values == sorted(values) and values[-1] > values[0] + 0.02


@pytest.mark.parametrize("loss", LOSS_SETTINGS, ids=lambda loss: loss.name)
@pytest.mark.parametrize("weight", WEIGHT_SETTINGS)
def test_at_lag_0_no_pair_has_a_bias(loss: LossConfig, weight: str) -> None:
    settings = WEIGHT_SETTINGS[weight]
    if settings.name in LOSSES[loss.name].weights:
        found = granted(SMALL, PI, 0).expected(PI, loss, settings)
        assert compare(found, SMALL.gradient(PI), SMALL.local_gradient(PI, PI))["error"] < lag_bias.NONE


def test_at_lag_0_the_local_gradient_is_the_gradient() -> None:
    torch.testing.assert_close(SMALL.local_gradient(PI, PI), SMALL.gradient(PI))


def test_the_ratio_of_the_trajectory_is_exact_at_any_lag_and_untruncated_v_trace_locally() -> None:
    true, local = SMALL.gradient(PI), SMALL.local_gradient(MU, PI)
    exact = corrected(granted(SMALL, MU, 4), PI).expected(PI, REINFORCE, NO_WEIGHT)
    assert compare(exact, true, local)["error"] < lag_bias.NONE < compare(exact, true, local)["local_error"]
    trace = traced(SMALL, MU, PI, 4, bound=math.inf).expected(PI, REINFORCE, NO_WEIGHT)
    assert compare(trace, true, local)["local_error"] < lag_bias.NONE < compare(trace, true, local)["error"]


def test_a_planted_mistake_is_seen() -> None:
    """Data taken for two updates younger than they are, and a baseline that knows the outcome."""
    stale = granted(SMALL, PATH[2], 0)
    found = compare(
        stale.expected(PI, REINFORCE, NO_WEIGHT), SMALL.gradient(PI), SMALL.local_gradient(PATH[2], PI)
    )
    run = {"loss": "reinforce", "weight": "none", "credit": "granted", "lag": 0, **found}
    with pytest.raises(BenchmarkFailed, match="the measurement is wrong, error must be 0 here"):
        check([run])
    fresh = granted(SMALL, PI, 0)
    leaking = dataclasses.replace(fresh, advantages=fresh.advantages - 0.5 * SMALL.rewards[:, None])
    found = compare(leaking.expected(PI, REINFORCE, NO_WEIGHT), SMALL.gradient(PI), SMALL.gradient(PI))
    assert found["error"] > 0.1


def test_every_sound_pair_and_v_trace_is_measured_at_every_lag() -> None:
    runs = list(measure(SMALL, PATH, (0, 4)))
    check(runs)
    names = {(run["loss"], run["weight"]) for run in runs if run["credit"] == "granted"}
    assert names == {
        (name, label)
        for name, loss in LOSSES.items()
        for label, weight in WEIGHT_SETTINGS.items()
        if weight.name in loss.weights
    }
    assert {run["credit"] for run in runs} == {"granted", "tree_vtrace", "untruncated", "product"}
    stale = [float(str(run["error"])) for run in runs if run["lag"] == 4 and run["credit"] != "product"]
    assert min(stale) > 0.01


def test_losses_that_do_not_differ_share_a_row_of_the_table(tmp_path: Path) -> None:
    runs = list(measure(SMALL, PATH, (0, 4)))
    shared = next(row for row in rows(runs, "error") if row[1] == "tis")
    assert shared[0] == "ppo, cispo, gspo, reinforce" and shared[2] == "0.000 (1.00)"
    page = "<!-- lag_bias -->\nold\n<!-- /lag_bias -->\n"
    moved = lag_bias.distances(SMALL, PATH, (0, 4))
    finish(begin("lag_bias", []), {"none_lag4": 0.1}, runs, tmp_path, distances=moved)
    others = "".join(f"<!-- {name} -->\n\n<!-- /{name} -->\n" for name in lag_bias.tables.TABLES)
    text = render(others.replace("<!-- lag_bias -->\n\n<!-- /lag_bias -->\n", page), tmp_path)
    assert "| control: ratio of the trajectory | none | 0.000 (1.00) | 0.000 (1.00) |" in text
