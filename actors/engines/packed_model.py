"""A causal language model of transformers that reads packed steps over a slot store.

The weights always run in float32: the learner recomputes these log-probabilities, and lower precision
would add noise of its own to every importance ratio. Files in bfloat16 or float16 are widened, exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engines import packed_attention
from actors.engines.adapter import with_adapter
from actors.engines.base import Ids
from actors.engines.packed_attention import KeyValueStore, Positions, StepPlan
from actors.engines.sampling import projection
from common.errors import ConfigError, EngineError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Stored types that float32 holds exactly."""
BOOKKEEPING_KEYS = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Entries of config.json that do not change what the model computes."""
PROBE_LENGTHS = ((11, 4), (9, 1), (2, 7))
"""Tokens of three rows in two steps of the self-check: ragged, with and without padding."""
PROBE_TOLERANCE = 1e-4
"""Largest relative difference of logits between the packed path and transformers' own. Rounding gives
1e-6; an architecture that the packed path misreads is off by far more."""

Tensors = dict[str, torch.Tensor]


def read_config(directory: Path) -> dict[str, Any]:
    """What `config.json` says of the architecture, bookkeeping left out."""
    path = directory / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} is no readable model configuration: {error}") from error
    return {key: value for key, value in settings.items() if key not in BOOKKEEPING_KEYS}


class PackedModel:
    """The model, its key-value store and its feature projection.

    Not safe for use from several threads: `forward` and `assign` belong to the engine's worker.
    """

    def __init__(self, directory: Path, num_slots: int, max_context: int, features: int) -> None:
        """Build from `config.json`, with random weights; raises `ConfigError` when it cannot run packed."""
        self.settings = read_config(directory)
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"transformers does not know the model in {directory}: {error}") from error
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and max_context > longest:
            raise ConfigError(
                f"engine.max_context must be at most the model's {longest} positions, got {max_context}"
            )
        self.store = KeyValueStore(num_slots, max_context)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=packed_attention.NAME, dtype=torch.float32, trust_remote_code=False
        )
        self._model = model.eval().requires_grad_(False)
        self._head_input: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._see_head_input)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._projection = projection(model.get_output_embeddings().weight.shape[1], features)
        self._check_against_transformers()

    def _see_head_input(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # The input of the output layer is the last hidden state after the final norm, in every model.
        self._head_input = inputs[0]

    def forward(self, plan: StepPlan, outputs: Positions) -> torch.Tensor:
        """[len(outputs), V] logits after the packed tokens at `outputs`; stores all new keys and values."""
        at = torch.from_numpy(outputs)
        logits: torch.Tensor = self._model(
            input_ids=plan.ids,
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=at,
            slot_plan=plan,
        ).logits[0]
        return logits

    def project(self, rows: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[len(rows), F] features of some outputs of the last `forward`."""
        assert self._head_input is not None, "features are read after a forward pass"
        return (self._head_input[0, rows] @ self._projection).numpy()

    def read_weights(self, directory: Path) -> Tensors:
        """Read and check the weights in a directory, an adapter's added; touches nothing.

        Raises:
            EngineError: other architecture, or names, shapes, types or values that do not fit; the
                message names the tensor.
        """
        settings = read_config(directory)
        for key in sorted(settings.keys() | self.settings.keys()):
            if settings.get(key) != self.settings.get(key):
                raise EngineError(
                    f"{directory / CONFIG_FILE}: {key} must stay {self.settings.get(key)!r} while the engine "
                    f"runs, got {settings.get(key)!r}"
                )
        path = directory / WEIGHTS_FILE
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} is no readable safetensors file: {error}") from error
        return self._checked(path, with_adapter(directory, tensors))

    def _checked(self, path: Path, tensors: Tensors) -> Tensors:
        state: Tensors = self._model.state_dict()
        shared: dict[int, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name not in state:
                raise EngineError(f"{path}: tensor {name} is not part of the model")
            _check_tensor(path, name, tensor, state[name])
            first = shared.setdefault(state[name].data_ptr(), tensor)
            if not torch.equal(first, tensor):
                raise EngineError(f"{path}: tensor {name} differs from the one it is tied to")
        for name, tensor in state.items():
            if tensor.data_ptr() not in shared:
                raise EngineError(f"{path}: tensor {name} is missing")
        return tensors

    def assign(self, tensors: Tensors) -> None:
        """Copy checked weights into the model; tied parameters stay tied."""
        state = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in tensors.items():
                state[name].copy_(tensor)

    @torch.inference_mode()
    def _check_against_transformers(self) -> None:
        """Compare two packed, ragged steps with transformers' own forward pass over the same tokens."""
        lengths = np.array(PROBE_LENGTHS)[: self.store.num_slots]
        rows, first, total = len(lengths), lengths[:, 0], lengths.sum(1)
        tokens = np.random.default_rng(0).integers(self.vocab_size, size=(rows, total.max()), dtype=np.int32)
        if total.max() > self.store.max_context:
            raise ConfigError(
                f"engine.max_context must be at least {total.max()}, got {self.store.max_context}"
            )
        slots = np.arange(rows)
        self._probe(tokens, slots, np.zeros_like(first), first)
        packed = self._probe(tokens, slots, first, total)
        self._model.set_attn_implementation("eager")
        for row, logits in zip(range(rows), packed, strict=True):
            ids = torch.from_numpy(tokens[row, : total[row]].astype(np.int64))[None]
            plain = self._model(input_ids=ids, use_cache=False).logits[0, -1]
            gap = float((plain - logits).abs().max() / plain.abs().max())
            if not gap < PROBE_TOLERANCE:
                raise ConfigError(
                    f"model_type {self.settings.get('model_type')!r} does not run packed (logits differ by "
                    f"{gap:.1e} from transformers); use engine=vllm"
                )
        self._model.set_attn_implementation(packed_attention.NAME)

    def _probe(self, tokens: Ids, slots: Positions, starts: Positions, stops: Positions) -> torch.Tensor:
        plan = packed_attention.plan_step(self.store, tokens, slots, starts, stops)
        logits = self.forward(plan, plan.ends - 1)
        return logits[torch.from_numpy(np.argsort(plan.order))]


def _check_tensor(path: Path, name: str, tensor: torch.Tensor, current: torch.Tensor) -> None:
    if tensor.shape != current.shape:
        raise EngineError(
            f"{path}: tensor {name} must have shape {tuple(current.shape)}, got {tuple(tensor.shape)}"
        )
    if tensor.dtype not in WIDENED:
        raise EngineError(f"{path}: tensor {name} must be a float of 32 bits or fewer, got {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise EngineError(f"{path}: tensor {name} must be finite, got NaN or infinity")
