"""The frozen reference: which model it is, that it never moves, and at which temperature it speaks."""

import pytest
import torch

from common.config import Config
from common.config_learner import RegularizerConfig
from common.errors import StorageError
from common.tokenizer import WordTokenizer
from learner.policy import TokenLogprobs, build_model, model_files
from learner.reference import load_reference, reference_folder
from tests.learner.helpers import SMALL_MODEL, TOKENIZER


def forward(model, batch, temperature) -> TokenLogprobs:
    """log π of the last id of a row at a temperature: stands for `learner.policy.token_logprobs`."""
    logits = model(input_ids=batch[:, :-1]).logits[:, -1] / temperature
    every = torch.log_softmax(logits, -1)
    return TokenLogprobs(every.gather(1, batch[:, -1:]).squeeze(1), torch.zeros(len(batch)))


def write(path, model, tokenizer=TOKENIZER):
    path.mkdir(parents=True, exist_ok=True)
    for name, data in model_files(model, tokenizer).items():
        (path / name).write_bytes(data)
    return path


def config(**changes) -> Config:
    made = Config()
    made.learner.regularizer = RegularizerConfig(kl_coefficient=0.1, **changes)
    return made


BATCH = torch.tensor([[3, 4, 5], [6, 7, 8]])


def test_without_a_coefficient_nothing_is_loaded(tmp_path):
    assert load_reference(Config(), tmp_path / "nothing", TOKENIZER, forward) is None


def test_it_is_the_model_the_run_starts_from_unless_another_is_named(tmp_path):
    made = config()
    assert reference_folder(made, tmp_path / "warm") == tmp_path / "warm"
    made.model.path = str(tmp_path / "base")
    assert reference_folder(made, tmp_path / "warm") == tmp_path / "base"
    made.learner.regularizer.reference = str(tmp_path / "teacher")
    assert reference_folder(made, tmp_path / "warm") == tmp_path / "teacher"


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_it_speaks_at_the_temperature_of_sampling_and_carries_no_gradient(tmp_path, temperature):
    """A reference at another temperature would put a KL on a policy that equals it."""
    model = build_model(SMALL_MODEL, TOKENIZER, seed=5)
    made = config()
    made.engine.temperature = temperature
    reference = load_reference(made, write(tmp_path / "warm", model), TOKENIZER, forward)
    found = reference.logprobs(BATCH)
    assert not found.requires_grad and not reference.model.training
    assert all(not parameter.requires_grad for parameter in reference.model.parameters())
    torch.testing.assert_close(found, forward(model, BATCH, temperature).logprobs.detach())


def test_training_the_policy_does_not_move_the_reference(tmp_path):
    model = build_model(SMALL_MODEL, TOKENIZER, seed=5)
    reference = load_reference(config(), write(tmp_path / "warm", model), TOKENIZER, forward)
    before = reference.logprobs(BATCH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(reference.logprobs(BATCH), before)


def test_a_missing_reference_names_the_folder(tmp_path):
    with pytest.raises(StorageError, match=r"there is no model at .*gone") as raised:
        load_reference(config(reference=str(tmp_path / "gone")), tmp_path, TOKENIZER, forward)
    assert "set learner.regularizer.reference to" in str(raised.value)
    assert "role=warmstart" not in str(raised.value), "it would write another folder"


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    other = WordTokenizer.build([f"v{number}" for number in range(21)])
    folder = write(tmp_path / "other", build_model(SMALL_MODEL, other, seed=5), other)
    with pytest.raises(StorageError, match=r"another tokenizer\.json than the policy"):
        load_reference(config(reference=str(folder)), tmp_path, TOKENIZER, forward)
