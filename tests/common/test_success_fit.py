"""How the success model learns: against a slow search for the same minimum, and by what must not change."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgpack
import numpy as np
import pytest

from common.calibration import Platt
from common.predictor_inputs import COLUMNS, DESCRIBED, Rows
from common.success_fit import CONCENTRATION, FEATURES, PSI, Posterior, prior

Loss = Callable[[list[float]], float]


def rows(seed: int, count: int, width: int = 0, evidence: bool = True) -> Rows:
    draws = np.random.default_rng(seed)
    columns = draws.normal(0.0, 1.0, (count, COLUMNS))
    columns[:, 0] = columns[:, DESCRIBED] = 1.0
    trials = draws.integers(0, 4, count) * float(evidence)
    wins = np.floor(trials * draws.random(count))
    return Rows(columns, draws.normal(3.0, 2.0, (count, width)), wins, trials, draws.random(count))


def outcomes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed + 100).choice([0.0, 0.5, 1.0], count)


def chance(z: list[float], wave: Rows, row: int) -> float:
    logit = sum(weight * value for weight, value in zip(z[2:], wave.columns[row], strict=True))
    kappa = math.exp(z[0] + z[1] * wave.reach[row])
    return float((kappa / (1 + math.exp(-logit)) + wave.wins[row]) / (kappa + wave.trials[row]))


def literal_loss(
    wave: Rows, y: np.ndarray, weight: float, start: list[float], precision: list[list[float]]
) -> Loss:
    """Penalty for leaving the prior, and surprise at each outcome: written out term by term."""
    size = range(len(start))

    def loss(z: list[float]) -> float:
        total = sum((z[i] - start[i]) * precision[i][j] * (z[j] - start[j]) for i in size for j in size) / 2
        for row, outcome in enumerate(y):
            p = chance(z, wave, row)
            total -= weight * (outcome * math.log(p) + (1 - outcome) * math.log(1 - p))
        return total

    return loss


def slope(loss: Loss, z: list[float], i: int, step: float = 1e-5) -> float:
    up, down = [*z], [*z]
    up[i] += step
    down[i] -= step
    return (loss(up) - loss(down)) / (2 * step)


def descend(loss: Loss, z: list[float], steepness: list[float]) -> list[float]:
    """Small steps downhill, however many it takes."""
    for _ in range(400):
        down = [slope(loss, z, i) for i in range(len(z))]
        z = [value - 0.5 * s / steep for value, s, steep in zip(z, down, steepness, strict=True)]
        if max(map(abs, down)) < 1e-7:
            break
    return z


def test_a_wave_leads_to_the_minimum_that_a_slow_search_finds() -> None:
    wave, y, weight = rows(1, 7), outcomes(1, 7), 0.4
    posterior = Posterior(0.9, 1.0)
    posterior.learn(rows(0, 5), outcomes(0, 5), 0.5)  # so that the prior of the wave is no diagonal
    posterior.forget()
    start, precision = posterior.mean.tolist(), posterior.precision.tolist()
    posterior.learn(wave, y, weight)
    loss = literal_loss(wave, y, weight, start, precision)
    steepness = [precision[i][i] + 1.0 for i in range(len(start))]
    found = descend(loss, start, steepness)
    assert posterior.mean.tolist() == pytest.approx(found, abs=1e-5)

    curvature = np.array(precision)
    for row in range(len(y)):
        p = chance(found, wave, row)
        by = np.array([slope(lambda z, r=row: chance(z, wave, r), found, i) for i in range(len(found))])
        curvature += weight * np.outer(by, by) / (p * (1 - p))
    assert posterior.precision == pytest.approx(curvature, abs=1e-4)


def test_before_there_is_evidence_the_prior_is_as_documented() -> None:
    mean, precision = prior(16, 2.0)
    assert mean.tolist() == [CONCENTRATION] + [0.0] * (FEATURES + 15)
    std = 1 / np.sqrt(precision)
    assert std[:3].tolist() == [1.5, 0.5, 1.5] and std[PSI + DESCRIBED] == 1.0
    assert math.hypot(*std[FEATURES:]) == pytest.approx(3.0)  # all features together, whatever their number


def test_what_is_forgotten_for_long_is_the_prior_again() -> None:
    posterior = Posterior(0.5, 1.0)
    posterior.learn(rows(0, 200), outcomes(0, 200), 1.0)
    for _ in range(40):
        posterior.forget()
    mean, precision = prior(0, 1.0)
    assert posterior.mean == pytest.approx(mean, abs=1e-6)
    assert posterior.precision == pytest.approx(np.diag(precision), abs=1e-6)


def test_one_half_forgotten_is_half_way_in_natural_parameters() -> None:
    posterior = Posterior(0.5, 1.0)
    posterior.learn(rows(0, 50), outcomes(0, 50), 1.0)
    mean, precision = prior(0, 1.0)
    half = (posterior.precision + np.diag(precision)) / 2
    known = (posterior.precision @ posterior.mean + precision * mean) / 2
    posterior.forget()
    assert posterior.precision == pytest.approx(half)
    assert posterior.precision @ posterior.mean == pytest.approx(known)


def test_features_seen_for_the_first_time_change_nothing_that_was_known() -> None:
    posterior = Posterior(0.9, 1.0)
    posterior.learn(rows(0, 50), outcomes(0, 50), 1.0)
    mean, precision = posterior.mean.copy(), posterior.precision.copy()
    assert posterior.widen(4) and not posterior.widen(4) and posterior.width == 4
    assert posterior.mean.tolist() == [*mean.tolist(), 0.0, 0.0, 0.0, 0.0]
    assert (posterior.precision[:FEATURES, :FEATURES] == precision).all()
    assert not posterior.precision[:FEATURES, FEATURES:].any()


def test_a_new_standardisation_changes_no_prediction() -> None:
    posterior = Posterior(0.9, 1.0)
    posterior.widen(4)
    wave = rows(0, 80, width=4)
    posterior.rescale(wave.features)
    posterior.learn(wave, outcomes(0, 80), 1.0)
    before = posterior.freeze(Platt())
    posterior.rescale(rows(1, 80, width=4).features * 0.5 - 1.0)
    after = posterior.freeze(Platt())
    probe = rows(2, 20, width=4)
    old, new = probe.design(before.scale), probe.design(after.scale)
    assert not np.allclose(old, new)
    assert new @ after.weights == pytest.approx(old @ before.weights, abs=1e-9)
    assert np.einsum("ij,jk,ik->i", new, after.covariance, new) == pytest.approx(
        np.einsum("ij,jk,ik->i", old, before.covariance, old)
    )


@pytest.mark.parametrize("outcome", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("evidence", [False, True])
def test_outcomes_all_alike_leave_finite_weights(outcome: float, evidence: bool) -> None:
    posterior = Posterior(1.0, 1.0)
    for seed in range(20):
        wave = rows(seed, 300, evidence=evidence)
        posterior.learn(wave, np.full(300, outcome), 1.0)
        assert np.isfinite(posterior.mean).all() and np.abs(posterior.mean).max() < 50
    assert np.linalg.eigvalsh(posterior.precision).min() > 0


def test_outcomes_that_a_column_separates_leave_finite_weights() -> None:
    posterior = Posterior(0.9, 1.0)
    for seed in range(30):
        posterior.forget()
        wave = rows(seed, 300, evidence=False)
        posterior.learn(wave, (wave.columns[:, 5] > 0).astype(float), 1.0)
    assert np.isfinite(posterior.mean).all()
    assert 2 < posterior.mean[PSI + 5] < 100


def test_the_concentration_is_learned_from_outcomes_at_the_same_prefix() -> None:
    """Prefixes that always do as they did before, and prefixes that are all alike."""
    draws = np.random.default_rng(0)
    found = {}
    for name in ("certain", "alike"):
        posterior = Posterior(0.9, 1.0)
        for _ in range(30):
            first = (draws.random(400) < 0.5).astype(float)
            then = first if name == "certain" else (draws.random(400) < 0.5).astype(float)
            columns = np.zeros((400, COLUMNS))
            columns[:, 0] = 1.0
            posterior.forget()
            posterior.learn(Rows(columns, np.zeros((400, 0)), first, np.ones(400), np.zeros(400)), then, 1.0)
        found[name] = math.exp(posterior.mean[0])
    assert found["certain"] < 0.1 and found["alike"] > 20


def test_a_posterior_comes_back_from_its_state_bit_for_bit() -> None:
    posterior = Posterior(0.9, 1.0)
    posterior.widen(2)
    posterior.rescale(rows(0, 30, width=2).features)
    posterior.learn(rows(0, 30, width=2), outcomes(0, 30), 1.0)
    back = Posterior(0.9, 1.0)
    back.become(msgpack.unpackb(msgpack.packb(posterior.to_state())))
    for each in (posterior, back):
        each.rescale(rows(1, 30, width=2).features)
        each.forget()
        each.learn(rows(1, 30, width=2), outcomes(1, 30), 1.0)
    assert back.to_state() == posterior.to_state()
