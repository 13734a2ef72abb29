"""Draws that depend on a request's seed and its logits, and on nothing else.

Each draw is keyed on (seed, index of the token in its turn), so neither the neighbours in a batch nor
the order of arrival nor an update of the weights moves the random numbers of a turn.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engines.base import Floats

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Step of SplitMix64: 2^64 over the golden ratio, odd, so that all counters stay distinct."""
UNIT = 2.0**-53
"""Spacing of the uniforms: 53 bits are what a float64 in [0, 1) can hold."""
PROJECTION_SEED = np.uint64(0x7472656577617264)
"""Key of the feature projection ('treeward' in ASCII): a constant, since all actors must agree on it."""


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64: a bijection of 64-bit words that flips half the bits on any change.

    See "Fast Splittable Pseudorandom Number Generators" (Steele, Lea, Flood 2014), figure 16, with the
    constants of Stafford's variant 13.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each (seed, token index).

    The seed is mixed before the counter is added: seeds that are close must not share a stream shifted
    by a few tokens.
    """
    words = mix64(mix64(seeds_B + GOLDEN) + (positions_B + np.uint64(1)) * GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * UNIT


def draw(
    logits_BV: torch.Tensor, temperatures_B: Floats, uniforms_B: NDArray[np.float64]
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Sample one token for each row by inverting the cumulative distribution.

    The sums run in float64: with fifty thousand tokens a float32 cumulative sum loses the tail.

    Returns:
        ids, log-probabilities and entropies (nats), [B] each, of softmax(logits / temperature).
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / torch.from_numpy(temperatures_B)[:, None], dim=-1)
    probs_BV = logprobs_BV.double().exp_()
    cumulative_BV = probs_BV.cumsum(-1)
    thresholds_B1 = torch.from_numpy(uniforms_B)[:, None] * cumulative_BV[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the threshold, never one of mass zero.
    ids_B1 = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return _described(ids_B1, logprobs_BV, probs_BV)


def take_best(logits_BV: torch.Tensor) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The likeliest token of each row; log-probabilities and entropies are those of temperature 1."""
    logprobs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    return _described(logprobs_BV.argmax(-1, keepdim=True), logprobs_BV, logprobs_BV.double().exp_())


def _described(
    ids_B1: torch.Tensor, logprobs_BV: torch.Tensor, probs_BV: torch.Tensor
) -> tuple[NDArray[np.int64], Floats, Floats]:
    entropies_B = torch.special.entr(probs_BV).sum(-1).float()
    return ids_B1[:, 0].numpy(), logprobs_BV.gather(1, ids_B1)[:, 0].numpy(), entropies_B.numpy()


def projection(hidden: int, width: int) -> torch.Tensor:
    """[hidden, width] random signs over sqrt(hidden): distances are kept up to one scale, entries stay as
    large as those of the hidden state, and every machine has the same matrix.

    Signs from `mix64` instead of a library's normals: libraries may change their streams.
    """
    cells = np.arange(hidden * width, dtype=np.uint64)
    signs = (mix64(mix64(cells + PROJECTION_SEED)) >> np.uint64(63)).astype(np.float32) * 2 - 1
    return torch.from_numpy(signs.reshape(hidden, width) / np.float32(np.sqrt(hidden)))
