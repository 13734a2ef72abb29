"""The same question with real processes: an allocator, two actors of eight slots, two trees in flight.

FrozenLake with the model of a warm start; the policy stands still (`benchmarks.lake_ring`). Turns of a small
lake have no tail, and on a CPU the sequences that an actor decodes together slow each other down: an idle
slot costs less here than in the simulation. Time is the allocator's, from its journal, between a fifth and
nine tenths of all accepted tokens, so that starting and the last stragglers are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.children import run_role, say
from benchmarks.cli import fresh_run
from benchmarks.lake_ring import Ring, grow
from common.journal import read_journal
from common.rundir import RunDir

TREES = 24
CONTINUATIONS = 32
COMMON = (
    "tracking=none", "allocator/predictor=shared", f"allocator.budget.continuations={CONTINUATIONS}",
    "learner.batch_trees=1", "learner.max_policy_lag=1", f"learner.steps={TREES}", "engine.max_batch=8",
    "engine.prefetch=0", "learner.loss.minibatches=1",
)  # fmt: skip
FROM, TO = 0.2, 0.9


def measure_real(work: Path, seed: int, staleness: int) -> list[dict[str, Any]]:
    """Flat sampling twice, `uucb` synchronous, and at `staleness`.

    Raises:
        BenchmarkFailed: a process failed, or a run takes too long.
    """
    model = _warm_start(work.absolute() / "policy", seed)
    arms = {"flat": ("flat", 0), "null": ("flat", 0), "D=0": ("uucb", 0), "default": ("uucb", staleness)}
    found: list[dict[str, Any]] = []
    for name, (rule, bound) in arms.items():
        words = (
            f"allocator/rule={rule}", *COMMON, f"allocator.max_score_staleness={bound}", f"seed={seed}",
            f"model.path={model}",
        )  # fmt: skip
        path = work.absolute() / f"real-{name.replace('=', '')}"
        grow(Ring(path, model, words, republished=True))
        rate = tokens_per_s(RunDir.open(path).allocator_journal)
        flat = found[0]["tokens_per_s"] if found else rate
        entry = {"arm": name, "rule": rule, "staleness": bound, "tokens_per_s": rate}
        found.append({**entry, "overhead": flat / rate - 1})
        say(f"    real {name}: {rate:.0f} tokens/s, overhead {100 * found[-1]['overhead']:.1f} %")
    return found


def _warm_start(path: Path, seed: int) -> Path:
    if not (path / "warmstart" / "model").is_dir():
        fresh_run(path)
        words = ["tracking=none", f"seed={seed}", "role=warmstart", f"run={path}"]
        run_role("warmstart", words, path.with_suffix(".out"))
    return RunDir.open(path).warmstart_model


def tokens_per_s(journal: Path) -> float:
    """Action tokens accepted per second of the allocator's clock, over the middle of the run."""
    now, total = 0.0, 0
    heard: list[tuple[float, int]] = []
    for record in read_journal(journal):
        if record.kind == "input":
            now = record.fields["now"]
        elif record.kind == "turn_accepted":
            total += record.fields["tokens"]
            heard.append((now, total))
    first, last = (next(at for at, tokens in heard if tokens >= share * total) for share in (FROM, TO))
    return (TO - FROM) * total / (last - first)
