"""The allocator with a success predictor whose answers are noise: null control of `allocation_frozenlake`.

    python -m benchmarks.noisy_allocator run=<directory> setting=value …

As `run.py role=allocator`, but for the predictor. That one is no option of the configuration: nobody should
train with it.
"""

from __future__ import annotations

import math
import sys

from allocator.budgets import make_budget
from allocator.core import AllocatorCore
from allocator.recovery import recover
from allocator.rules import make_rule
from allocator.serve import serve
from allocator.settings import Settings
from benchmarks.cli import compose, guarded
from benchmarks.population_predictors import Unlearned
from common import processes
from common.config import Config
from common.config_allocator import root_cost
from common.logs import setup_logs
from common.opening import open_run
from common.predictor import Prediction
from common.prefix import Prefix
from common.seeds import derive_seed


class Scattered(Unlearned):
    """Uniform on [0, 1] by a hash of what is seen of the prefix, whatever became of it."""

    def see(self, prefix: Prefix) -> Prediction:
        features = int.from_bytes(prefix.features or b"", "little") % (1 << 256)
        where = derive_seed("noise", prefix.depth, repr(prefix.process_score), repr(prefix.entropy), features)
        return Prediction((where + 0.5) / 2.0**63, math.sqrt(1 / 12))


def noisy_core(config: Config, run: str) -> AllocatorCore:
    """What `AllocatorCore.from_config` makes, with noise in place of the predictor."""
    rule = config.allocator.rule
    budget = make_budget(config.allocator.budget, config.learner.batch_trees, root_cost(rule))
    return AllocatorCore(Settings.from_config(config, run), make_rule(rule), budget, Scattered())


def main(words: list[str]) -> int:
    """Serve a run; returns the exit code."""
    processes.follow_parent()
    config = compose(["role=allocator", *words])
    rundir = open_run(config)
    with rundir.lock("allocator"):
        setup_logs("allocator", rundir.log_file("allocator"), run=rundir.id)
        return serve(recover(lambda: noisy_core(config, rundir.id), rundir), config, rundir)


if __name__ == "__main__":
    sys.exit(guarded(main))
