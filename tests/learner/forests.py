"""Random trees with shared prefixes, their rows, and tiny models of several architectures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.config_learner import CreditConfig, NodeWeight
from common.nouns import Tree
from learner.credit import CREDITS, NO_EVIDENCE
from learner.layout import Path
from learner.rows import Clock, Row, RowCounts, build_rows
from tests.learner.helpers import V0, continuation, make_tree, node, turn

VOCABULARY = 24
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, attn_implementation="sdpa",
    pad_token_id=None, bos_token_id=None, eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip
"""Four heads share two keys and values."""
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma": (GemmaForCausalLM, GemmaConfig),
}


def tiny_model(name: str = "llama", **changes: object) -> PreTrainedModel:
    model, config = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return model(config(**{**SHAPE, **changes})).eval()


def random_tree(
    rng: np.random.Generator, tree_id: int = 0, *, continuations: int = 6, prompt: int = 5, most: int = 4
) -> Tree:
    """Continuations from the prompt and from behind any turn, of one to three turns of up to `most` tokens;
    outcomes and baselines are such that shared tokens are paid both ways."""
    nodes, made, depths = [], [], [0]
    for number in range(continuations):
        anchor = parent = int(rng.integers(0, len(nodes) + 1))
        own = []
        for offset in range(int(rng.integers(1, 4))):
            size, answer = int(rng.integers(1, most + 1)), int(rng.integers(0, most))
            # Near what a fresh model says, so that some ratios are clipped and most are not.
            logprobs = np.minimum(-np.log(VOCABULARY) + rng.normal(0, 0.4, size), -0.01).tolist()
            action, observation = (rng.integers(3, VOCABULARY, n).tolist() for n in (size, answer))
            depths.append(depths[parent] + 1)
            nodes.append(
                node(
                    len(nodes) + 1,
                    parent,
                    number,
                    offset,
                    turn(action, observation, logprobs),
                    depth=depths[-1],
                    value=float(rng.random()),
                )
            )
            parent = len(nodes)
            own.append(parent)
        made.append(
            continuation(
                number,
                own,
                float(rng.random() < 0.5),
                anchor=anchor,
                weight=float(rng.random() + 0.1),
                baseline=float(rng.random()),
            )
        )
    return make_tree(nodes, made, tree_id, rng.integers(3, VOCABULARY, prompt).tolist())


def rows_of(trees: Sequence[Tree], weight: NodeWeight = NodeWeight.LEAF_SHARE) -> list[Row]:
    rows = []
    for tree in trees:
        rows += build_rows(
            tree,
            CREDITS["granted"].function(tree, CreditConfig(), NO_EVIDENCE),
            weight,
            Clock(V0, 0),
            RowCounts(),
        )
    return rows


def random_rows(seed: int, trees: int = 1, weight: NodeWeight = NodeWeight.LEAF_SHARE, **more) -> list[Row]:
    rng = np.random.default_rng(seed)
    return rows_of([random_tree(rng, number, **more) for number in range(trees)], weight)


def small_forests() -> list[list[Path]]:
    """Every tree of at most five nodes, with every choice of nodes that branches end in, some of them short
    of their last token."""
    found = []
    for count in range(1, 6):
        for parents in product(*(range(max(1, child)) for child in range(1, count))):
            walks = [[0]]
            for child, parent in enumerate(parents, start=1):
                walks.append([*walks[parent], child])
            for ends in range(1, 2**count):
                found.append([
                    _path(walk, cut=(ends + end) % 2) for end, walk in enumerate(walks) if ends >> end & 1
                ])  # fmt: skip
    return found


def _path(walk: Sequence[int], cut: int) -> Path:
    lengths = [(2, 1, 3, 2, 1)[node] for node in walk]
    lengths[-1] -= min(cut, lengths[-1] - 1)
    return Path(tuple(walk), tuple(lengths))
