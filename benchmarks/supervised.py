"""The supervised control's process: more steps of the warm start, on its demonstrations, for given minutes.

    python -m benchmarks.supervised --run RUN --out FOLDER --seconds S

Goes on from the run's own warm start with the same loss, batch and learning rate, in a fresh optimiser, until
the seconds are over. It gets every core, as the ring had; its threads wait passively, since spinning ones
would starve one another.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is imported, which reads them once.
os.environ.update(OMP_NUM_THREADS=str(os.cpu_count() or 1), OMP_WAIT_POLICY="PASSIVE")

from benchmarks.cli import compose, guarded
from common.rundir import RunDir

NO_LIMIT = 1_000_000_000
"""Steps: the clock ends it."""


def main(words: list[str]) -> int:
    """Train and save; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.supervised")
    parser.add_argument("--run", type=Path, required=True, help="holds the demonstrations and the warm start")
    parser.add_argument("--out", type=Path, required=True, help="where the model is saved")
    parser.add_argument("--seconds", type=float, required=True, help="budget of wall time")
    args = parser.parse_args(words)
    config = compose([f"run={args.run}", "role=warmstart", "tracking.enabled=false"])
    from learner.warmstart import Budget, run_warmstart_training

    rundir, budget = RunDir.open(args.run), Budget(NO_LIMIT, args.seconds)
    start = Path(config.model.path) if config.model.path else rundir.warmstart_model
    return run_warmstart_training(config, rundir, start=start, out=args.out.absolute(), budget=budget)


if __name__ == "__main__":
    sys.exit(guarded(main))
