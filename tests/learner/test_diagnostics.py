"""Numbers that an update says about itself, against their definitions."""

import math

import pytest
import torch

from learner.diagnostics import effective_sample_size, kl_k3


def test_k3_is_never_negative_and_zero_where_nothing_moved():
    ratios = torch.tensor([1.0, 1e-8, 0.5, 2.0, 1e8])
    found = kl_k3(ratios)
    assert (found >= 0).all() and found[0] == 0.0
    assert found[2].item() == pytest.approx(0.5 - 1 - math.log(0.5))


def test_the_mean_of_k3_over_the_sampling_distribution_is_the_divergence():
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (mu * (mu / pi).log()).sum()
    assert (mu * kl_k3(pi / mu)).sum().item() == pytest.approx(exact.item())


def test_k3_of_a_small_move_is_half_its_square_and_no_rounding():
    move = torch.tensor([1e-3, -1e-3]).double()
    assert kl_k3(move.exp()).tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)


def test_a_mean_ratio_near_one_hides_what_the_effective_sample_size_shows():
    ratios = torch.tensor([*[0.9] * 99, 10.9])
    assert ratios.mean().item() == pytest.approx(1.0)
    assert effective_sample_size(ratios) < 0.51
