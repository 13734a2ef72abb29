"""What only a GPU can show: packed trees under FlexAttention, training in bfloat16, tokens per second.

    bash scripts/gpu_check.sh          python -m benchmarks.gpu_check [--device cuda|cpu] [--small]

consumes: one device.  produces: one line a check, exit code 1 if one failed.  waits for: the device, less
than 8 minutes.  On the CPU the same checks compare attention in chunks with SDPA under the whole mask.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.cli import guarded
from benchmarks.results import BenchmarkFailed
from benchmarks.training_trees import VOCABULARY, training_rows
from common.config_learner import LossConfig
from learner.attention import dense_mask, prepare
from learner.batching import MicroBatch, micro_batches
from learner.loss import LOSSES
from learner.policy import logprobs_at, token_logprobs, use_threads
from learner.rows import Row

EXACT = {"logprobs": 1e-4, "gradient": 1e-3}
"""float32: two kernels sum in different orders, and some tens of layers add up."""
ROUNDED = {"logprobs": 0.1, "gradient": 0.1}
"""bfloat16: 8 bits of mantissa."""
STEPS = 8


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of the work."""

    hidden: int
    layers: int
    heads: int
    shared_heads: int
    sharing: int
    trees: int
    budget: int
    seconds: float
    """Of each measurement of speed."""


LARGE = Size(1024, 16, 16, 8, sharing=8, trees=16, budget=8192, seconds=20.0)
"""A quarter of a billion weights: seconds of compiling, then enough work to keep a data centre's GPU busy."""
SMALL = Size(32, 2, 4, 2, sharing=2, trees=1, budget=2560, seconds=0.0)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str

    def line(self) -> str:
        return f"{self.name}: {'ok' if self.ok else 'FAILED'}, {self.found}"


def make_model(size: Size, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    config = cast(Any, LlamaConfig)(
        vocab_size=VOCABULARY, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.shared_heads,
        intermediate_size=3 * size.hidden, max_position_embeddings=8192, tie_word_embeddings=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return cast(PreTrainedModel, LlamaForCausalLM(config).eval().to(device))


def half(device: torch.device, wanted: bool = True) -> AbstractContextManager[Any]:
    """Matrix products in bfloat16, weights and optimiser in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


# --------------------------------------------------------------------------------------------- the checks


def under_whole_mask(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The reference: SDPA with every pair of the line in memory."""
    assert batch.ends_BT is not None, "only a packed batch has a mask"
    inputs = {
        "input_ids": batch.ids_BT, "position_ids": batch.positions_BT, "use_cache": False,
        "attention_mask": dense_mask(batch.ends_BT),
    }  # fmt: skip
    return logprobs_at(model, inputs, batch.lines_N, batch.sources_N, batch.targets_N, 1.0).logprobs


def objective(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    return LOSSES["ppo"].function(batch.streams(logprobs, batch.behaviour_N), LossConfig()).loss.sum()


def packing(model: PreTrainedModel, rows: Sequence[Row], size: Size, *, bf16: bool) -> Check:
    """The packed line as the learner computes it, against the whole mask: log-probabilities and gradients."""
    device = next(model.parameters()).device
    batch = next(micro_batches(rows, range(len(rows)), size.budget // 2, "tree")).to(device)
    prepare(model)
    found = []
    ways: list[Callable[[], Tensor]] = [
        lambda: token_logprobs(model, batch, 1.0).logprobs,
        lambda: under_whole_mask(model, batch),
    ]
    for way in ways:
        model.zero_grad()
        with half(device, bf16):
            logprobs = way()
        torch.autograd.backward(objective(batch, logprobs))
        gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        found.append((logprobs.detach(), gradient))
    (mine, my_gradient), (other, other_gradient) = found
    off = {
        "logprobs": float((mine - other).abs().max()),
        "gradient": float((my_gradient - other_gradient).norm() / other_gradient.norm()),
    }
    most = ROUNDED if bf16 else EXACT
    return Check(
        f"packing in {'bfloat16' if bf16 else 'float32'}",
        all(off[name] <= most[name] for name in most),
        f"{batch.computed_tokens} tokens; "
        + ", ".join(f"{name} off by {off[name]:.1e} (at most {most[name]:.0e})" for name in most),
    )


def training(model: PreTrainedModel, rows: Sequence[Row], size: Size) -> Check:
    """Steps on one batch in bfloat16: the objective must fall, and nothing may overflow."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    values = [_step(model, optimizer, rows, size, device, "tree")[0] for _ in range(STEPS)]
    ok = all(map(math.isfinite, values)) and values[-1] < values[0]
    fell = f"objective {values[0]:.4f} -> {values[-1]:.4f} in {STEPS} steps"
    return Check("training in bfloat16", ok, fell)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Sequence[Row], size: Size,
    device: torch.device, layout: str,
) -> tuple[float, int]:  # fmt: skip
    total = torch.zeros((), device=device)
    computed = 0
    optimizer.zero_grad()
    for batch in micro_batches(rows, range(len(rows)), size.budget, layout):
        batch = batch.to(device)
        computed += batch.computed_tokens
        with half(device):
            logprobs = token_logprobs(model, batch, 1.0).logprobs
        value = objective(batch, logprobs) / len(rows)
        torch.autograd.backward(value)
        total += value.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(total), computed


def speed(model: PreTrainedModel, rows: Sequence[Row], size: Size) -> Check:
    """Tokens of branches trained per second in each layout; compiling is not counted."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    tokens = sum(row.length - 1 for row in rows)
    rates = {}
    for layout in ("rows", "tree"):
        computed = _step(model, optimizer, rows, size, device, layout)[1]
        began, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - began < size.seconds:
            _step(model, optimizer, rows, size, device, layout)  # its value is read, so that it is over
            steps += 1
        seconds = (time.perf_counter() - began) / steps
        rates[layout] = tokens / seconds, computed / seconds
    (by_rows, _), (packed, through) = rates["rows"], rates["tree"]
    return Check(
        "speed",
        packed > 0 and by_rows > 0,
        f"{packed:.0f} tokens of branches a second packed ({through:.0f} through the model), {by_rows:.0f} "
        f"branch by branch: {packed / by_rows:.2f} times",
    )


def checks(device: torch.device, size: Size) -> Iterator[Check]:
    """All of them, each on fresh weights."""
    rows = training_rows(size.sharing, size.trees)
    yield packing(make_model(size, device), rows, size, bf16=False)
    yield packing(make_model(size, device), rows, size, bf16=True)
    yield training(make_model(size, device), rows, size)
    yield speed(make_model(size, device), rows, size)


def main(words: list[str]) -> int:
    """Check and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model: for --device cpu")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkFailed(
            "there is no GPU here that torch can use; run this where there is, or with --device cpu --small"
        )
    use_threads()
    failed = 0
    for check in checks(torch.device(args.device), SMALL if args.small else LARGE):
        print(check.line(), flush=True)
        failed += not check.ok
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
