"""The critic of `tree_vtrace` where it is a value head: a linear head on the policy's hidden states.

    rows of all branches ─ hidden state at the end of each node ─▶ ValueHead ─▶ Evidence.values ─▶ credit
                                   └──────── kept ────────▶ 0.5 (v − V)², AdamW ◀─ value_terms ────────┘

It is no part of the policy: its weights are never published, its gradient stops at the hidden states, and the
policy is the same with or without it (torchbeast shares the torso; here the shared part belongs to the policy
loss alone). Temperature touches logits, never values. Hidden states are those of the weights that the batch
starts with, and the head steps once a batch. Every rank computes the same states and takes the same step.

Shapes: B rows, T positions, H hidden width, P prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import StorageError
from common.nouns import Tree
from learner.backend.base import Backend
from learner.backend.optimizer import MOMENTS
from learner.batching import cut, filled_up_ids
from learner.credit.base import BranchCredit
from learner.credit.tree_vtrace import value_terms
from learner.rows import Row

CRITIC_FILE = "critic.safetensors"


class ValueHead(torch.nn.Module):
    """V = w · h + b; a fresh one says 0 everywhere."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, states_PH: Tensor) -> Tensor:
        """Values of some prefixes, `[P]`; no gradient reaches their states."""
        return states_PH.detach().float() @ self.weight + self.bias


def value_loss(values_P: Tensor, targets_P: Tensor, weights_P: Tensor) -> Tensor:
    """Σ weight · 0.5 (v − V)², a scalar; the caller divides by the prompts of a step, as for the policy.

    See "IMPALA" (arXiv 1802.01561, §4.2). Targets carry no gradient. An entry of weight 0 may hold anything.
    """
    counts = weights_P != 0
    errors_P = torch.where(counts, targets_P.detach() - values_P, torch.zeros_like(values_P))
    return (weights_P * 0.5 * errors_P**2).sum()


class Critic:
    """A value head and its optimiser (AdamW without weight decay).

    Args:
        backend: whose hidden states are read.
        lr: learning rate of the head.
        max_tokens: of a pass, filling included.
    """

    def __init__(self, backend: Backend, lr: float, max_tokens: int) -> None:
        self._backend, self._max_tokens = backend, max_tokens
        config: Any = backend.model.config
        self.head = ValueHead(int(config.hidden_size))
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, weight_decay=0.0)
        self._states: dict[int, dict[int, Tensor]] = {}
        """Hidden state at the end of each prefix of the batch, `[H]`, by tree and node."""

    def values(self, rows: Sequence[Row]) -> dict[int, dict[int, float]]:
        """V at the end of each node that a branch goes on from, by tree and node; the states are kept.

        Args:
            rows: of all branches of a batch's trees (`learner.passes.every_sampled_token`).

        Raises:
            ValueError: a value is not finite: the critic, or the policy, has diverged.
        """
        self._states = {}
        for part in cut([row.length for row in rows], self._max_tokens):
            self._look([rows[place] for place in part])
        found: dict[int, dict[int, float]] = {}
        for tree, states in self._states.items():
            with torch.no_grad():
                values_P = self.head(torch.stack(list(states.values())))
            if not torch.isfinite(values_P).all():
                raise ValueError("the value head says NaN or infinity; lower learner.credit.critic_lr")
            found[tree] = dict(zip(states, values_P.tolist(), strict=True))
        return found

    def learn(
        self, trees: Sequence[Tree], credits: Mapping[int, Sequence[BranchCredit]], prompts: float
    ) -> dict[str, float]:
        """One step towards the targets of the batch that `values` was asked about; its loss and mean error.

        Args:
            trees: of the batch.
            credits: of each, by the tree's number.
            prompts: the constant that the loss is divided by.
        """
        terms = [(tree.id, term) for tree in trees for term in value_terms(tree, credits[tree.id])]
        if not terms:
            return {}
        said = self.head(torch.stack([self._states[tree][term.node] for tree, term in terms]))
        targets = torch.tensor([term.target for _, term in terms])
        weights = torch.tensor([term.weight for _, term in terms])
        loss = value_loss(said, targets, weights) / prompts
        if math.isfinite(float(loss.detach())):
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        error = (said.detach() - targets).abs().mean()
        return {"critic_loss": float(loss.detach()), "critic_error": float(error)}

    def _look(self, rows: Sequence[Row]) -> None:
        ids_BT = torch.from_numpy(filled_up_ids(rows)).to(self._backend.device)
        with torch.no_grad():
            hidden_BTH = self._backend.run(hidden_states(ids_BT))
        for line, row in enumerate(rows):
            of_tree = self._states.setdefault(row.tree, {})
            for place in np.flatnonzero(np.diff(row.nodes)).tolist():  # the last token of each node
                of_tree.setdefault(int(row.nodes[place]), hidden_BTH[line, place].float().cpu())

    # --- checkpoints ---------------------------------------------------------------------------------------

    def state_file(self) -> bytes:
        """The head and its moments, as safetensors."""
        tensors = {f"head/{name}": value.detach().clone() for name, value in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = torch.as_tensor(value, dtype=torch.float32).clone()
        return dump_tensors({name: value.contiguous() for name, value in tensors.items()})

    def load_state(self, data: bytes) -> None:
        """Take back what `state_file` gave. Raises `StorageError` for anything else."""
        try:
            tensors = parse_tensors(data)
            self.head.load_state_dict({name: tensors[f"head/{name}"] for name in self.head.state_dict()})
            for name, parameter in self.head.named_parameters():
                if f"step/{name}" in tensors:  # none before the first step
                    found = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS}
                    self._optimizer.state[parameter] = found
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise StorageError(f"{CRITIC_FILE} does not fit this run's value head: {error}") from error


def hidden_states(ids_BT: Tensor) -> Callable[[PreTrainedModel], Tensor]:
    """A forward pass: last hidden states of plain causal rows, `[B, T, H]`."""

    def forward(model: PreTrainedModel) -> Tensor:
        backbone: Any = model.base_model
        hidden: Tensor = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        return hidden

    return forward
