"""What cannot be packed is refused in one sentence that names the reason and the remedy."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from common.errors import ConfigError
from learner.batching import micro_batches
from learner.packable import check_packable
from learner.policy import token_logprobs
from tests.learner.forests import ARCHITECTURES, SHAPE, random_rows, tiny_model

SMALL = {name: value for name, value in SHAPE.items() if name not in ("attn_implementation",)}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
REFUSED = {
    "sliding_attention": (Gemma2ForCausalLM, Gemma2Config(**SMALL)),
    "layers of the kind sliding_attention": (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL)),
    "a sliding window of 4096 tokens": (MistralForCausalLM, MistralConfig(**SMALL)),
    "the kind sliding": (
        Qwen2ForCausalLM,
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    "sliding_attention;": (GptOssForCausalLM, GptOssConfig(**SMALL, num_local_experts=2)),
    "linear_attention": (Qwen3NextForCausalLM, Qwen3NextConfig(**{**SMALL, "num_experts": 2})),
    "kind linear_attention;": (
        MambaForCausalLM,
        MambaConfig(vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=1),
    ),
    "rotary": (GPT2LMHeadModel, GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2)),
    "depend on the length": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=DYNAMIC)),
    "positions other": (BloomForCausalLM, BloomConfig(vocab_size=24, hidden_size=16, n_layer=1, n_head=2)),
    "ALiBi": (
        FalconForCausalLM,
        FalconConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_with_the_reason_and_the_remedy(reason):
    kind, config = REFUSED[reason]
    with torch.device("meta"):
        model = kind(config)
    with pytest.raises(ConfigError, match=reason) as caught:
        check_packable(model)
    assert str(caught.value).endswith("set learner.packing=rows") and "\n" not in str(caught.value)
    assert config.model_type in str(caught.value)


def test_attention_sinks_are_refused_even_where_all_layers_are_full():
    config = GptOssConfig(**SMALL, num_local_experts=2, layer_types=["full_attention"] * 2)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    with pytest.raises(ConfigError, match="attention sinks"):
        check_packable(model)


def test_a_model_that_carries_a_state_along_is_refused(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "_is_stateful", True)
    with pytest.raises(ConfigError, match="carries along the line"):
        check_packable(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_with_full_attention_and_rotary_positions_are_taken(name):
    check_packable(tiny_model(name))


def test_a_window_that_a_model_has_but_does_not_use_is_no_obstacle():
    check_packable(tiny_model("qwen2", sliding_window=8, use_sliding_window=False))


def test_a_refused_model_still_trains_branch_by_branch():
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, attn_implementation="eager")).eval()
    rows = random_rows(0)
    packed, by_rows = (next(iter(micro_batches(rows, [0, 1], 1000, layout))) for layout in ("tree", "rows"))
    with pytest.raises(ConfigError, match="packing=rows"):
        token_logprobs(model, packed, 1.0)
    found = token_logprobs(model, by_rows, 0.7)
    for token in range(len(found.logprobs)):
        line, source = int(by_rows.lines_N[token]), int(by_rows.sources_N[token])
        with torch.no_grad():
            logits = model(input_ids=by_rows.ids_BT[line : line + 1]).logits[0, source]
        expected = torch.log_softmax(logits / 0.7, -1)[by_rows.targets_N[token]]
        # Its final soft cap included.
        assert float(found.logprobs[token].detach()) == pytest.approx(float(expected), abs=1e-5)
