"""Probes: tokens that a model scores behind a node of a tree, without gradient.

    (node, token ids) … ─ hung below their nodes ─▶ one packed tree ─ one forward pass ─▶ log-probabilities

A probe is a branch of its own: it sees the walk to its node and itself, and nothing sees it. All probes of a
tree cost one pass over the tokens that lead to them, each token once, and over the probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.nouns import ROOT, Tree, ids
from learner.batching import of_packed
from learner.layout import lay_out, path_of
from learner.packing import Group, pack_group
from learner.policy import TokenLogprobs, token_logprobs
from learner.rows import NO_LAG, Ints, Row

Run = Callable[[Callable[[PreTrainedModel], TokenLogprobs]], TokenLogprobs]
"""The way to a model's outputs: `learner.backend.base.Backend.run`, for one."""


class Hung(NamedTuple):
    """A probe below a node."""

    node: int
    """It stands behind this node's observation."""
    ids: Sequence[int]
    """At least one token."""


def probe_logprobs(
    model: PreTrainedModel,
    tree: Tree,
    probes: Sequence[Hung],
    temperature: float = 1.0,
    run: Run | None = None,
) -> list[Tensor]:
    """log π of each token of each probe, given the walk to its node and the probe's tokens before it.

    Args:
        model: scores; its parameters get no gradient.
        tree: only the walks to the probed nodes are computed.
        probes: in any order; several may hang below one node.
        temperature: logits are divided by it.
        run: where the model is a backend's, that backend's `run`: weights in shards are whole and passes are
            in the dtype of the configuration only there. One call whenever there are probes, which under
            ZeRO 3 is collective: every rank asks for as many trees. None = the model is called as it is.

    Returns:
        `[tokens]` for each probe, in the order given, on the CPU.

    Raises:
        ValueError: a probe is empty, its node is not in the tree, or nothing stands before it.
        ConfigError: the model cannot be packed.
    """
    if not probes:
        return []
    rows = [_row(tree, probe, len(tree.nodes) + number) for number, probe in enumerate(probes)]
    paths = tuple(path_of(row) for row in rows)
    batch = of_packed(pack_group(rows, Group(tuple(range(len(rows))), paths, lay_out(paths))))
    device = next(model.parameters()).device
    forward = partial(token_logprobs, batch=batch.to(device), temperature=temperature)
    with torch.no_grad():
        found = forward(model) if run is None else run(forward)
    logprobs = found.logprobs.cpu()
    # Tokens come by node and place in it, and each probe is a node of its own: in the order of the probes.
    return list(logprobs.split([len(probe.ids) for probe in probes]))


def _row(tree: Tree, probe: Hung, node: int) -> Row:
    """A probe as a branch whose last node is the probe, its tokens the trained ones."""
    if not len(probe.ids) or not ROOT <= probe.node < len(tree.nodes):
        raise ValueError(
            f"a probe of tree {tree.id} needs a token and one of its {len(tree.nodes)} nodes, "
            f"got {len(probe.ids)} tokens below node {probe.node}"
        )
    walk = tree.walk(probe.node)
    parts = [np.concatenate([ids(step.turn.action), ids(step.turn.observation)]) for step in walk]
    tokens = np.concatenate([*parts, np.asarray(probe.ids)]).astype(np.int64)
    lengths = [*map(len, parts), len(probe.ids)]
    nodes: Ints = np.repeat([*(step.index for step in walk), node], lengths).astype(np.int64)
    nothing = np.zeros(len(tokens), np.float32)
    return Row(
        tree=tree.id, continuation=node, ids=tokens, trained=nodes == node, behaviour=nothing,
        advantages=nothing, weights=nothing, lags=np.full(len(tokens), NO_LAG, np.int64), nodes=nodes,
    )  # fmt: skip
