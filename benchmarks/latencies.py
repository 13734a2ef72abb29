"""How long a turn takes: a frozen model, in mean turns, so that every simulation may choose its own scale.

    turn = generation + environment step
    generation    lognormal(σ)
    step          quick, or, with probability `slow_share`, Pareto(α) from `slow_from` on, cut at `slow_most`

`latency.json` holds σ as fitted to the turns of a real FrozenLake run (`python -m benchmarks.latencies
RUN_DIR` fits again and prints). A small agent on a lake has no slow tools, so the tail is stated, not
measured: one step in twenty is slow, with α = 1.5 (finite mean, infinite variance) until a timeout of sixty
mean turns. Published rollouts look like that: long-tailed lengths, with a hundredth ten times the median or
more, and tool calls on top (Heddle, arXiv 2603.28101; DARTS, arXiv 2605.30859).

The control without a tail takes one mean turn for every turn.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.cli import guarded
from benchmarks.fleet_worlds import fraction
from common.errors import StorageError
from common.journal import read_journal
from common.rundir import RunDir
from common.seeds import derive_seed

FROZEN = Path(__file__).with_name("latency.json")
NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Parameters in mean turns; the mean of a turn is 1."""

    sigma: float
    """Of the logarithm of generation time."""
    quick: float
    """A step that is not slow."""
    slow_share: float
    slow_from: float
    slow_alpha: float
    slow_most: float
    """The timeout of a tool."""

    @property
    def step_mean(self) -> float:
        """Mean of a step: E[min(X, c)] = x₀·α/(α−1) − x₀^α·c^(1−α)/(α−1) for a Pareto variable X ≥ x₀."""
        x, a, c = self.slow_from, self.slow_alpha, self.slow_most
        slow: float = (x * a - x**a * c ** (1 - a)) / (a - 1)
        return self.slow_share * slow + (1 - self.slow_share) * self.quick

    def draw(self, seed: int) -> float:
        """Duration of the turn that `seed` names."""
        normal = NORMAL.inv_cdf(max(fraction(derive_seed("generation", seed)), 1e-12))
        generation = (1 - self.step_mean) * math.exp(self.sigma * normal - self.sigma**2 / 2)
        point = fraction(derive_seed("step", seed))
        if point >= self.slow_share:
            return generation + self.quick
        tail = max(point / self.slow_share, 1e-12)
        slow: float = self.slow_from * tail ** (-1 / self.slow_alpha)
        return generation + min(slow, self.slow_most)


class NoTail:
    """Every turn takes as long: the control."""

    def draw(self, seed: int) -> float:
        return 1.0


def frozen(path: Path = FROZEN) -> Latency:
    """The committed model. Raises `StorageError`."""
    try:
        return Latency(**json.loads(path.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"cannot read the latency model {path}: {error}; restore the file") from error


def fit(journal: Path) -> dict[str, Any]:
    """Times between the words of each lease, from `Starting` to the last turn: quantiles, and the mean and
    deviation of their logarithms."""
    heard: dict[tuple[int, ...], float] = {}
    times: list[float] = []
    for record in read_journal(journal):
        message = record.fields.get("message", {}) if record.kind == "input" else {}
        if message.get("type") in ("Starting", "Expanded"):
            lease, now = tuple(message["lease"].values()), record.fields["now"]
            if lease in heard:
                times.append(now - heard[lease])
            heard[lease] = now
    if not times:
        raise StorageError(f"{journal} holds no turns; name the directory of a run that made some")
    logs = np.log(np.array(times))
    quantiles = np.quantile(times, [0.5, 0.9, 0.99, 1.0]).tolist()
    return {
        "turns": len(times),
        "mean_s": float(np.mean(times)),
        **dict(zip(("p50_s", "p90_s", "p99_s", "max_s"), quantiles, strict=True)),
        "log_mean": float(logs.mean()),
        "sigma": float(logs.std()),
    }


def main(words: list[str]) -> int:
    """Fit the turns of a run and print what was found beside the frozen model."""
    if len(words) != 1:
        raise StorageError(f"name one run directory, got {len(words)} words")
    found = fit(RunDir.open(Path(words[0])).allocator_journal)
    print(json.dumps({"frozen": asdict(frozen()), "fitted": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
