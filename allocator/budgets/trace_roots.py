"""`trace_roots`: one sum of samples over a pool of candidate prompts, where outcomes are likely mixed.

TRACE's global stage (arXiv 2606.11119). A wave's pool holds `candidates` prompts for each of its places; when
the roots of all are known, `allocate_roots` selects exactly `batch_trees` of them and shares out `batch_trees
· continuations`. The others are dropped as `not_selected`, before anything was sampled from them.

    admit … admit ─▶ pool whole ─▶ chosen: m_i · unit continuations each      not chosen: 0
                                        └── dropped later ─▶ another prompt, the typical allowance at once

`unit` is what a sample from the root costs in continuations: 1, and 1 + N under the rule `trace`, which adds
N continuations from prefixes for each of them. The sum is shared out in samples, then multiplied.

Reconstruction, known from third-party notes: they say 1 − v^m − (1 − v)^m and one budget over a pool larger
than the batch. That exactly a batch of prompts is selected (the learner's batches have one size), the ratio
of the pool (`candidates` = 2), the uncertainty of v being integrated out, and `unit` are ours.

Predictions come from the past, and the uncertainty they state is integrated out (see `roots`). With a
predictor that looks at depth only (`history`) all roots are alike, and the allocation is an even one among
the prompts opened first: `shared` tells them apart.

What is trained then: a continuation weighs 1/allowance, fixed at grant, hence a prompt 1. Given the
selection, the gradient at every prefix is that of its prompt's expected return, without bias, since selection
and weights depend on predictions alone. Which prompts are trained does depend on them: the objective run is
not the mean over all prompts but one over those whose outcome is in doubt, as with any curriculum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from allocator.budgets.base import Budget, Prompt
from allocator.budgets.roots import PAIR, allocate_roots, chance_of_contrast
from allocator.rules.base import TreeView
from common.config_allocator import TraceRootsConfig
from common.nouns import ROOT, RewardSource
from common.predictor import Prediction


class TraceRootsBudget(Budget):
    """See the module. Wave by wave: no prompt waits for another wave's.

    Raises:
        ValueError: `config.continuations` are not at least two samples from the root (`check_allocator` says
            so in the words of the configuration).
    """

    name = "trace_roots"
    pooled = True

    def __init__(self, config: TraceRootsConfig, batch_trees: int, unit: int = 1) -> None:
        if config.continuations % unit or config.continuations < PAIR * unit:
            raise ValueError(f"{config.continuations} continuations are not two or more times {unit}")
        self.typical = config.continuations
        self.candidates = config.candidates
        self._batch = batch_trees
        self._unit = unit
        self._pools: dict[int, dict[int, Prediction]] = {}
        self._chosen: set[int] = set()
        """Waves that were chosen for."""
        self._allowances: dict[int, int] = {}
        """Of the open trees."""
        self._planned: dict[int, tuple[int, float]] = {}
        """Samples from the root, and V, of the open trees that were selected from a pool."""
        self._counts: Counter[str] = Counter()
        self._sums = dict.fromkeys(("planned", "even", "largest", "predicted"), 0.0)

    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        if prompt.wave in self._chosen:
            self._allowances[prompt.tree] = self.typical
            return {prompt.tree: self.typical}
        pool = self._pools.setdefault(prompt.wave, {})
        pool[prompt.tree] = prompt.prediction
        if len(pool) < self._batch * self.candidates:
            return {}
        self._chosen.add(prompt.wave)
        return self._choose(self._pools.pop(prompt.wave))

    def _choose(self, pool: Mapping[int, Prediction]) -> Mapping[int, int]:
        """From the whole pool of a wave, in order of the trees: who was ready first does not matter."""
        trees = sorted(pool)
        means, stds = [pool[tree].mean for tree in trees], [pool[tree].std for tree in trees]
        total = self._batch * self.typical // self._unit
        samples = allocate_roots(means, total, self._batch, stds, fill=True)
        for tree, count in zip(trees, samples, strict=True):
            if count:
                self._allowances[tree] = count * self._unit
                chance = chance_of_contrast(pool[tree].mean, count, pool[tree].std)
                self._planned[tree] = count, chance
                self._sums["planned"] += chance
        for tree in trees[: self._batch]:
            self._sums["even"] += chance_of_contrast(pool[tree].mean, total // self._batch, pool[tree].std)
        self._sums["largest"] += max(samples) * self._unit
        self._counts["waves"] += 1
        return {tree: count * self._unit for tree, count in zip(trees, samples, strict=True)}

    def withdraw(self, tree: int, slot: int) -> Mapping[int, int]:
        self._allowances.pop(tree, None)
        self._planned.pop(tree, None)
        for pool in self._pools.values():
            pool.pop(tree, None)
        return {}

    def extra(self, view: TreeView) -> int:
        return 0

    def weight(self, tree: int) -> float:
        return 1.0 / self._allowances[tree]

    def closed(self, view: TreeView) -> None:
        """Whether a prompt's samples from the root held both outcomes, where all that were planned ended."""
        samples, chance = self._planned.get(view.id, (0, 0.0))
        outcomes = [
            branch.outcome.raw_reward
            for branch in view.branches.values()
            if branch.anchor == ROOT
            and branch.outcome is not None
            and branch.outcome.source is RewardSource.ENVIRONMENT
        ]
        if samples and len(outcomes) == samples:
            self._counts["compared"] += 1
            self._counts["mixed"] += len(set(outcomes)) > 1
            self._sums["predicted"] += chance

    def stats(self) -> dict[str, float]:
        """Means so far, a prompt: `planned`, V by the predictions behind the allocation; `even`, the same had
        the first prompts of each pool been taken with equal samples; `predicted` and `mixed`, V and what came
        of it where all planned samples started at the root and ended. `largest` is the mean over the waves of
        their largest allowance."""
        waves, compared = self._counts["waves"], self._counts["compared"]
        if not waves:
            return {}
        prompts = waves * self._batch
        found = {name: self._sums[name] / prompts for name in ("planned", "even")}
        found["largest"] = self._sums["largest"] / waves
        if compared:
            found |= {
                "predicted": self._sums["predicted"] / compared,
                "mixed": self._counts["mixed"] / compared,
            }
        return found

    def to_state(self) -> dict[str, Any]:
        return {
            "pools": [
                [wave, [[tree, p.mean, p.std] for tree, p in pool.items()]]
                for wave, pool in self._pools.items()
            ],
            "chosen": sorted(self._chosen),
            "allowances": sorted(self._allowances.items()),
            "planned": [[tree, *planned] for tree, planned in sorted(self._planned.items())],
            "counts": sorted(self._counts.items()),
            "sums": sorted(self._sums.items()),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        self._pools = {
            wave: {tree: Prediction(mean, std) for tree, mean, std in pool} for wave, pool in state["pools"]
        }
        self._chosen = set(state["chosen"])
        self._allowances = dict(state["allowances"])
        self._planned = {tree: (samples, chance) for tree, samples, chance in state["planned"]}
        self._counts, self._sums = Counter(dict(state["counts"])), dict(state["sums"])
