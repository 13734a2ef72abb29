"""Seeds: the same everywhere, different where they must be."""

from __future__ import annotations

import os
import subprocess
import sys

from common.seeds import TASKS_PER_SEED, derive_seed, lease_seed, task_index, turn_seed


def test_a_seed_depends_on_its_parts_and_their_types_and_nothing_else() -> None:
    parts = [("a", 1), ("a", "1"), ("a", 1, 0), ("a1",), ("a", 2), ("b", 1)]
    seeds = {derive_seed(*each) for each in parts}
    assert len(seeds) == len(parts) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert lease_seed(0, 1, 2) != lease_seed(0, 2, 1) and turn_seed(7, 0) != turn_seed(7, 1)


def test_a_seed_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from common.seeds import derive_seed; print(derive_seed('x', 3))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": value}, text=True,
            capture_output=True, check=True,
        ).stdout
        for value in ("0", "1")
    }  # fmt: skip
    assert found == {f"{derive_seed('x', 3)}\n"}


def test_runs_with_other_seeds_see_other_tasks_all_below_the_demonstrations() -> None:
    runs = [{task_index(seed, number) for number in range(1000)} for seed in (0, 1, 2, 41)]
    assert sum(map(len, runs)) == len(set.union(*runs))
    assert task_index(0, 5) == 5
    assert task_index((1 << 62) - 1, TASKS_PER_SEED - 1) < 1 << 40
