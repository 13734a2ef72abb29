"""One process: DeepSpeed against torch at every stage, precision, recomputation, and what does not fit."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config_backend import BackendConfig
from common.config_learner import LearnerConfig, OptimizerConfig
from common.errors import StorageError
from learner.backend import Backend, make_backend
from learner.backend.group import Group, open_group
from learner.policy import build_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

NAMES = [("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
LR = 0.01
TOLERANCE = LR / 1000
"""Sums in another order, in float32; AdamW's first steps divide a gradient by its own size, small ones too."""


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with open_group(BackendConfig(device="cpu"), Path()) as found:
        yield found


def make(group: Group, name: str = "torch", stage: int = 1, *, seed: int = 3, **more: Any) -> Backend:
    settings = LearnerConfig(
        backend=BackendConfig(name=name, zero_stage=stage, device="cpu", **more),
        optimizer=OptimizerConfig(weight_decay=0.1, grad_clip=0.7),
    )
    return make_backend(settings, build_model(SMALL_MODEL, TOKENIZER, seed), group)


def objective(backend: Backend, row: int = 0) -> torch.Tensor:
    ids = torch.randint(0, 24, (1, 9), generator=torch.Generator().manual_seed(row))

    def forward(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[0, :-1]).float()
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]), hidden

    return -backend.run(forward)[0].sum() / 10


def train(backend: Backend, steps: int, first: int = 0) -> list[float]:
    norms = []
    for step in range(first, first + steps):
        for row in range(step % 3 + 1):  # another number of micro-batches each time
            backend.backward(objective(backend, 10 * step + row))
        norms.append(backend.step(LR))
    return norms


def differ(one: Backend, other: Backend) -> float:
    mine, theirs = one.full_weights(), other.full_weights()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


@pytest.mark.timeout(240)
def test_every_stage_of_deepspeed_gives_the_weights_and_norms_of_torch(group):
    plain = make(group)
    norms = train(plain, 4)
    for name, stage in NAMES[1:]:
        other = make(group, name, stage)
        assert train(other, 4) == pytest.approx(norms, rel=1e-5), "the norm before the clip"
        assert differ(plain, other) < TOLERANCE, (name, stage)


@pytest.mark.parametrize("name, stage", NAMES)
def test_a_step_without_any_gradient_is_momentum_alone(group, name, stage):
    plain, other = make(group), make(group, name, stage)
    for backend in (plain, other):
        train(backend, 1)
        backend.idle()
        assert backend.step(LR) == 0
    assert differ(plain, other) < TOLERANCE
    assert differ(other, make(group)) > LR


@pytest.mark.parametrize("name, stage", NAMES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_forgotten(group, name, stage):
    backend, twin = make(group, name, stage), make(group, name, stage)
    for each in (backend, twin):
        train(each, 2)
    backend.backward(objective(backend) * float("inf"))
    assert not math.isfinite(backend.step(LR))
    assert differ(backend, twin) == 0
    assert train(backend, 2, first=2) == train(twin, 2, first=2)
    assert differ(backend, twin) == 0


@pytest.mark.parametrize("name, stage", NAMES)
def test_a_backend_that_takes_up_the_state_of_another_continues_bit_for_bit(group, name, stage):
    whole, first, second = (make(group, name, stage, seed=seed) for seed in (3, 3, 4))
    train(whole, 4)
    train(first, 2)
    with torch.no_grad():
        weights = first.full_weights()
        if stage < 3:
            for key, parameter in second.model.named_parameters():
                parameter.copy_(weights[key])
        else:  # its own weights come with its master weights
            assert differ(first, second) > 0
    second.load_state(first.state_files())
    assert differ(first, second) == 0
    train(second, 2, first=2)
    assert differ(whole, second) == 0


@pytest.mark.parametrize("name, stage", NAMES[:2])
def test_a_state_from_before_the_first_step_can_be_taken_up(group, name, stage):
    one, other = make(group, name, stage), make(group, name, stage)
    other.load_state(one.state_files())
    train(one, 1)
    train(other, 1)
    assert differ(one, other) == 0


@pytest.mark.parametrize("name, stage", [("torch", 1), ("deepspeed", 2)])
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_assigned(group, name, stage):
    backend = make(group, name, stage)
    train(backend, 1)
    before = backend.state_files()
    (file, data), *_ = before.items()
    for files, sentence in (
        ({}, "lacks optimizer"),
        ({file: data[: len(data) // 2]}, "is damaged"),
        (make_other(group, name, stage).state_files(), "belongs to another model"),
        (spoilt(file, data), "not finite"),
    ):
        with pytest.raises(StorageError, match=sentence):
            backend.load_state(files)
        assert backend.state_files() == before


def make_other(group: Group, name: str, stage: int) -> Backend:
    from common.config import ModelConfig

    settings = LearnerConfig(backend=BackendConfig(name=name, zero_stage=stage, device="cpu"))
    model = build_model(ModelConfig(hidden_size=8, layers=1, heads=1, intermediate_size=8), TOKENIZER, 0)
    backend = make_backend(settings, model, group)
    train(backend, 1)
    return backend


def spoilt(file: str, data: bytes) -> dict[str, bytes]:
    from safetensors.torch import load, save

    tensors = load(data)
    next(value for key, value in tensors.items() if key.startswith("exp_avg/")).view(-1)[0] = math.nan
    return {file: save(tensors)}


@pytest.mark.parametrize("name, stage", NAMES)
def test_recomputed_activations_give_the_same_gradient(group, name, stage):
    calls = {False: 0, True: 0}
    backends = {}
    for recompute in calls:
        backend = backends[recompute] = make(group, name, stage, gradient_checkpointing=recompute)
        layer: Any = backend.model.base_model.layers[0].mlp

        def count(*_: object, recompute: bool = recompute) -> None:
            calls[recompute] += 1

        layer.register_forward_pre_hook(count)
        train(backend, 3)
    assert calls[True] == 2 * calls[False], "each layer's pass is computed twice"
    assert differ(backends[False], backends[True]) < 1e-7
    assert not any(module.training for module in backends[True].model.base_model.layers[0].mlp.modules())


@pytest.mark.parametrize("name, stage", NAMES)
def test_a_bfloat16_gradient_is_close_and_weights_and_moments_stay_float32(group, name, stage):
    exact, rough = make(group), make(group, name, stage, dtype="bfloat16")
    norms = [(backend, train(backend, 1)[0]) for backend in (exact, rough)]
    assert norms[1][1] == pytest.approx(norms[0][1], rel=0.02)
    assert norms[1][1] != norms[0][1]
    # One step of AdamW moves each weight by about the rate, whatever the gradient's size.
    assert differ(exact, rough) <= 2.1 * LR
    moved = mean_difference(exact, rough) / LR
    assert moved < 0.05, "few weights took another direction"
    assert all(value.dtype == torch.float32 for value in rough.full_weights().values())
    from safetensors.torch import load

    (data,) = rough.state_files().values()
    assert {value.dtype for value in load(data).values()} == {torch.float32}


def mean_difference(one: Backend, other: Backend) -> float:
    mine, theirs = one.full_weights(), other.full_weights()
    return float(torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in mine]).mean())


def test_a_small_step_is_not_lost_in_bfloat16(group):
    """With weights kept in bfloat16, a step of 1e-5 on a weight of 0.02 would round to nothing."""
    backend = make(group, dtype="bfloat16")
    before = backend.full_weights()["lm_head.weight"].clone()
    backend.backward(objective(backend))
    backend.step(1e-6)
    assert float((backend.full_weights()["lm_head.weight"] - before).abs().max()) > 5e-7


@pytest.mark.parametrize("name, stage", [("torch", 1), ("deepspeed", 3)])
def test_a_pass_without_gradient_leaves_none(group, name, stage):
    backend = make(group, name, stage, gradient_checkpointing=True)
    with torch.no_grad():
        assert not objective(backend).requires_grad
    backend.idle(gradient=False)
    backend.idle()
    assert backend.step(LR) == 0


def compilations(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls: list[object] = []
    import torch.utils.cpp_extension as cpp

    monkeypatch.setattr(cpp, "load", lambda *args, **more: calls.append(args))
    return lambda: len(calls)


def test_deepspeed_starts_on_a_cpu_without_a_compiler(group, monkeypatch):
    compiled = compilations(monkeypatch)
    monkeypatch.setenv("PATH", "")
    train(make(group, "deepspeed", 2), 1)
    assert compiled() == 0
