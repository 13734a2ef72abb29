"""Probes: one pass scores what a pass for each would, and leaves no gradient."""

import numpy as np
import pytest
import torch

from common.config_backend import BackendConfig
from common.nouns import ids
from learner.backend.alone import alone as backend_around
from learner.probes import Hung, probe_logprobs
from tests.learner.forests import ARCHITECTURES, VOCABULARY, random_tree, tiny_model
from tests.learner.helpers import learner_config


def alone(model, tree, probe: Hung, temperature: float) -> torch.Tensor:
    """The walk and the probe as one sequence in a pass of its own."""
    before = [
        int(t)
        for step in tree.walk(probe.node)
        for t in (*ids(step.turn.action), *ids(step.turn.observation))
    ]
    whole = torch.tensor([[*before, *probe.ids]])
    with torch.no_grad():
        all_ = torch.log_softmax(model(input_ids=whole).logits[0].float() / temperature, -1)
    return torch.stack([all_[len(before) + at - 1, token] for at, token in enumerate(probe.ids)])


def probes_of(tree, rng, count: int = 8) -> list[Hung]:
    return [
        Hung(
            int(rng.integers(0, len(tree.nodes))),
            rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).tolist(),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probes_score_as_in_separate_passes(name):
    model = tiny_model(name)
    rng = np.random.default_rng(3)
    tree = random_tree(rng)
    probes = [*probes_of(tree, rng), Hung(0, [5, 6]), Hung(0, [5, 6]), Hung(len(tree.nodes) - 1, [0])]
    found = probe_logprobs(model, tree, probes, temperature=0.8)
    assert len(found) == len(probes)
    for probe, logprobs in zip(probes, found, strict=True):
        torch.testing.assert_close(logprobs, alone(tiny_model(name), tree, probe, 0.8), rtol=1e-4, atol=1e-5)
        assert not logprobs.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_all_probes_of_a_tree_cost_one_forward_pass_over_each_token_once():
    model = tiny_model()
    rng = np.random.default_rng(4)
    tree = random_tree(rng)
    passes = []
    model.base_model.register_forward_hook(
        lambda module, args, kwargs, out: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    probes = probes_of(tree, rng, 20)
    probe_logprobs(model, tree, probes)
    walked = {step.index for probe in probes for step in tree.walk(probe.node)}
    context = sum(len(tree.nodes[n].turn.action + tree.nodes[n].turn.observation) // 4 for n in walked)
    assert passes == [context + sum(len(probe.ids) - 1 for probe in probes)]


def test_no_probes_cost_nothing():
    assert probe_logprobs(tiny_model(), random_tree(np.random.default_rng(0)), []) == []


@pytest.mark.parametrize("probe", [Hung(0, []), Hung(99, [4]), Hung(-1, [4])])
def test_a_probe_without_tokens_or_below_a_node_that_is_not_there_is_refused(probe):
    with pytest.raises(ValueError, match="a probe of tree 0 needs a token"):
        probe_logprobs(tiny_model(), random_tree(np.random.default_rng(0)), [probe])


def test_a_backend_s_model_is_asked_within_its_run_alone():
    """As under ZeRO 3, where a layer has no weights outside of it."""
    rng = np.random.default_rng(5)
    tree = random_tree(rng)
    probes = probes_of(tree, rng)
    expected = probe_logprobs(tiny_model(), tree, probes)
    sharded, runs = tiny_model(), []
    whole = {name: parameter.data for name, parameter in sharded.named_parameters()}

    def let_go():
        for parameter in sharded.parameters():
            parameter.data = torch.empty(0)

    def run(forward):
        runs.append(forward)
        for name, parameter in sharded.named_parameters():
            parameter.data = whole[name]
        try:
            return forward(sharded)
        finally:
            let_go()

    let_go()
    for one, other in zip(probe_logprobs(sharded, tree, probes, run=run), expected, strict=True):
        assert torch.equal(one, other)
    assert len(runs) == 1
    assert probe_logprobs(sharded, tree, [], run=run) == [] and len(runs) == 1


def test_probes_are_scored_in_the_dtype_of_the_backend():
    rng = np.random.default_rng(6)
    tree = random_tree(rng)
    probes = probes_of(tree, rng)

    def scores(dtype: str) -> torch.Tensor:
        backend = backend_around(
            tiny_model(), learner_config(backend=BackendConfig(dtype=dtype, device="cpu"))
        )
        return torch.cat(probe_logprobs(backend.model, tree, probes, run=backend.run))

    exact = torch.cat(probe_logprobs(tiny_model(), tree, probes))
    assert torch.equal(scores("float32"), exact)
    half = scores("bfloat16")
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=0.05, atol=0.05)
