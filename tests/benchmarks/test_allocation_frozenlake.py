"""The comparison on FrozenLake: what is set beside what, and one run over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocation_frozenlake as lake
from benchmarks.allocation_tables import frozenlake as frozenlake_table
from benchmarks.children import run_role
from benchmarks.cli import compose
from benchmarks.contrast import Sums, add, measure
from benchmarks.lake_ring import Ring, grow
from benchmarks.noisy_allocator import Scattered, noisy_core
from benchmarks.population_predictors import Unlearned
from benchmarks.subsample import flat_curve, random_curve
from common.config_allocator import RULES
from common.errors import ConfigError
from common.prefix import Prefix
from tests.benchmarks.test_contrast import grown

FLAT = [grown(*((0, 2, float(n % 3 == 0)) for n in range(lake.MOST)))]
HEADS = ((0, 2, float(n % 3 == 0)) for n in range(lake.CHAINS))
CHAINS = [grown(*HEADS, *((0, 1, 0.0) for _ in range(lake.CHAINS * lake.EXPANSIONS)))]


def entries(arm: str, sums: Sums) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Two seeds alike: the baselines, and one arm."""
    flat = [each.to_json() for each in flat_curve(FLAT, lake.MOST)]
    random = [each.to_json() for each in random_curve(CHAINS, lake.CHAINS, lake.EXPANSIONS)]
    kept = {"flat": {"curve": flat}, "random": {"curve": random}, arm: {"sums": sums.to_json()}}
    return {("warm", name): [entry, entry] for name, entry in kept.items()}


def test_an_arm_that_is_flat_sampling_has_no_lift_over_it_at_any_size() -> None:
    for size in (3, 6, 11):
        same = flat_curve(FLAT, lake.MOST)[size - 1]
        row = lake.row(entries("uucb", same), "warm", "uucb")
        for name in lake.METRICS:
            for unit in ("tokens", "leaves"):
                assert row[f"{name}_over_flat_{unit}"] == pytest.approx((1.0, 0.0), abs=1e-9)
        assert row["leaves"][0] == size


def test_baselines_are_reported_at_the_size_of_the_others_and_beside_each_other_at_equal_tokens() -> None:
    found = entries("uucb", measure(FLAT[0]))
    flat, random = (lake.row(found, "warm", name) for name in ("flat", "random"))
    assert flat["leaves"][0] == random["leaves"][0] == lake.SIZE
    assert flat["contrast_over_flat_tokens"] == pytest.approx((1.0, 0.0))
    assert random["contrast_over_random_tokens"] == pytest.approx((1.0, 0.0))
    assert random["tokens"][0] < flat["tokens"][0]


def test_the_last_line_speaks_of_one_policy_and_of_what_was_measured() -> None:
    row = {
        "policy": "warm", "arm": "trace × trace_roots", "contrast_over_flat_tokens": (1.5, 0.1),
        "contrast_over_random_tokens": (1.1, 0.1), "mixed_gain_flat_tokens": (0.2, 0.1),
    }  # fmt: skip
    noise = {**row, "arm": "trace × trace_roots, noise"}
    other = {**row, "policy": "trained", "contrast_over_flat_tokens": (9.0, 0.1)}
    assert lake.headline([row, noise, other], "warm") == pytest.approx(
        {"contrast_lift": 1.5, "noise_lift": 0.1}
    )
    assert lake.headline([row], "trained") == {}


def test_every_rule_has_an_arm_and_every_arm_is_a_configuration() -> None:
    names = set()
    for words in lake.ARMS.values():
        config = compose([*lake.COMMON, f"allocator.budget.continuations={lake.SIZE}", *words])
        names.add(config.allocator.rule.name)
    assert names == set(RULES)


def test_a_mistake_is_one_sentence() -> None:
    for words in (["--seeds", "0"], ["--policies", "warm,cold"], ["--only", "trance"]):
        with pytest.raises(ConfigError):
            lake.options(words)


def test_noise_is_spread_over_the_whole_range_and_answers_the_same_prefix_the_same() -> None:
    noise = Scattered()
    prefixes = [Prefix(depth=depth, process_score=score / 50) for depth in range(20) for score in range(50)]
    said = [noise.predict(prefix).mean for prefix in prefixes]
    assert said == [noise.predict(prefix).mean for prefix in prefixes]
    assert sum(said) / len(said) == pytest.approx(0.5, abs=0.04)
    assert min(said) < 0.02 and max(said) > 0.98
    core = noisy_core(compose(["allocator/rule=trace"]), "run")
    assert isinstance(core.state.predictor, Unlearned)


@pytest.mark.slow
def test_trees_come_from_real_actors_over_real_sockets_while_the_policy_stands_still(tmp_path: Path) -> None:
    words = ("experiment=smoke", "tracking=none", "learner.steps=3", "learner.batch_trees=4")
    run_role("warmstart", ["role=warmstart", *words, f"run={tmp_path / 'warm'}"], tmp_path / "warm.out")
    model = tmp_path / "warm" / "warmstart" / "model"
    arm = ("allocator/rule=trace", "allocator/budget=trace_roots", "allocator.budget.continuations=6")
    for noisy in (False, True):
        settings = (*words, *arm, f"model.path={model}", "learner.max_policy_lag=3")
        trees = grow(Ring(tmp_path / f"run-{noisy}", model, settings, noisy=noisy))
        assert [tree.wave for tree in trees] == [0] * 4 + [1] * 4 + [2] * 4
        sums = add(measure(tree) for tree in trees)
        assert sums.leaves == 6 * 12 and sums.tokens > 0
        assert {run.version.step for tree in trees for node in tree.nodes for run in node.turn.versions} == {
            0
        }


def test_the_quick_tier_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown_for: list[str] = []

    def fake(ring: Ring) -> list[Any]:
        grown_for.append(ring.path.name)
        return FLAT * 8 if ring.path.name.endswith("flat") else CHAINS * 8

    monkeypatch.setattr(lake, "grow", fake)
    monkeypatch.setattr(lake, "BURN_IN", 0.0)
    words = [
        "--quick",
        f"--model={tmp_path}",
        "--waves=4",
        f"--work={tmp_path / 'w'}",
        f"--results={tmp_path}",
    ]
    assert lake.main(words) == 0
    assert len(grown_for) == 2 * len(lake.QUICK_ARMS)
    found = json.loads((tmp_path / "allocation_frozenlake-quick.json").read_text())
    assert capsys.readouterr().out.splitlines()[-1] == found["last_line"]
    page = frozenlake_table(found)
    assert "| given | flat | 6.0 |" in page and "| given | trace × trace_roots, noise | 12.0 |" in page
    assert len(found["runs"]) == 2 * len(lake.QUICK_ARMS) and len(found["rows"]) == len(lake.QUICK_ARMS)
