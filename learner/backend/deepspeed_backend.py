"""DeepSpeed's ZeRO (arXiv 1910.02054): optimiser state, gradients and weights in shards over the ranks.

The only file that knows the library. It is held to the plain backend's arithmetic:

    sum, not mean     DeepSpeed averages gradients over ranks; objectives are multiplied by their number first
    any number        of micro-batches between two steps (`managed_gradient_accumulation` off): `step` alone
                      ends the accumulation, as with torch
    not finite        the step is left out, on all ranks; the library does so where the norm is not finite
    float32           of weights, gradients and moments, with bfloat16 passes too (autocast): a step is never
                      lost in rounding
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config_backend import BackendConfig
from common.config_learner import OptimizerConfig
from learner.backend.forward import Forward, idle_pass
from learner.backend.group import Group
from learner.backend.optimizer import adamw, check, parse, trained
from learner.policy import call_head_once

T = TypeVar("T")

SHARDS = ("master", "exp_avg", "exp_avg_sq")
"""Flat tensors of a rank's part of one parameter group."""


class DeepSpeedBackend:
    """See `learner.backend.base.Backend`."""

    def __init__(
        self, model: PreTrainedModel, settings: BackendConfig, optimizer: OptimizerConfig, group: Group
    ) -> None:
        self.rank, self.world, self.device = group.rank, group.world, group.device
        self.model = model
        nn.Module.to(model, group.device)
        if settings.zero_stage == 3:
            call_head_once(model)
        self._stage, self._group = settings.zero_stage, group
        self._forward = Forward(self.model, settings, group.device)
        self._passes = 0
        group.join()
        with group.guard("DeepSpeed to start on every rank"):
            self._engine = start_engine(
                self._forward, adamw(self.model, optimizer), settings.zero_stage, optimizer.grad_clip
            )

    def run(self, forward: Callable[[PreTrainedModel], T]) -> T:
        with self._group.guard("a forward pass"):
            return self._forward.of(self._engine, forward)

    def backward(self, objective: Tensor) -> None:
        if not objective.requires_grad:
            self.idle()
            return
        self._passes += 1
        with self._group.guard("a backward pass"):
            self._engine.backward(objective * self.world, scale_wrt_gas=False)

    def idle(self, gradient: bool = True) -> None:
        if not gradient:
            with torch.no_grad():
                self.run(idle_pass(self.device))
            return
        self.backward(self.run(idle_pass(self.device)))

    def step(self, lr: float) -> float:
        if self._passes == 0:
            self.idle()  # an honest zero: momentum goes on. Every rank is here, since all have equal passes
        self._passes = 0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        with self._group.guard("the optimiser's step"):
            self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else math.nan

    def full_weights(self) -> dict[str, Tensor]:
        """One parameter at a time is gathered, so that no rank holds them all on its device."""
        found: dict[str, Tensor] = {}
        with self._group.guard("the weights of every rank"):
            for name, parameter in trained(self.model):
                with self._gathered(parameter):
                    if self.rank == 0:
                        found[name] = parameter.detach().cpu().clone()
        return found

    def _gathered(self, parameter: torch.nn.Parameter) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3)

    # --------------------------------------------------------------------------------------------- the shards

    def state_files(self) -> dict[str, bytes]:
        tensors: dict[str, Tensor] = {}
        for number, (master, state) in enumerate(self._shards()):
            tensors[f"master/{number}"] = master.detach().float().cpu().contiguous()
            for moment, value in state.items():
                tensors[f"{moment}/{number}"] = torch.as_tensor(value, dtype=torch.float32).cpu().contiguous()
        return {self._file: dump_tensors(tensors)}

    def state_names(self) -> list[str]:
        return [self._file]

    def load_state(self, files: Mapping[str, bytes]) -> None:
        found, shapes, masters = parse(self._file, files), dict[str, torch.Size](), list[Tensor]()
        stepped = any(name.startswith("step/") for name in found)
        for number, (master, _) in enumerate(self._shards()):
            masters.append(master)
            for part in SHARDS if stepped else SHARDS[:1]:
                shapes[f"{part}/{number}"] = master.shape
            if stepped:
                shapes[f"step/{number}"] = torch.Size(())
        check(self._file, found, shapes)
        adam = self._engine.optimizer.optimizer
        adam.state.clear()
        with torch.no_grad():
            for number, master in enumerate(masters):
                master.copy_(found[f"master/{number}"])
                if stepped:
                    state = {part: found[f"{part}/{number}"].to(master.device) for part in SHARDS[1:]}
                    adam.state[master] = {"step": found[f"step/{number}"].clone(), **state}
        with self._group.guard("the weights of every rank"):
            self._spread()

    @property
    def _file(self) -> str:
        return f"optimizer-zero{self._stage}-rank{self.rank:04d}-of-{self.world:04d}.safetensors"

    def _shards(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """This rank's flat float32 weights of each parameter group, and AdamW's state of them."""
        zero = self._engine.optimizer
        groups = (
            zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        )
        yield from ((master, zero.optimizer.state.get(master, {})) for master in groups)

    def _spread(self) -> None:
        """From the shards to the model's parameters."""
        zero = self._engine.optimizer
        if self._stage < 3:
            zero.update_lp_params()
            return
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def start_engine(module: Forward, optimizer: torch.optim.Optimizer, stage: int, grad_clip: float) -> Any:
    """DeepSpeed's engine in the process group that exists already."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls torch's collectives by names that torch is about to change: nothing for a user to act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it, with one rank too
    import deepspeed

    if not torch.cuda.is_available():
        # On a CPU it would look for a C++ compiler and spend its first minute on an extension for sums
        # between processes, which inference alone uses. Nothing else reads this table of what it can compile.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": grad_clip,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine
