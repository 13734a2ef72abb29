"""What trains the model: the backend, its processes and precision, and LoRA. See `common.config`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from common.errors import nearest, require

BACKENDS = ("torch", "deepspeed")
DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
EXTRAS = {"deepspeed": "deepspeed", "peft": "lora"}
"""Packages that an extra of this project brings."""


@dataclass(kw_only=True, slots=True)
class BackendConfig:
    """`torch` (one process, or several that sum their gradients) or `deepspeed` (ZeRO shards)."""

    name: str = "torch"
    processes: int = 1
    """Ranks that the learner starts on its machine; a launcher's RANK and WORLD_SIZE win over it."""
    zero_stage: int = 1
    """`deepspeed`: 1 shards the optimiser's state, 2 the gradients as well, 3 the weights as well."""
    dtype: str = "float32"
    """Of forward and backward passes; weights, gradients and moments are float32 in either."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations a second time in the backward pass instead of keeping them."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU where torch sees one."""
    collective_timeout_s: float = 300.0
    """How long a rank may keep the others waiting before the run is given up."""

    def __post_init__(self) -> None:
        for name, valid in (("name", BACKENDS), ("dtype", DTYPES), ("device", DEVICES)):
            got = getattr(self, name)
            rule = f"one of {', '.join(valid)}{nearest(got, valid)}"
            require(got in valid, f"learner.backend.{name}", rule, got)
        require(1 <= self.processes <= 1024, "learner.backend.processes", "from 1 to 1024", self.processes)
        require(self.zero_stage in (1, 2, 3), "learner.backend.zero_stage", "1, 2 or 3", self.zero_stage)
        seconds = self.collective_timeout_s
        require(1 <= seconds <= 86400, "learner.backend.collective_timeout_s", "from 1 to 86400", seconds)


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) in place of all weights."""

    rank: int = 0
    """Width of the adapters; 0 = none, every weight is trained."""
    alpha: float = 16.0
    """The adapter's product is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Linear layers that get one, by the last part of their name."""

    def __post_init__(self) -> None:
        require(0 <= self.rank <= 4096, "learner.lora.rank", "from 0 to 4096", self.rank)
        require(0 < self.alpha < 1e6, "learner.lora.alpha", "above 0 and below 1000000", self.alpha)
        named = bool(self.targets) and all(name and name.isidentifier() for name in self.targets)
        require(named, "learner.lora.targets", "a list of layer names such as [q_proj,v_proj]", self.targets)
        # In the order of the alphabet, as in adapter_config.json: equal settings give equal files.
        self.targets = sorted(set(self.targets))


def check_backend(backend: BackendConfig, lora: LoraConfig, *, deterministic: bool, trains: bool) -> None:
    """Rules across the two and the run. Raises `ConfigError` naming the key and the remedy.

    Args:
        trains: whether the role at hand, or one that it starts, loads the backend: only there must the
            packages be installed.
    """
    for package, key, other, got, chosen in (
        ("deepspeed", "learner.backend.name", "torch", backend.name, backend.name == "deepspeed"),
        ("peft", "learner.lora.rank", "0", lora.rank, lora.rank > 0),
    ):
        remedy = f"pip install -e '.[{EXTRAS[package]}]' in the checkout"
        rule = f"{other} where {package} is missing ({remedy} brings it)"
        require(not (trains and chosen) or importlib.util.find_spec(package) is not None, key, rule, got)
    for name, only in (("name", "torch"), ("processes", 1), ("dtype", "float32")):
        got = getattr(backend, name)
        rule = f"{only} when deterministic=true"
        require(not deterministic or got == only, f"learner.backend.{name}", rule, got)
