"""The shared predictor: right on prompts it never saw, honest about what it does not know, and the same twice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.calibration import Meter
from common.config_allocator import PredictorConfig
from common.errors import ConfigError
from common.predictor import HistoryPredictor, Predictor, Target
from common.predictors import make_predictor
from common.prefix import Prefix, Tally
from common.shared_predictor import SharedPredictor
from tests.common.martingale import Prompts, Term, learn

WAVES, WARM = 30, 8

Told = list[tuple[Term, float, float]]


def teach(predictor: Predictor, prompts: Prompts, levels: Sequence[float] = (0.0,) * WAVES) -> list[Told]:
    return [learn(predictor, prompts.wave(level=level)) for level in levels]


def score(told: list[Told]) -> dict[str, float]:
    """Brier score and calibration error over all waves at once."""
    flat = [(mean, term.outcome) for wave in told for term, mean, _ in wave]
    meter = Meter()
    meter.record(*np.array(flat).T)
    return meter.stats()


def repeat(predictor: Predictor, targets: list[Target], waves: int = 40) -> Predictor:
    for _ in range(waves):
        predictor.update(targets)
    return predictor


@pytest.fixture(scope="module")
def told() -> list[Told]:
    """What was predicted, wave by wave, on prompts that are new in each."""
    return teach(SharedPredictor(), Prompts(1))


# --------------------------------------------------------------------------------- before it has learned


def test_before_any_outcome_the_odds_are_even_and_uncertain() -> None:
    for prefix in (Prefix(0), Prefix(4, 0.9, 0.2, 3, b"\0" * 64)):
        before = SharedPredictor().predict(prefix)
        assert before.mean == 0.5 and 0.25 < before.std < 0.45


def test_before_any_outcome_of_other_trees_those_at_the_prefix_count_already() -> None:
    at = Tally(0.0, 3)
    assert SharedPredictor().predict(Prefix(0, tree=at, below=at)).mean == pytest.approx(0.25)


# ------------------------------------------------------------------------------- on prompts it never saw


def test_on_prompts_it_never_saw_it_is_sharper_than_history_and_calibrated(told: list[Told]) -> None:
    history = score(teach(HistoryPredictor(), Prompts(1))[WARM:])
    shared = score(told[WARM:])
    best = score([[(term, term.truth, 0.0) for term, _, _ in wave] for wave in told[WARM:]])
    assert shared["brier"] < history["brier"] - 0.05
    assert shared["brier"] < 0.5 * (history["brier"] + best["brier"])
    assert shared["ece"] < 0.02


def test_the_true_chance_lies_where_mean_and_deviation_say(told: list[Told]) -> None:
    terms = [item for wave in told[WARM:] for item in wave]
    for name, some in {
        "prompts": [item for item in terms if item[0].prefix.depth == 0],
        "turns": [item for item in terms if item[0].prefix.depth > 0],
        "prefixes with outcomes": [item for item in terms if item[0].prefix.below.trials > 0],
    }.items():
        z = np.array([(term.truth - mean) / std for term, mean, std in some])
        assert abs(z.mean()) < 0.15, name
        assert 0.75 < z.std() < 1.25, name


def test_outcomes_of_siblings_tell_how_far_prompts_differ() -> None:
    """Without hidden states and without a second decision prompts look alike: their spread must be learned."""
    predictor = SharedPredictor()
    told = teach(predictor, Prompts(2, roots=6, more=0, missing=1.0), (0.0,) * 20)
    truth = [term.truth for wave in told for term, _, _ in wave if term.prefix.depth == 0]
    assert predictor.predict(Prefix(0)).std == pytest.approx(np.std(truth), rel=0.12)


def test_the_recalibrated_predictor_follows_a_policy_that_gets_better() -> None:
    prompts = Prompts(4)
    follows, plain = SharedPredictor(), SharedPredictor(recalibrate=False)
    told: dict[str, list[Told]] = {"follows": [], "plain": [], "frozen": []}
    for number in range(WAVES):
        if number == WARM:
            follows.pin(WARM)
        wave = prompts.wave(level=-3.0 + 0.2 * number)
        if number >= WARM:
            frozen = [follows.predict(term.prefix, WARM) for term in wave]
            told["frozen"].append([(t, p.mean, p.std) for t, p in zip(wave, frozen, strict=True)])
        told["follows"].append(learn(follows, wave))
        told["plain"].append(learn(plain, wave))
    ece = {name: score(waves[-WAVES + WARM :])["ece"] for name, waves in told.items()}
    assert ece["follows"] < 0.03
    assert ece["plain"] > 1.5 * ece["follows"] and ece["frozen"] > 3 * ece["follows"]


# ------------------------------------------------------------------------------------ what a term is worth


def test_one_term_for_each_continuation_where_averages_over_children_are_biased() -> None:
    """V = 0.5, and a second continuation only where the first succeeded: four prompts stand for all."""
    fresh, won = Prefix(0), Tally(1.0, 1)
    after = Prefix(0, tree=won, below=won)
    one_each = [Target(fresh, None, y) for y in (0.0, 0.0, 1.0, 1.0)]
    one_each += [Target(after, None, y) for y in (0.0, 1.0)]
    of_children = [Target(fresh, None, y) for y in (0.0, 0.0, 0.5, 1.0)]
    of_fresh_ones = [Target(fresh, None, y) for y in (0.0, 0.0, 0.0, 1.0)]
    estimates = [
        repeat(SharedPredictor(recalibrate=False), targets * 30).predict(fresh).mean
        for targets in (one_each, of_children, of_fresh_ones)
    ]
    assert estimates == pytest.approx([0.5, 0.375, 0.25], abs=0.02)
    unbiased = repeat(SharedPredictor(recalibrate=False), one_each * 30)
    assert unbiased.predict(after).mean == pytest.approx(0.5, abs=0.02)


def test_continuations_that_end_early_do_not_weigh_more() -> None:
    """Half succeed, at once; half fail, after nine more turns. Each term's own share would say 0.9 or so."""
    win = [Target(Prefix(0), None, 1.0, 1.0)]
    loss = [Target(Prefix(depth), None, 0.0, 0.1) for depth in range(10)]
    found = repeat(SharedPredictor(), (win + loss) * 40).predict(Prefix(0))
    assert found.mean == pytest.approx(0.5, abs=0.03)


def test_the_terms_of_a_continuation_are_one_piece_of_evidence() -> None:
    """Ten continuations of one term each leave as much doubt as ten of four equal terms each."""
    once, often = SharedPredictor(), SharedPredictor()
    once.update([Target(Prefix(0), None, float(i % 2)) for i in range(10)])
    often.update([Target(Prefix(0), None, float(i % 2), 0.25) for i in range(10) for _ in range(4)])
    assert often.predict(Prefix(0)).std == pytest.approx(once.predict(Prefix(0)).std)


# ---------------------------------------------------------------------------------------- what it looks at


def test_absent_is_not_zero() -> None:
    targets = []
    for place in range(40):
        absent, zero = float(place % 5 == 0), float(place % 5 != 0)
        targets += [Target(Prefix(1, entropy=None), None, absent), Target(Prefix(1, entropy=0.0), None, zero)]
        targets += [Target(Prefix(2, None), None, absent), Target(Prefix(2, 0.5), None, zero)]
    predictor = repeat(SharedPredictor(), targets)
    for absent, zero in (
        (Prefix(1), Prefix(1, entropy=0.0)),
        (Prefix(2), Prefix(2, 0.5)),
    ):
        assert predictor.predict(absent).mean < 0.35 and predictor.predict(zero).mean > 0.65


def test_outcomes_so_far_move_a_prediction_most_where_they_happened() -> None:
    predictor = SharedPredictor()
    teach(predictor, Prompts(5, more=5, missing=1.0), (0.0,) * 12)
    lost, won, none = Tally(0.0, 3), Tally(3.0, 3), Tally()
    for depth in (0, 2):
        unknown = predictor.predict(Prefix(depth)).mean
        at = [predictor.predict(Prefix(depth, tree=tally, below=tally)).mean for tally in (lost, won)]
        assert at[0] < unknown - 0.1 and at[1] > unknown + 0.1
    unknown = predictor.predict(Prefix(2)).mean
    near = predictor.predict(Prefix(2, tree=lost, below=lost)).mean
    elsewhere = predictor.predict(Prefix(2, tree=lost, below=none)).mean
    assert near < elsewhere < unknown - 0.03
    few, many = (Tally(float(n), 2 * n) for n in (1, 20))
    assert (
        predictor.predict(Prefix(1, tree=many, below=many)).std
        < predictor.predict(Prefix(1, tree=few, below=few)).std
        < predictor.predict(Prefix(1)).std
    )


def test_hidden_states_sharpen_predictions_and_can_be_left_out(told: list[Told]) -> None:
    without = SharedPredictor(features=False)
    blind = score(teach(without, Prompts(1), (0.0,) * 20)[WARM:])
    assert score(told[WARM:20])["brier"] < blind["brier"] - 0.02
    assert without.stats()["described"] == 0.0


@pytest.mark.parametrize(
    "bad", [b"\0\0\0\0", np.full(6, np.nan, "<f4").tobytes(), np.full(6, 1e30, "<f4").tobytes()]
)
def test_a_vector_that_cannot_be_used_counts_as_missing(bad: bytes) -> None:
    predictor = SharedPredictor()
    teach(predictor, Prompts(7), (0.0,) * 3)
    assert predictor.predict(Prefix(1, features=bad)) == predictor.predict(Prefix(1))
    before = predictor.predict(Prefix(2, tokens=2))
    terms = [Target(Prefix(1, features=bad), 0.5, 1.0)]
    predictor.update(terms)
    assert predictor.stats()["described"] == 0.0
    assert predictor.predict(Prefix(2, tokens=2)).mean == pytest.approx(before.mean, abs=0.2)


# ---------------------------------------------------------------------------------------------- robustness


PREFIXES = st.builds(
    lambda depth, score, entropy, tokens, features, wins, trials, more: Prefix(
        depth, score, entropy, tokens, features, Tally(min(wins, trials) + more, trials + 3), Tally(min(wins, trials), trials)
    ),
    st.integers(0, 5000),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1e6),
    st.integers(0, 10**6),
    st.none() | st.binary(max_size=24),
    st.floats(0, 40),
    st.integers(0, 40),
    st.floats(0, 3),
)  # fmt: skip
TARGETS = st.builds(
    Target,
    PREFIXES,
    st.none() | st.floats(0, 1),
    st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    st.floats(0.01, 1),
)


@settings(max_examples=25)
@given(
    st.lists(st.lists(TARGETS, max_size=8), min_size=1, max_size=5),
    st.lists(PREFIXES, min_size=1, max_size=5),
)
def test_whatever_comes_predictions_are_probabilities(
    waves: list[list[Target]], probes: list[Prefix]
) -> None:
    predictor = SharedPredictor()
    for number, wave in enumerate(waves, start=1):
        assert predictor.update(wave) == number == predictor.version
    for prefix in probes:
        found = predictor.predict(prefix)
        assert 0.0 <= found.mean <= 1.0 and 0.0 <= found.std <= 0.5
    assert all(math.isfinite(value) for value in predictor.stats().values())


@pytest.mark.parametrize("outcome", [0.0, 0.5, 1.0])
def test_outcomes_all_alike_are_learned_and_unlearned(outcome: float) -> None:
    predictor = repeat(SharedPredictor(), [Target(Prefix(d, 0.5), 0.5, outcome) for d in range(8)] * 20, 60)
    assert predictor.predict(Prefix(3, 0.5)).mean == pytest.approx(outcome, abs=0.03)
    repeat(predictor, [Target(Prefix(d, 0.5), 0.5, 1 - outcome) for d in range(8)] * 20, 10)
    assert predictor.predict(Prefix(3, 0.5)).mean == pytest.approx(1 - outcome, abs=0.2)


def test_waves_without_targets_are_versions_and_fade_what_was_known() -> None:
    predictor = repeat(SharedPredictor(discount=0.5), [Target(Prefix(0), 0.5, 1.0)] * 50, 5)
    known = predictor.predict(Prefix(0))
    for number in range(30):
        assert predictor.update([]) == 6 + number
    assert known.mean > 0.9 and predictor.predict(Prefix(0)).std > 2 * known.std


# ------------------------------------------------------------------------------------------------- versions


def test_a_pinned_version_predicts_the_same_until_it_is_let_go() -> None:
    predictor, prompts = SharedPredictor(), Prompts(8)
    teach(predictor, prompts, (0.0,) * 2)
    probes = [term.prefix for term in prompts.wave(3)]
    predictor.pin(2)
    then = [predictor.predict(prefix) for prefix in probes]
    teach(predictor, prompts, (2.0,) * 3)
    assert [predictor.predict(prefix, 2) for prefix in probes] == then
    assert [predictor.predict(prefix) for prefix in probes] != then
    assert predictor.kept() == [2, 5] and predictor.pinned() == {2: 1}
    predictor.unpin(2)
    assert predictor.kept() == [5] and not predictor.pinned()
    with pytest.raises(KeyError):
        predictor.predict(probes[0], 2)


def test_the_same_targets_in_the_same_order_give_the_same_bits() -> None:
    states = []
    for _ in range(2):
        predictor = SharedPredictor()
        teach(predictor, Prompts(9), (0.0, 0.5, 1.0))
        states.append(msgpack.packb(predictor.to_state()))
    assert states[0] == states[1]


def test_it_comes_back_from_its_state_and_goes_on_as_before() -> None:
    predictor, prompts = SharedPredictor(), Prompts(10)
    teach(predictor, prompts, (0.0,) * 3)
    predictor.pin(3)
    teach(predictor, prompts, (0.5,))
    back = SharedPredictor()
    back.from_state(msgpack.unpackb(msgpack.packb(predictor.to_state())))
    wave = prompts.wave()
    for version in (3, 4):
        assert [back.predict(t.prefix, version) for t in wave] == [
            predictor.predict(t.prefix, version) for t in wave
        ]
    assert (back.version, back.pinned(), back.stats()) == (4, {3: 1}, predictor.stats())
    learn(predictor, wave)
    learn(back, wave)
    assert msgpack.packb(back.to_state()) == msgpack.packb(predictor.to_state())


def test_the_state_of_another_predictor_is_refused() -> None:
    shared, history = SharedPredictor(), HistoryPredictor()
    for one, other in ((shared, history), (history, shared)):
        with pytest.raises(ValueError, match="state of a predictor of kind"):
            one.from_state(other.to_state())


# --------------------------------------------------------------------------------------------------- metrics


def test_its_own_figures_and_those_of_history_are_of_the_same_targets(told: list[Told]) -> None:
    shared, history = SharedPredictor(), HistoryPredictor()
    for wave in told[:3]:
        terms = [term for term, _, _ in wave]
        learn(history, terms)
        was = learn(shared, terms)
    stats = shared.stats()
    assert {name: stats[f"history/{name}"] for name in ("brier", "ece")} == history.stats()
    errors = [(mean - term.outcome) ** 2 for term, mean, _ in was]
    assert stats["brier"] == pytest.approx(sum(errors) / len(errors))
    # All of it was predicted by the newest version: used and fresh are the same.
    assert stats["fresh/brier"] == pytest.approx(stats["brier"])
    assert stats["terms"] == len(was) and stats["continuations"] == pytest.approx(20 * 5)
    assert 0.5 < stats["auc"] < 1 and stats["described"] == pytest.approx(0.8, abs=0.1)


# --------------------------------------------------------------------------------------------------- registry


def test_the_registry_builds_what_the_configuration_describes() -> None:
    assert isinstance(make_predictor(PredictorConfig()), HistoryPredictor)
    built = make_predictor(PredictorConfig(name="shared", features=False, discount=0.8))
    assert isinstance(built, SharedPredictor)
    same = SharedPredictor(discount=0.8, features=False)
    teach(built, Prompts(11), (0.0, 1.0))
    teach(same, Prompts(11), (0.0, 1.0))
    assert built.to_state() == same.to_state()
    with pytest.raises(ConfigError, match="did you mean 'shared'"):
        make_predictor(PredictorConfig(name="shard"))


@pytest.mark.parametrize(
    "wrong", [{"discount": 0.0}, {"discount": 1.1}, {"strength": 0.0}, {"strength": math.inf}]
)
def test_a_setting_out_of_bounds_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"allocator.predictor.{next(iter(wrong))} must be"):
        PredictorConfig(name="shared", **wrong)  # type: ignore[arg-type]
