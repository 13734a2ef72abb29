"""One process of `benchmarks.tree_training`: updates of one model on the same rows, in both layouts.

    python -m benchmarks.tree_training_arm time|memory --sharing N --layout rows|tree --out FILE …

    time     repeats × (rows, packed, packed again), every other time backwards: seconds of each update
    memory   one update of one layout in a fresh process: how far its resident memory rose

An update is what the learner does: rows to micro-batches, forward, loss, backward, AdamW step. Memory counts
from a process that has the model, its gradients and AdamW's moments: what remains is what the passes need.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.cli import guarded
from benchmarks.results import BenchmarkFailed
from benchmarks.training_trees import BRANCH, VOCABULARY, training_rows
from common.config_learner import LossConfig
from learner.batching import micro_batches
from learner.layout import lay_out, path_of
from learner.loss import LOSSES
from learner.policy import token_logprobs, use_threads
from learner.rows import Row

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 384, 6, 6, 1024
"""11.4 million weights, 10.6 of them in the layers."""
PACKED_AGAIN = "tree again"
"""The null control: the same layout once more."""


class Trainee:
    """A model with its optimiser, and one update of it."""

    def __init__(self, budget: int) -> None:
        torch.manual_seed(0)
        config = cast(Any, LlamaConfig)(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=HEADS, intermediate_size=INTERMEDIATE, max_position_embeddings=8 * BRANCH,
            tie_word_embeddings=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.model: PreTrainedModel = LlamaForCausalLM(config).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.budget = budget

    def update(self, rows: Sequence[Row], layout: str) -> int:
        """One step on all rows; returns the tokens that went through the model."""
        computed = 0
        for batch in micro_batches(rows, range(len(rows)), self.budget, layout):
            computed += batch.computed_tokens
            logprobs = token_logprobs(self.model, batch, 1.0).logprobs
            loss = LOSSES["ppo"].function(batch.streams(logprobs, batch.behaviour_N), LossConfig()).loss
            (loss.sum() / len(rows)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return computed


def token_ratio(rows: Sequence[Row]) -> float:
    """Input tokens of the rows for each different one: what packing can save at most."""
    trees: dict[int, list[Row]] = {}
    for row in rows:
        trees.setdefault(row.tree, []).append(row)
    unique = sum(lay_out(map(path_of, of_tree)).length for of_tree in trees.values())
    return sum(row.length - 1 for row in rows) / unique


def timed(trainee: Trainee, rows: Sequence[Row], repeats: int) -> dict[str, Any]:
    """Seconds of each update by arm, in an order that turns round at every repeat."""
    arms = ("rows", "tree", PACKED_AGAIN)
    seconds: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    computed: dict[str, int] = {}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else arms[::-1]:
            cpu, wall = time.process_time(), time.perf_counter()
            computed[arm] = trainee.update(rows, "rows" if arm == "rows" else "tree")
            seconds[arm].append({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})
    return {"seconds": seconds, "computed": computed}


def risen(trainee: Trainee, rows: Sequence[Row], layout: str) -> dict[str, Any]:
    """MiB by which the highest resident memory of one update lies above that before it."""
    before = _resident("VmRSS")
    # Forgets the highest so far; where the kernel forbids it, the process's own start may hide a small rise.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    computed = trainee.update(rows, layout)
    return {"mib": _resident("VmHWM") - before, "computed": {layout: computed}}


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise BenchmarkFailed(f"/proc/self/status does not tell {name}; memory is measured on Linux only")


def options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree_training_arm")
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--sharing", type=int, required=True)
    parser.add_argument("--trees", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layout", choices=["rows", "tree"], default="tree")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Measure and write a JSON file; returns the exit code."""
    args = options(words)
    use_threads()
    trainee, rows = Trainee(args.budget), training_rows(args.sharing, args.trees)
    # Gradients and moments are made, and the kernels' own buffers.
    trainee.update(rows[:2], args.layout)
    measured = (
        timed(trainee, rows, args.repeats) if args.what == "time" else risen(trainee, rows, args.layout)
    )
    shape = {
        "branches": len(rows),
        "tokens_of_branches": sum(row.length - 1 for row in rows),
        "token_ratio": token_ratio(rows),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    args.out.write_text(json.dumps({**shape, **measured}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
