"""What may be said of the backend and of LoRA, and what is answered to the rest."""

import importlib.util

import pytest

from common.config import Config, Role, validate
from common.config_backend import BackendConfig, LoraConfig
from common.config_learner import LearnerConfig
from common.errors import ConfigError


def config(role: Role = Role.LEARNER, *, deterministic: bool = False, **learner: object) -> Config:
    more = {"max_policy_lag": 0} if deterministic else {}
    found = Config(role=role, deterministic=deterministic, learner=LearnerConfig(**more, **learner))  # type: ignore[arg-type]
    found.allocator.max_score_staleness = 0
    return found


def test_today_s_runs_are_trained_by_torch_in_one_process_with_all_weights_in_float32():
    settings = LearnerConfig()
    assert (settings.backend.name, settings.backend.processes, settings.backend.dtype) == (
        "torch",
        1,
        "float32",
    )
    assert settings.lora.rank == 0 and not settings.backend.gradient_checkpointing
    validate(config())


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"name": "deepsped"}, r"learner.backend.name.*did you mean 'deepspeed'"),
        ({"processes": 0}, "learner.backend.processes"),
        ({"zero_stage": 4}, "learner.backend.zero_stage must be 1, 2 or 3"),
        ({"dtype": "float16"}, "learner.backend.dtype"),
        ({"device": "gpu"}, "learner.backend.device"),
        ({"collective_timeout_s": 0.0}, "learner.backend.collective_timeout_s"),
    ],
)
def test_a_backend_that_cannot_be_is_refused_by_the_key(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        BackendConfig(**wrong)


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"rank": -1}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"targets": []}, "targets"),
        ({"targets": ["a.b"]}, "targets"),
    ],
)
def test_adapters_that_cannot_be_are_refused_by_the_key(wrong, key):
    with pytest.raises(ConfigError, match=f"learner.lora.{key}"):
        LoraConfig(**wrong)


def test_the_order_of_targets_does_not_matter():
    assert LoraConfig(targets=["v_proj", "q_proj", "v_proj"]) == LoraConfig(targets=["q_proj", "v_proj"])


@pytest.mark.parametrize("chosen", [{"name": "deepspeed"}, {"processes": 2}, {"dtype": "bfloat16"}])
def test_bit_for_bit_runs_are_trained_by_one_process_of_torch(chosen):
    with pytest.raises(ConfigError, match="when deterministic=true"):
        validate(config(deterministic=True, backend=BackendConfig(**chosen)))


@pytest.mark.parametrize(
    "chosen, remedy",
    [
        ({"backend": BackendConfig(name="deepspeed")}, r"pip install -e '\.\[deepspeed\]'"),
        ({"lora": LoraConfig(rank=4)}, r"pip install -e '\.\[lora\]'"),
    ],
)
def test_a_library_that_is_missing_is_named_where_it_is_needed_and_only_there(monkeypatch, chosen, remedy):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=remedy):
        validate(config(**chosen))
    validate(config(Role.ALLOCATOR, **chosen))


def test_both_bounds_of_alpha_are_told():
    with pytest.raises(
        ConfigError, match=r"learner\.lora\.alpha must be above 0 and below 1000000, got 1000000\.0"
    ):
        LoraConfig(alpha=1e6)
