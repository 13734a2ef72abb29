"""The success model's mean and standard deviation, against draws from the distributions they stand for."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest

import common.success_model
from common.predictor_inputs import COLUMNS, MAX_WIDTH, Scale, encode
from common.prefix import Prefix, Tally
from common.success_model import Model

WIDTH = 3


def model(seed: int = 0, slope: float = 1.0, shift: float = 0.0, width: int = WIDTH) -> Model:
    draws = np.random.default_rng(seed)
    size = COLUMNS + width
    root = draws.normal(0.0, 0.15, (size, size))
    scale = Scale.unknown(width).after(draws.normal(2.0, 3.0, (50, width)), 0.9)
    return Model(draws.normal(0.0, 0.5, size), root @ root.T, (0.9, -0.4), scale, slope, shift)


def prefixes(count: int = 30) -> list[Prefix]:
    draws = np.random.default_rng(1)
    found = []
    for number in range(count):
        trials = int(draws.integers(0, 5))
        wins = float(draws.integers(0, trials + 1))
        found.append(
            Prefix(
                depth=int(draws.integers(0, 9)),
                process_score=None if number % 3 == 0 else float(draws.random()),
                entropy=None if number % 4 == 0 else float(draws.random()),
                tokens=int(draws.integers(0, 6)),
                features=None if number % 5 == 0 else draws.normal(2, 3, WIDTH).astype("<f4").tobytes(),
                tree=Tally(wins + 1, trials + 3),
                below=Tally(wins, trials),
            )
        )
    return found


@pytest.mark.parametrize("prefix", prefixes(8))
def test_mean_and_spread_are_those_of_a_beta_around_an_uncertain_mean(prefix: Prefix) -> None:
    """V given m is Beta(κ m + w, κ (1 − m) + n − w), and θ is normal: drawn here a hundred thousand times."""
    frozen, draws = model(), np.random.default_rng(2)
    x = encode([prefix], WIDTH).design(frozen.scale)[0]
    deviation = math.sqrt(x @ frozen.covariance @ x)
    m = 1 / (1 + np.exp(-draws.normal(frozen.weights @ x, deviation, 100_000)))
    kappa = math.exp(0.9 - 0.4 * math.log1p(prefix.depth))
    wins, losses = prefix.below.wins, prefix.below.trials - prefix.below.wins
    chance = draws.beta(kappa * m + wins + 1e-9, kappa * (1 - m) + losses + 1e-9)
    found = frozen.predict(prefix)
    assert found.mean == pytest.approx(chance.mean(), abs=0.012)
    assert found.std == pytest.approx(chance.std(), abs=0.02)


def test_one_prefix_and_many_are_told_the_same() -> None:
    frozen = model()
    many = frozen.means(encode(prefixes(), WIDTH))
    assert [frozen.predict(prefix).mean for prefix in prefixes()] == pytest.approx(many.tolist(), abs=1e-12)


def test_recalibration_moves_the_mean_and_keeps_the_weight_of_evidence() -> None:
    for prefix in prefixes(10):
        raw, right = model().predict(prefix), model(slope=0.6, shift=-0.3).predict(prefix)
        logit = 0.6 * math.log(raw.mean / (1 - raw.mean)) - 0.3
        assert right.mean == pytest.approx(1 / (1 + math.exp(-logit)))
        assert right.std**2 / (right.mean * (1 - right.mean)) == pytest.approx(
            raw.std**2 / (raw.mean * (1 - raw.mean))
        )


def test_what_is_remembered_of_a_prefix_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = [model().predict(prefix) for prefix in prefixes()]
    frozen = model()
    assert [frozen.predict(prefix) for prefix in prefixes() + prefixes()] == fresh + fresh
    monkeypatch.setattr(common.success_model, "REMEMBERED", 3)
    small = model()
    assert [small.predict(prefix) for prefix in prefixes() + prefixes()] == fresh + fresh
    assert len(small._known) <= 3


def test_outcomes_at_the_prefix_overrule_everything_in_the_end() -> None:
    for wins in (0, 250, 1000):
        at = Tally(float(wins), 1000)
        found = model().predict(Prefix(2, 0.5, 0.1, 2, None, tree=at, below=at))
        assert found.mean == pytest.approx(wins / 1000, abs=0.01) and found.std < 0.02


def test_a_model_comes_back_from_its_state_and_predicts_the_same_bits() -> None:
    frozen = model(slope=0.9, shift=0.1)
    back = Model.from_state(msgpack.unpackb(msgpack.packb(frozen.to_state())))
    assert [back.predict(p) for p in prefixes()] == [frozen.predict(p) for p in prefixes()]


def test_the_widest_model_still_answers_within_its_bounds() -> None:
    wide = model(width=MAX_WIDTH)
    far = np.full(MAX_WIDTH, 1e4, dtype="<f4").tobytes()
    found = wide.predict(Prefix(500, 1.0, 50.0, 9999, far, Tally(900.0, 900), Tally(0.0, 1)))
    assert 0 <= found.mean <= 1 and 0 <= found.std**2 <= found.mean * (1 - found.mean)
