import numpy as np
import torch

from actors.engines.sampling import draw, mix64, projection, take_best, uniforms

GOLDEN_SIGNS = [1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0]


def test_the_mixer_gives_the_published_outputs_of_splitmix64() -> None:
    # First three outputs of the generator for seed 1234567, from the reference implementation.
    state = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix64(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_fill_the_unit_interval_for_neighbouring_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(50, dtype=np.uint64))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == values.size
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 4 * np.sqrt(38)
    grid = values.reshape(50, 200) - 0.5
    for one, other in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs((one * other).mean() * 12) < 4 / np.sqrt(one.size)


def test_uniforms_take_the_whole_range_of_seeds() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert len(set(uniforms(seeds, np.zeros(4, dtype=np.uint64)).tolist())) == 4


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(4, 1)
    ends = np.array([0.0, 0.4999, 0.5, 1 - 2.0**-53])
    ids, logprobs, entropies = draw(logits, np.ones(4, dtype=np.float32), ends)
    assert ids.tolist() == [1, 1, 3, 3]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(entropies, np.log(2), rtol=1e-6)


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(2, 1)
    temperatures = np.array([1.0, 0.25], dtype=np.float32)
    ids, logprobs, entropies = draw(logits, temperatures, np.array([0.99, 0.99]))
    for row, temperature in enumerate(temperatures.tolist()):
        want = torch.log_softmax(logits[row] / temperature, dim=-1)
        assert abs(logprobs[row] - float(want[int(ids[row])])) < 1e-6
        assert abs(entropies[row] + float((want.exp() * want).sum())) < 1e-6


def test_the_likeliest_token_is_described_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ids, logprobs, _ = take_best(logits)
    assert ids.tolist() == [1]
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits, -1)[0, 1].numpy(), rtol=1e-6)


def test_the_projection_keeps_lengths_up_to_scale_and_never_changes() -> None:
    matrix = projection(256, 64)
    vectors = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    ratio = (vectors @ matrix).norm(dim=1) / vectors.norm(dim=1) / (64 / 256) ** 0.5
    assert ((ratio - 1).abs() < 0.3).all()
    # Actors of one run, on any machine and of any release, must agree on it.
    assert (projection(4, 4).sign() > 0).int().flatten().tolist() == GOLDEN_SIGNS
