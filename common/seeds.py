"""Seeds by hashing, so that a draw depends on what it is for and never on when or where it is made."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts, the same in every process and Python version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def lease_seed(run_seed: int, tree: int, lease: int) -> int:
    """Seed of a continuation: keyed on (tree, lease), not on the attempt, so that a retry draws the same."""
    return derive_seed("lease", run_seed, tree, lease)


def turn_seed(lease: int, offset: int) -> int:
    """Seed of one turn of a lease (its sampling draws and its environment step).

    One seed a turn lets a retry resume in the middle, and a fork replay its prefix, with exact randomness.
    """
    return derive_seed("turn", lease, offset)


TASKS_PER_SEED = 1 << 20
"""Tasks between the first ones of two run seeds: more than a run uses, so that seeds train on other tasks."""


def task_index(run_seed: int, number: int) -> int:
    """Index of the `number`-th task of a run: runs with other seeds see other tasks. Below 2^40 for the first
    million tasks, where demonstrations begin."""
    return run_seed % (1 << 19) * TASKS_PER_SEED + number
