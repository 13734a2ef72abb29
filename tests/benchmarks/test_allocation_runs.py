"""Arms are measured once, kept, and brought to the baseline's continuations or tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.allocation_arms import Arm, Bench, Length, Seen
from benchmarks.allocation_runs import Runs
from benchmarks.contrast import Sums
from benchmarks.partial import Partial
from benchmarks.population import POPULATIONS, Population
from benchmarks.results import BenchmarkFailed

A = POPULATIONS["A"]


class Line(Bench):
    """Stands in for real runs: tokens grow with the size, a little less than in proportion."""

    def __init__(self, per_size: float = 8.0, leaves: float = 1.0) -> None:
        super().__init__(Length())
        self.per_size, self.leaves_of = per_size, leaves
        self.asked: list[tuple[int, int]] = []

    def grow(self, population: Population, arm: Arm, size: int, seed: int) -> tuple[Sums, Seen]:
        self.asked.append((size, seed))
        tokens = self.per_size * size - 0.01 * size**2
        return Sums(prompts=1, leaves=self.leaves_of * size, tokens=tokens, known=size), Seen([(0.5, True)])


def runs(bench: Bench, folder: Path, seeds: int = 3) -> Runs:
    return Runs(bench, seeds, Partial(folder / "partial.json", {}), lambda line: None)


@pytest.mark.parametrize("per_size", [4.0, 9.0, 10.12, 14.0, 30.0])
def test_an_arm_is_brought_to_the_target_by_mixing_two_sizes_that_enclose_it(
    per_size: float, tmp_path: Path
) -> None:
    bench = Line(per_size)
    found = runs(bench, tmp_path).matched(A, Arm("uucb"), "tokens", 120.0)
    per_prompt = [sums.ratios()["tokens"] for sums in found.sums()]
    assert per_prompt == pytest.approx([120.0] * 3, rel=0.006)
    assert found.low.mean("tokens") <= 120.6 and found.high.mean("tokens") >= 119.4
    assert len(set(bench.asked)) <= 3 * 4, "few sizes are looked at"


@pytest.mark.parametrize("rule", ["random", "trace"])
def test_sizes_keep_the_shape_of_their_rule(rule: str, tmp_path: Path) -> None:
    found = runs(Line(), tmp_path).matched(A, Arm(rule), "tokens", 130.0)
    assert found.low.size % 3 == found.high.size % 3 == 0 and found.low.size < found.high.size


def test_a_size_that_is_at_the_target_is_taken_as_it_is(tmp_path: Path) -> None:
    bench = Line()
    found = runs(bench, tmp_path).matched(A, Arm("uucb"), "leaves", 12.0)
    assert (found.low.size, found.share, {size for size, _ in bench.asked}) == (12, 0.0, {12})


def test_an_overhead_that_is_allowed_counts_as_equal_and_another_one_does_not(tmp_path: Path) -> None:
    assert runs(Line(leaves=1.04), tmp_path).matched(A, Arm("uucb"), "leaves", 12.0, 0.05).share == 0
    more = runs(Line(leaves=1.5), tmp_path / "b").matched(A, Arm("uucb"), "leaves", 12.0, 0.05)
    assert more.low.size == more.high.size - 1 == 7 or more.low.size <= 8 <= more.high.size


def test_an_arm_that_never_gets_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="no size of uucb × fixed × shared"):
        runs(Line(), tmp_path).matched(A, Arm("uucb"), "tokens", 1e6)


def test_what_was_measured_is_not_measured_again_even_by_another_process(tmp_path: Path) -> None:
    first = Line()
    before = runs(first, tmp_path).at(A, Arm("uucb", weights=(1.0, 0.5, 0.25)), 5)
    second = Line()
    after = runs(second, tmp_path).at(A, Arm("uucb", weights=(1.0, 0.5, 0.25)), 5)
    assert before == after and len(first.asked) == 3 and second.asked == []
    other: Any = runs(second, tmp_path).at(A, Arm("uucb"), 5)
    assert other.arm.weights is None and len(second.asked) == 3
