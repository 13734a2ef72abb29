"""A training in one process, whose data are exactly as old as asked for.

    for each update t:    weights of update max(0, t − lag) ─▶ engine ─▶ a batch of trees ─▶ Updater, K = lag
                          the weights before it are kept, `lag` + 1 of them

Nothing is relabelled: every token is sampled under the weights that its version names, and the learner sees
the age in the versions. Engine, environment, leases, rule, budget, predictor, credit, loss and weight are the
real ones; what is left out is everything that runs at the same time: sockets, processes, queues. A decision
of the branch rule waits for the continuations of the one before.

consumes: starting weights.  produces: trained weights, the ages of all tokens.
waits for: the engine.  unblocked by: generations, or its death, which raises.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.build import build_engine, build_tools
from actors.expand import expand
from actors.lease_table import Attempt
from actors.turns import Tools, inspect_root
from allocator.budgets import make_budget
from allocator.forest import Forest
from allocator.leases import write_lease
from allocator.rules import make_rule
from allocator.settings import Settings
from allocator.tree import Branch, GrowingTree
from allocator.waves import Waves
from benchmarks.results import BenchmarkFailed
from common.config import Config
from common.config_allocator import root_cost
from common.messages import Expanded, Finished, HorizonReached, Message
from common.nouns import TaskId, Tree, Version
from common.predictors import make_predictor
from common.seeds import task_index
from common.tokenizer import WordTokenizer
from learner.backend import make_backend
from learner.backend.group import open_group
from learner.policy import load_model, model_files, use_threads
from learner.rows import Clock
from learner.update import Updater

LONG_S = 3600.0
"""A lease's deadline; nobody else could take it over."""


@dataclass(slots=True)
class Course:
    """What a training did."""

    updates: int = 0
    tokens: int = 0
    """Action tokens sampled."""
    ages: Counter[int] = field(default_factory=Counter)
    """Action tokens by their lag, in updates, when they were trained."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Of each update: success of its batch, and what the learner says of itself."""


class StaleTraining:
    """One training.

    Args:
        config: of the run; `learner.max_policy_lag` must be at least `lag`.
        start: folder of the starting weights.
        scratch: where the weights of each update are handed to the engine.
        lag: updates between the weights that sample and those that are updated, once there are so many.
        sampling_seed: of the draws; tasks come from `config.seed`, so that only luck differs.
    """

    def __init__(self, config: Config, start: Path, scratch: Path, lag: int, sampling_seed: int) -> None:
        use_threads(1)
        self._config, self._scratch, self._lag = config, scratch, lag
        settings = config.learner
        self._model, self._tokenizer = load_model(start), WordTokenizer.load(start)
        self._group = open_group(settings.backend, scratch)
        self._updater = Updater(
            make_backend(settings, self._model, self._group), settings,
            temperature=config.engine.temperature, seed=config.seed,
        )  # fmt: skip
        allocator, batch = config.allocator, settings.batch_trees
        predictor = make_predictor(allocator.predictor)
        budget = make_budget(allocator.budget, batch, root_cost(allocator.rule))
        world = Settings(seed=sampling_seed, env=config.env.name, batch_trees=batch)
        self._forest = Forest(world, make_rule(allocator.rule), budget, predictor)
        self._waves = Waves(predictor, budget, batch)
        self._kept: deque[tuple[Version, Mapping[str, bytes]]] = deque(maxlen=lag + 1)
        """Versions, the oldest that is still to sample first."""
        self._engine = build_engine(config, start)
        self.course = Course()

    def run(self, tokens: int) -> Path:
        """Train until so many action tokens were sampled; the folder of the last weights."""
        return asyncio.run(self._run(tokens))

    async def _run(self, tokens: int) -> Path:
        try:
            self._keep()
            tools = build_tools(self._config, self._engine, self._tokenizer)
            while self.course.tokens < tokens:
                await self._load()
                self._update(await self._grow_batch(tools))
            return self._write(*self._kept[-1])
        finally:
            await self._engine.close()
            self._group.close()

    # --- weights -----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        files = model_files(self._model, self._tokenizer)
        self._kept.append((Version(0, self.course.updates), files))

    async def _load(self) -> None:
        """The engine samples the next batch under the oldest weights kept."""
        version, files = self._kept[0]
        if self._engine.version != version:
            await self._engine.load_weights(version, self._write(version, files))

    def _write(self, version: Version, files: Mapping[str, bytes]) -> Path:
        folder = self._scratch / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder

    # --- growth ------------------------------------------------------------------------------------------

    async def _grow_batch(self, tools: Tools) -> list[Tree]:
        """The trees of one update, all at once."""
        size, wave = self._config.learner.batch_trees, self.course.updates
        numbers = range(wave * size, (wave + 1) * size)
        trees = await asyncio.gather(*(self._grow(tools, number, wave) for number in numbers))
        self._forest.settled.clear()  # nobody else asks the rule
        self._forest.wanting.clear()
        return trees

    async def _grow(self, tools: Tools, number: int, wave: int) -> Tree:
        version, forest = self._kept[0][0], self._forest
        growing = forest.open(number, number, wave, version)
        growing.task = TaskId(growing.task.env, "train", task_index(self._config.seed, number))
        inspected = await inspect_root(number, growing.task, tools)
        forest.root(growing, inspected.root, inspected.gold_answer)
        while True:
            decision, branches = forest.decide(growing)
            await asyncio.gather(*(self._continue(tools, branch, version) for branch in branches))
            if decision.complete and not branches:
                break
        self._waves.complete(growing)
        tree = forest.close(growing)
        if tree is None:
            raise BenchmarkFailed(f"tree {number} ended without an outcome")
        return tree

    async def _continue(self, tools: Tools, branch: Branch, version: Version) -> None:
        """One lease to its end, by the actor's own code; what it reports goes straight into the tree."""
        branch.epoch += 1
        attempt = Attempt(write_lease(branch, version, LONG_S), 0.0)
        error = await expand(attempt, tools, lambda message: self._take(branch, message))
        if error is not None:
            raise error

    def _take(self, branch: Branch, message: Message) -> None:
        tree: GrowingTree = branch.tree
        match message:
            case Expanded(turn=turn, scores=scores):
                self._forest.expand(branch, turn, scores)
            case Finished(outcome=outcome):
                self._forest.end(branch, "finished", tree.earned(branch, outcome))
            case HorizonReached():
                self._forest.end(branch, "horizon", None)
            case _:
                pass  # `Starting`; and `Failed`, which comes back as an error

    # --- learning ----------------------------------------------------------------------------------------

    def _update(self, trees: Sequence[Tree]) -> None:
        course = self.course
        clock = Clock(Version(0, course.updates), self._config.learner.max_policy_lag)
        for run in (run for tree in trees for node in tree.nodes for run in node.turn.versions):
            course.ages[clock.lag(run.version)] += run.count
        course.tokens += sum(tree.num_action_tokens() for tree in trees)
        report = self._updater.update(trees, clock)
        outcomes = [c.outcome.raw_reward for tree in trees for c in tree.leaves() if c.outcome is not None]
        kept = {name: round(report.metrics[name], 6) for name in SAID if name in report.metrics}
        course.steps.append({"success": sum(outcomes) / len(outcomes), **kept})
        course.updates += 1
        self._keep()


SAID = ("grad_norm", "entropy", "ratio_ess", "clip_fraction", "weight_limited_fraction", "lag_mean")
"""Metrics of an update that are kept."""
