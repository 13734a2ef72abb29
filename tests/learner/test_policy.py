"""Log-probabilities are those of the distribution that was sampled; models load whole or not at all."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as dump
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from common.errors import StorageError
from common.tokenizer import WordTokenizer
from learner.batching import micro_batches
from learner.policy import _logits as real
from learner.policy import (
    build_model,
    call_head_once,
    load_model,
    logprobs_at,
    model_files,
    token_logprobs,
    use_threads,
)
from tests.learner.forests import SHAPE, random_rows, tiny_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

MODEL = build_model(SMALL_MODEL, TOKENIZER, seed=1)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def logprobs_by_hand(ids: list[int], temperature: float) -> np.ndarray:
    """log softmax(logits / T) of each token after the first, one row alone, in double precision."""
    with torch.no_grad():
        logits = MODEL(input_ids=torch.tensor([ids])).logits[0].double().numpy() / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    full = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.array([full[at, ids[at + 1]] for at in range(len(ids) - 1)])


def found(rows: list[list[int]], temperature: float, padding: int = 0) -> list[np.ndarray]:
    width = max(map(len, rows))
    padded = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
    places = [(b, t) for b, row in enumerate(rows) for t in range(1, len(row))]
    rows_N, at_N = torch.tensor([b for b, _ in places]), torch.tensor([t for _, t in places])
    with torch.no_grad():
        targets_N = padded[rows_N, at_N]
        all_N = logprobs_at(MODEL, {"input_ids": padded}, rows_N, at_N - 1, targets_N, temperature).logprobs
    return list(np.split(all_N.numpy(), np.cumsum([len(row) - 1 for row in rows])[:-1]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logits_are_divided_by_the_temperature_before_the_softmax(temperature):
    ids = [3, 9, 4, 21, 7]
    np.testing.assert_allclose(found([ids], temperature)[0], logprobs_by_hand(ids, temperature), atol=1e-5)
    scaled_afterwards = logprobs_by_hand(ids, 1.0) / temperature
    if temperature != 1.0:
        assert not np.allclose(found([ids], temperature)[0], scaled_afterwards, atol=1e-3)


def test_the_probabilities_of_all_words_sum_to_one_at_any_temperature():
    every = torch.arange(TOKENIZER.vocab_size)
    rows = torch.zeros(len(every), dtype=torch.long)
    result = logprobs_at(MODEL, {"input_ids": torch.tensor([[3, 4, 5]])}, rows, rows + 2, every, 0.3)
    assert float(result.logprobs.detach().exp().sum()) == pytest.approx(1, abs=1e-5)
    entropy = -float((result.logprobs.exp() * result.logprobs).detach().sum())
    assert float(result.entropies[0]) == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("padding", [0, 2, 23])
def test_filling_up_a_row_changes_nothing_whatever_it_is_filled_with(padding):
    rows = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [0, 2, 0, 2, 1]]
    for row, logprobs in zip(rows, found(rows, 0.7, padding), strict=True):
        np.testing.assert_allclose(logprobs, logprobs_by_hand(row, 0.7), atol=2e-5)


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    again, other = build_model(SMALL_MODEL, TOKENIZER, seed=1), build_model(SMALL_MODEL, TOKENIZER, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    mine = weights(MODEL)
    assert all(torch.equal(mine[name], tensor) for name, tensor in weights(again).items())
    assert not torch.equal(mine["lm_head.weight"], weights(other)["lm_head.weight"])


def test_embeddings_are_untied_and_the_pad_word_learns_like_any_other():
    assert not torch.equal(MODEL.get_input_embeddings().weight, MODEL.get_output_embeddings().weight)
    assert MODEL.get_input_embeddings().padding_idx is None
    assert MODEL.config.eos_token_id == TOKENIZER.end_id


def write(path, files: dict[str, bytes]):
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_a_saved_model_loads_bit_for_bit_here_and_with_transformers_alone(tmp_path):
    path = write(tmp_path / "model", model_files(MODEL, TOKENIZER))
    for loaded in (load_model(path), AutoModelForCausalLM.from_pretrained(path, local_files_only=True)):
        expected = weights(MODEL)
        assert {name: torch.equal(expected[name], t) for name, t in weights(loaded).items()} == dict.fromkeys(
            expected, True
        )
    assert WordTokenizer.load(path).sha256 == TOKENIZER.sha256


def test_equal_weights_give_equal_bytes():
    assert model_files(MODEL, TOKENIZER) == model_files(
        build_model(SMALL_MODEL, TOKENIZER, seed=1), TOKENIZER
    )


def test_a_missing_model_names_the_folder_and_the_remedy(tmp_path):
    with pytest.raises(StorageError, match="run role=warmstart first"):
        load_model(tmp_path / "nothing")


def test_a_model_with_a_missing_tensor_is_refused_not_filled_up_at_random(tmp_path):
    files = model_files(MODEL, TOKENIZER)
    tensors = parse(files["model.safetensors"])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    files["model.safetensors"] = dump(tensors, metadata={"format": "pt"})
    with pytest.raises(StorageError, match="up_proj"):
        load_model(write(tmp_path / "model", files))


def test_a_model_of_another_shape_than_its_configuration_is_refused(tmp_path):
    files = model_files(MODEL, TOKENIZER)
    settings = json.loads(files["config.json"])
    settings["intermediate_size"] = 48
    files["config.json"] = json.dumps(settings).encode()
    with pytest.raises(StorageError):
        load_model(write(tmp_path / "model", files))


def test_a_truncated_model_file_is_refused(tmp_path):
    files = model_files(MODEL, TOKENIZER)
    files["model.safetensors"] = files["model.safetensors"][:-100]
    with pytest.raises(StorageError, match="cannot be loaded"):
        load_model(write(tmp_path / "model", files))


@pytest.mark.parametrize("said, count", [("", 1), ("1", 1), ("2", 2), ("2,1", 2), ("many", 1), ("0", 1)])
def test_torch_uses_the_threads_it_is_told_and_one_otherwise(said, count, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    use_threads()
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == count


# --------------------------------------------------------------------------------------- micro-batches


def packed_batch(seed: int = 0):
    rows = random_rows(seed, trees=2)
    (batch,) = micro_batches(rows, range(len(rows)), 10_000, "tree")
    return batch


def gradients(model, value) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value, list(model.parameters())))


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_large_vocabulary_is_met_in_parts_with_the_same_results_and_gradients(with_gradient, monkeypatch):
    model, batch = tiny_model(), packed_batch()

    def run():
        found = token_logprobs(model, batch, 0.8, entropy_gradient=with_gradient)
        assert found.entropies.requires_grad == with_gradient
        value = found.logprobs.sum() + (found.entropies**2).sum() * float(with_gradient)
        return [*found, *gradients(model, value)]

    whole = run()
    calls = []
    monkeypatch.setattr("learner.policy._logits", lambda *args: calls.append(1) or real(*args))
    monkeypatch.setattr("learner.policy.LOGITS_AT_ONCE", 7 * model.config.vocab_size)
    for mine, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    # Once forwards and once more backwards: nothing is kept.
    assert len(calls) == 2 * -(-len(batch.targets_N) // 7)
    calls.clear()
    call_head_once(model)
    for mine, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1, "ranks with sharded weights wait for each other in each call"


def test_the_gradient_of_entropies_is_that_of_finite_differences():
    model, batch = tiny_model(num_hidden_layers=1).double(), packed_batch()
    head = model.get_output_embeddings().weight

    def entropy() -> torch.Tensor:
        # Logits are made float32: exact enough for a slope over a step of 1e-2.
        return token_logprobs(model, batch, 1.0, entropy_gradient=True).entropies.sum()

    (slope,) = torch.autograd.grad(entropy(), [head])
    with torch.no_grad():
        place = tuple((slope.abs() == slope.abs().max()).nonzero()[0].tolist())
        head[place] += 1e-2
        high = float(entropy())
        head[place] -= 2e-2
        low = float(entropy())
    assert (high - low) / 2e-2 == pytest.approx(float(slope[place]), rel=2e-2)


@pytest.mark.parametrize(
    "kind, config, more",
    [
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
        (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
        (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    ],
)
def test_what_a_model_does_to_its_logits_is_done_here_too(kind, config, more):
    model = kind(config(**{**SHAPE, **more})).eval()
    ids = torch.tensor([[3, 9, 4, 21, 7]])
    at = torch.arange(4)
    with torch.no_grad():
        found = logprobs_at(model, {"input_ids": ids}, torch.zeros_like(at), at, ids[0, 1:], 0.9).logprobs
        expected = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.9, -1)
    torch.testing.assert_close(found, expected[at, ids[0, 1:]], rtol=1e-5, atol=1e-6)


def test_an_adapter_around_the_model_is_trained_and_the_model_is_not():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    token_logprobs(adapted, packed_batch(), 1.0).logprobs.sum().backward()
    graded = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert graded and all("lora_" in name for name in graded)
