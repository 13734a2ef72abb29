"""The oracle: what the ring computes, as one plain loop to be read at one sitting.

    for each update:    weights ─▶ engine
                        for each tree of the batch, for each round of the rule, for each continuation:
                            replay the anchor, then turn after turn: sample, step, append a node
                        rows ─▶ loss ─▶ AdamW             outcomes ─▶ predictor

One process, one thread, one thing after the other: no allocator, no sockets, no leases, no queue. It shares
with the ring what is mathematics or world: model, engine, credit, loss, behaviour weight, torch's AdamW, the
environment, seeds and the predictor. Growth, rows, the bookkeeping of an update and the hand-over of weights
are written anew, from the definitions. It holds for K = 0 and D = 0, where nothing is ever stale.

Shapes: T tokens of a row, N of them trained.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.engines.base import GenerateRequest
from actors.engines.torch_engine import TorchEngine
from common import nouns
from common.config import Config
from common.config_allocator import RandomRuleConfig
from common.nouns import ROOT, Node, Tree, Turn, TurnStatus, Version, ids, ids_to_bytes
from common.predictor import HistoryPredictor, Target
from common.prefix import Prefix
from common.seeds import derive_seed, lease_seed, task_index, turn_seed
from common.tokenizer import WordTokenizer
from envs.registry import make_env
from learner.credit import CREDITS, NO_EVIDENCE, BranchCredit
from learner.loss import LOSSES
from learner.policy import load_model, logprobs_at, model_files
from learner.streams import Streams
from learner.weight import WEIGHTS

ENV_OPTIONS = ("size", "hole_probability", "is_slippery", "max_turns")


@dataclass(frozen=True)
class Update:
    """The trees of one batch, and the weights after the update on them."""

    trees: list[Tree]
    weights: dict[str, Tensor]


def train(config: Config, start: Path, scratch: Path) -> list[Update]:
    """All updates of `config`, from the model in `start`; the engine reads its weights in `scratch`."""
    return asyncio.run(Oracle(config, start).train(scratch))


class Oracle:
    """The synchronous loop; `train` is the whole of it."""

    def __init__(self, config: Config, start: Path) -> None:
        torch.set_num_threads(1)
        self.config, self.settings = config, config.learner
        self.rule, self.continuations = config.allocator.rule, config.allocator.budget.continuations
        self.model = load_model(start).eval()
        self.tokenizer = WordTokenizer.load(start)
        self.max_context = int(self.model.config.max_position_embeddings)
        optimizer = self.settings.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=1e-8,
            weight_decay=optimizer.weight_decay,
        )  # fmt: skip
        self.world = make_env(config.env.name, {name: getattr(config.env, name) for name in ENV_OPTIONS})
        self.predictor = HistoryPredictor()

    async def train(self, scratch: Path) -> list[Update]:
        self.engine = TorchEngine(max_batch=1, max_context=self.max_context, features=0, deterministic=True)
        size, updates = self.settings.batch_trees, []
        for step in range(self.settings.steps):
            await self.hand_over(Version(0, step), scratch / f"weights-{step}")
            trees = [await self.grow(number, step) for number in range(step * size, (step + 1) * size)]
            self.update(trees, step)
            self.learn(trees)
            weights = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
            updates.append(Update(trees, weights))
        await self.engine.close()
        return updates

    async def hand_over(self, version: Version, folder: Path) -> None:
        """The weights, as files, to the engine."""
        folder.mkdir(parents=True)
        for name, data in model_files(self.model, self.tokenizer).items():
            (folder / name).write_bytes(data)
        await self.engine.load_weights(version, folder)

    # --- growth ------------------------------------------------------------------------------------------

    async def grow(self, number: int, step: int) -> Tree:
        """Tree `number`, over task `number`, under the weights of `step`."""
        task = nouns.TaskId(self.config.env.name, "train", task_index(self.config.seed, number))
        prompt = Turn(observation=ids_to_bytes(self.tokenizer.encode(self.world.reset(task))))
        root = Node(
            ROOT, nouns.NO_PARENT, nouns.NO_LEASE, 0, 0, prompt, [], self.value(0), self.predictor.version
        )
        tree, chain_of = Tree(number, task, step, [root], [], 1.0, Version(0, step)), list[int]()
        while len(chain_of) < self.continuations:
            stamp = len(tree.nodes) - 1 if isinstance(self.rule, RandomRuleConfig) else 0
            for chain, anchor in self.next_round(tree, chain_of):
                await self.run(tree, tree.nodes[anchor], stamp)
                chain_of.append(chain)
        return tree

    def next_round(self, tree: Tree, chain_of: list[int]) -> list[tuple[int, int]]:
        """(chain, anchor) of the continuations to start next, chosen from the tree as it stands.

        `flat`: all from the root. `random` (arXiv 2509.21240 §3): first M chains from the root, then N draws
        a chain, uniform over the root and the turns of that chain's tree that did not end the episode.
        """
        rule = self.rule
        if not isinstance(rule, RandomRuleConfig):
            return [(0, ROOT)] * self.continuations
        if not chain_of:
            return [(chain, ROOT) for chain in range(rule.chains)]
        decision = 1 + (len(chain_of) - rule.chains) // (rule.chains * rule.expansions)
        draws = random.Random(derive_seed("rule", self.config.seed, tree.id, decision))
        picks = []
        for chain in range(rule.chains):
            inner = [n.index for n in tree.nodes[1:] if chain_of[n.lease] == chain and is_open(n)]
            picks += [(chain, draws.choice([ROOT, *inner])) for _ in range(rule.expansions)]
        return picks

    async def run(self, tree: Tree, anchor: Node, stamp: int) -> None:
        """One continuation from `anchor` to its end: it appends its nodes and itself to the tree."""
        number = len(tree.continuations)
        seed = lease_seed(self.config.seed, tree.id, number)
        self.world.reset(tree.task)
        for past in tree.walk(anchor.index)[1:]:
            self.world.step(past.turn.action_text, past.turn.seed)
        last, own = anchor, list[Node]()
        while is_open(last):
            offset, depth = len(own), last.depth + 1
            turn = await self.turn(tree.walk(last.index), turn_seed(seed, offset), tree.opened_at)
            value = self.value(depth) if turn.status is TurnStatus.OPEN else None
            place = len(tree.nodes), last.index, number, offset, depth
            last = Node(*place, turn, [], value, self.predictor.version)
            tree.nodes.append(last)
            own.append(last)
        reward = sum(node.turn.reward for node in own)
        ending = nouns.Ending(last.turn.status.value)
        tree.continuations.append(
            nouns.Continuation(
                number=number, anchor=anchor.index, nodes=[node.index for node in own], ended="finished",
                weight=1.0 / self.continuations, baseline=self.value(anchor.depth),
                predictor_version=self.predictor.version, score_stamp=stamp, speculative=False,
                outcome=nouns.Outcome(reward, reward, nouns.RewardSource.ENVIRONMENT, ending),
            )
        )  # fmt: skip

    async def turn(self, path: list[Node], seed: int, version: Version) -> Turn:
        """Sample one action after `path` and play it; the same seed is the engine's and the world's."""
        settings = self.config.engine
        context = np.concatenate([ids(part) for n in path for part in (n.turn.action, n.turn.observation)])
        stop, most = (self.tokenizer.end_id,), settings.max_new_tokens
        sampled = await self.engine.generate(
            GenerateRequest("oracle", context, most, seed, settings.temperature, stop)
        )
        text = self.tokenizer.decode(sampled.ids.tolist())
        step = self.world.step(text, seed)
        answer = self.tokenizer.encode(step.observation)
        full = len(context) + len(sampled.ids) + len(answer) + most > self.max_context
        status = TurnStatus.TRUNCATED if step.truncated or full else TurnStatus.OPEN
        return Turn(
            action=ids_to_bytes(sampled.ids), logprobs=nouns.floats_to_bytes(sampled.logprobs),
            versions=[nouns.VersionRun(version, len(sampled.ids))], observation=ids_to_bytes(answer),
            action_text=text, seed=seed, reward=step.reward,
            status=TurnStatus.TERMINATED if step.terminated else status,
        )  # fmt: skip

    # --- the predictor -----------------------------------------------------------------------------------

    def value(self, depth: int) -> float:
        return self.predictor.predict(Prefix(depth)).mean

    def learn(self, trees: list[Tree]) -> None:
        """One target a continuation, at its anchor and at the open turns it sampled; between two batches."""
        targets = []
        for tree in trees:
            for leaf in tree.continuations:
                assert leaf.outcome is not None
                sampled = [tree.nodes[index] for index in leaf.nodes]
                places = [tree.nodes[leaf.anchor], *filter(is_open, sampled)]
                targets += [Target(Prefix(node.depth), None, leaf.outcome.reward) for node in places]
        self.predictor.update(targets)

    # --- the update --------------------------------------------------------------------------------------

    def update(self, trees: list[Tree], step: int) -> None:
        """The optimiser steps on a batch: each on a seeded part of its trees, row by row."""
        loss, credit, optimizer = self.settings.loss, self.settings.credit, self.settings.optimizer
        rows = [
            row_of(tree, branch)
            for tree in trees
            for branch in CREDITS[credit.name].function(tree, credit, NO_EVIDENCE)
        ]
        with torch.no_grad():
            proximal = [self.logprobs(row) for row in rows]
        for group in self.optimizer.param_groups:
            group["lr"] = optimizer.lr * min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
        for epoch in range(loss.epochs):
            order = [tree.id for tree in trees]
            random.Random(derive_seed("minibatches", self.config.seed, step, epoch)).shuffle(order)
            for part in range(min(loss.minibatches, len(order))):
                # Zeros, not None: a part without any contrast still steps, and momentum goes on.
                for parameter in self.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                for row, old in zip(rows, proximal, strict=True):
                    if row.tree in order[part :: loss.minibatches]:
                        self.objective(row, old).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.grad_clip)
                self.optimizer.step()

    def objective(self, row: Row, proximal: Tensor) -> Tensor:
        """The loss of a row's trained tokens, divided once by the prompts of an optimiser step."""
        weight, loss = WEIGHTS[self.settings.weight.name], self.settings.loss
        mask = torch.ones_like(row.at, dtype=torch.bool)
        behaviour = weight.weigh(proximal, row.behaviour, mask, self.settings.weight).weight
        old = proximal if weight.proximal else row.behaviour
        one = torch.zeros_like(row.at)  # one branch; no loss of today reads turns
        logprobs = self.logprobs(row)
        streams = Streams.of_rows(logprobs, old, row.behaviour, row.advantages, row.weights, one, one)
        losses = LOSSES[loss.name].function(streams, loss).loss
        parts = min(loss.minibatches, self.settings.batch_trees)
        return (behaviour * losses).sum() / (self.settings.batch_trees / parts)

    def logprobs(self, row: Row) -> Tensor:
        """log π of the trained tokens, `[N]`; the last token is only a target, never an input."""
        inputs, rows, targets = row.ids[None, :-1], torch.zeros_like(row.at), row.ids[row.at]
        temperature = self.config.engine.temperature
        return logprobs_at(self.model, {"input_ids": inputs}, rows, row.at - 1, targets, temperature).logprobs


@dataclass(frozen=True)
class Row:
    """A branch up to its last trained token; a continuation trains the turns that it sampled itself.

    `ids` are [T] tokens; `at`, all [N], is where the trained ones lie, `behaviour` their log-probabilities
    at sampling.
    """

    tree: int
    ids: Tensor
    at: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor


def row_of(tree: Tree, branch: BranchCredit) -> Row:
    """Prompt, then action and observation of each turn, up to the last action token."""
    tokens = ids(tree.nodes[ROOT].turn.observation).tolist()
    at, behaviour, advantages = list[int](), list[float](), list[float]()
    for node, advantage in zip(branch.turns, branch.advantages, strict=True):
        action = ids(node.turn.action).tolist()
        if node.lease == branch.continuation.number:
            at += range(len(tokens), len(tokens) + len(action))
            behaviour += nouns.floats(node.turn.logprobs).tolist()
            advantages += [advantage] * len(action)
        tokens += action + ids(node.turn.observation).tolist()
    streams = torch.tensor(behaviour), torch.tensor(advantages), torch.full((len(at),), branch.weight)
    return Row(tree.id, torch.tensor(tokens[: at[-1] + 1]), torch.tensor(at), *streams)


def is_open(node: Node) -> bool:
    return node.turn.status is TurnStatus.OPEN
