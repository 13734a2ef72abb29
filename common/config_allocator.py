"""The allocator's section of the configuration: branch rules, budgets, the success predictor.

Each rule and budget has its own dataclass; defaults are the constants of its paper. See
`docs/allocation.md` for what they mean, and the modules in `allocator/rules` and `allocator/budgets`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.errors import nearest, require


@dataclass(kw_only=True, slots=True)
class RuleConfig:
    """Which anchor next. `name` picks the rule; each rule has its own section."""

    name: str = "flat"


@dataclass(kw_only=True, slots=True)
class RandomRuleConfig(RuleConfig):
    """Tree-GRPO (arXiv 2509.21240): M chains, then rounds of N uniform draws from each chain's tree."""

    name: str = "random"
    chains: int = 2
    expansions: int = 2

    def __post_init__(self) -> None:
        require(self.chains >= 1, "allocator.rule.chains", "at least 1", self.chains)
        require(self.expansions >= 1, "allocator.rule.expansions", "at least 1", self.expansions)


@dataclass(kw_only=True, slots=True)
class EntropyRuleConfig(RuleConfig):
    """ARPO (arXiv 2507.19849) or AT²PO (arXiv 2601.04767): branch where the policy is unsure."""

    name: str = "entropy"
    form: str = "arpo"
    initial: int = 8
    """Trajectories from the prompt before anything branches: ARPO 8 of 16, AT²PO 10 of 22."""
    beam: int = 2
    """ARPO: paths at a turn that branches, the one that made it included. AT²PO (6): turns expanded per
    iteration."""
    threshold: float = 0.5
    """ARPO branches at a turn when U − weight · ΔH, U uniform in [0, 1], is at most this: the chance at a
    turn that is as uncertain as the path's first."""
    weight: float = 0.2
    """ARPO: what ΔH = 1 adds to that chance."""
    window: int = 20
    """ARPO: tokens of a turn, from its first, whose entropies count."""
    vocabulary: int = 151_936
    """ARPO divides entropies by log |V|; this is Qwen2.5's. With a smaller one entropy weighs more."""
    sibling_penalty: float = 0.05
    """AT²PO: what each sibling that is there already takes off a score."""

    def __post_init__(self) -> None:
        forms = ("arpo", "at2po")
        require(self.form in forms, "allocator.rule.form", f"one of {', '.join(forms)}", self.form)
        for name in ("initial", "beam", "window"):
            require(getattr(self, name) >= 1, f"allocator.rule.{name}", "at least 1", getattr(self, name))
        require(0 <= self.threshold <= 1, "allocator.rule.threshold", "in [0, 1]", self.threshold)
        require(math.isfinite(self.weight), "allocator.rule.weight", "a finite number", self.weight)
        require(self.vocabulary >= 2, "allocator.rule.vocabulary", "at least 2", self.vocabulary)
        penalty = self.sibling_penalty
        require(0 <= penalty < math.inf, "allocator.rule.sibling_penalty", "0 or more", penalty)


@dataclass(kw_only=True, slots=True)
class UucbRuleConfig(RuleConfig):
    """InfoTree (arXiv 2605.05262): value + exploration + entropy, the marginal gains of one objective."""

    name: str = "uucb"
    initial: int = 2
    """Continuations from the prompt before prefixes compete; about a third of all is a good share."""
    potential: str = "mixing"
    """What the value term adds up: `mixing`, 4 V (1 − V); `success`, V; `contrast`, the outcomes still
    missing under an anchor and before it."""
    decay: float = 0.5
    """`contrast`: what an outcome is worth under a turn, beside what it is worth under the turn before it."""
    value: float = 1.0
    exploration: float = 0.05
    entropy: float = 0.05
    """The paper's weights are not known. `value` is a chance, and where outcomes are nearly certain it
    differs by a few hundredths from anchor to anchor: greater weights of the others drown it."""

    def __post_init__(self) -> None:
        potentials = ("mixing", "success", "contrast")
        rule = f"one of {', '.join(potentials)}{nearest(self.potential, potentials)}"
        require(self.potential in potentials, "allocator.rule.potential", rule, self.potential)
        require(self.initial >= 1, "allocator.rule.initial", "at least 1", self.initial)
        require(0 <= self.decay <= 1, "allocator.rule.decay", "in [0, 1]", self.decay)
        for name in ("value", "exploration", "entropy"):
            weight = getattr(self, name)
            require(0 <= weight <= 1e6, f"allocator.rule.{name}", "between 0 and a million", weight)


@dataclass(kw_only=True, slots=True)
class TraceRuleConfig(RuleConfig):
    """TRACE (arXiv 2606.11119): m roots, then m · N continuations where they most likely flip an outcome."""

    name: str = "trace"
    per_root: int = 2
    """N: continuations from prefixes for each one from the root."""
    posterior: bool = True
    """Whether the success predicted at a prefix knows how its rollout and others of the tree ended (see
    `allocator/rules/trace.py`); false = what was predicted when the prefix was reached."""

    def __post_init__(self) -> None:
        require(self.per_root >= 0, "allocator.rule.per_root", "0 or more", self.per_root)


@dataclass(kw_only=True, slots=True)
class PatrRuleConfig(RuleConfig):
    """PATR (arXiv 2607.15610): process scores every K turns, top k split into M, the hopeless stopped."""

    name: str = "patr"
    interval: int = 5
    """K, turns between scoring points (FrozenLake 5, SWE 13)."""
    top_k: int = 2
    children: int = 2
    """M."""
    margin: float = 0.5
    """α: stop below median − α."""
    repeats: int = 6
    """Θ: stop when the newest turns, this many, all took the same action."""

    def __post_init__(self) -> None:
        for name in ("interval", "children", "repeats"):
            require(getattr(self, name) >= 1, f"allocator.rule.{name}", "at least 1", getattr(self, name))
        require(self.top_k >= 0, "allocator.rule.top_k", "0 or more", self.top_k)
        require(self.margin >= 0, "allocator.rule.margin", "0 or more", self.margin)


@dataclass(kw_only=True, slots=True)
class IgrpoRuleConfig(RuleConfig):
    """IGRPO (arXiv 2607.06223): one level at a time, expansions drawn by information gain."""

    name: str = "igrpo"
    gamma: float = 1.0
    """γ of the softmax over values."""
    cap: int = 2
    """Most expansions of one node in a level."""
    max_levels: int = 64
    """Levels after which active paths run to their end (the world's own turn limit usually comes first)."""
    pseudo_scale: float = 0.5
    """What a path that is not drawn is paid, times its score, in the first `stable_steps` updates; then 1."""
    stable_steps: int = 150

    def __post_init__(self) -> None:
        for name in ("cap", "max_levels"):
            require(getattr(self, name) >= 1, f"allocator.rule.{name}", "at least 1", getattr(self, name))
        for name in ("gamma", "pseudo_scale", "stable_steps"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"allocator.rule.{name}", "0 or more, and finite", value)


MAX_CONTINUATIONS = 65_536
"""As many as a finished tree may hold on the wire."""


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """How many continuations a prompt gets. `name` picks the budget."""

    name: str = "fixed"
    continuations: int = 6
    """2 chains and one round of 2 x 2 branches under the default rule: Tree-GRPO's six leaves. With budgets
    that spread a sum over prompts, the mean."""

    def __post_init__(self) -> None:
        rule, fits = f"between 1 and {MAX_CONTINUATIONS}", 1 <= self.continuations <= MAX_CONTINUATIONS
        require(fits, "allocator.budget.continuations", rule, self.continuations)


@dataclass(kw_only=True, slots=True)
class TraceRootsConfig(BudgetConfig):
    """TRACE's global stage: one budget over a pool of candidate prompts, by the chance of mixed outcomes."""

    name: str = "trace_roots"
    candidates: int = 2
    """Prompts set up for each place in a batch; the rest of the pool is not sampled from."""

    def __post_init__(self) -> None:
        BudgetConfig.__post_init__(self)
        fits = 1 <= self.candidates <= 64
        require(fits, "allocator.budget.candidates", "between 1 and 64", self.candidates)


@dataclass(kw_only=True, slots=True)
class AdaptiveConfig(BudgetConfig):
    """InfoTree's ABA: more for trees whose outcomes are all alike, where a learned model expects a rescue."""

    name: str = "adaptive"
    overhead: float = 0.05
    """Most extra continuations, as a share of the regular ones granted before."""
    extra: int = 2
    """Continuations of one rescue."""

    def __post_init__(self) -> None:
        BudgetConfig.__post_init__(self)
        require(0 <= self.overhead <= 1, "allocator.budget.overhead", "in [0, 1]", self.overhead)
        require(self.extra >= 1, "allocator.budget.extra", "at least 1", self.extra)


@dataclass(kw_only=True, slots=True)
class PredictorConfig:
    """The success predictor behind baselines, `uucb`, `trace`, `trace_roots` and `adaptive`."""

    name: str = "history"
    """`history` looks at depth only; `shared` is learned over prefix features, with `history` beside it."""
    discount: float = 0.9
    """λ: what a wave (one batch of trees) keeps of the evidence before it. The policy moves, so old outcomes
    fade; 0.9 remembers about ten waves, 1 forgets nothing."""
    strength: float = 1.0
    """`shared`: standard deviation, in log-odds, of a weight before there is evidence."""
    features: bool = True
    """`shared`: use the hidden states that actors report (engine.features, at most the first 64 values)."""
    recalibrate: bool = True
    """`shared`: after each wave, put the log-odds right by a slope and a shift learned from its outcomes."""

    def __post_init__(self) -> None:
        require(0 < self.discount <= 1, "allocator.predictor.discount", "in (0, 1]", self.discount)
        usable = 1e-3 <= self.strength <= 1e3
        require(usable, "allocator.predictor.strength", "between 0.001 and 1000", self.strength)


@dataclass(kw_only=True, slots=True)
class AllocatorConfig:
    rule: RuleConfig = field(default_factory=RandomRuleConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    max_score_staleness: int = 0
    """D: events a score may not have seen when its lease is granted and again when it starts. 0 waits within
    a tree for all that its rule reads; other trees fill the slots meanwhile. `random` with D > 0 draws from
    what is there so far, hence mostly among the first turns."""
    lease_deadline_s: float = 30.0
    """A lease without progress for this long is fenced and granted again elsewhere."""
    max_attempts: int = 3
    """Attempts at one continuation before it is dropped with its reasons."""
    journal_flush_ms: float = 50.0
    """Longest time an input stays unwritten, hence unacknowledged as durable."""

    def __post_init__(self) -> None:
        require(
            self.max_score_staleness >= 0,
            "allocator.max_score_staleness",
            "0 or more",
            self.max_score_staleness,
        )
        require(
            self.lease_deadline_s > 0, "allocator.lease_deadline_s", "positive seconds", self.lease_deadline_s
        )
        require(self.max_attempts >= 1, "allocator.max_attempts", "at least 1", self.max_attempts)
        require(self.journal_flush_ms >= 0, "allocator.journal_flush_ms", "0 or more", self.journal_flush_ms)


RULE_SCHEMAS: dict[str, type[RuleConfig]] = {
    "flat": RuleConfig,
    "random": RandomRuleConfig,
    "entropy": EntropyRuleConfig,
    "uucb": UucbRuleConfig,
    "trace": TraceRuleConfig,
    "patr": PatrRuleConfig,
    "igrpo": IgrpoRuleConfig,
}
BUDGET_SCHEMAS: dict[str, type[BudgetConfig]] = {
    "fixed": BudgetConfig,
    "trace_roots": TraceRootsConfig,
    "adaptive": AdaptiveConfig,
}
RULES = tuple(RULE_SCHEMAS)
BUDGETS = tuple(BUDGET_SCHEMAS)
PREDICTORS = ("history", "shared")


def root_cost(rule: RuleConfig) -> int:
    """Continuations that go with each one from the root, itself included, under a rule that says so."""
    return 1 + rule.per_root if isinstance(rule, TraceRuleConfig) else 1


def check_allocator(config: AllocatorConfig, batch_trees: int) -> None:
    """Rules across the section. Raises `ConfigError` naming the keys and the remedy."""
    rule, total = config.rule, config.budget.continuations
    if isinstance(config.budget, TraceRootsConfig):
        unit = root_cost(rule)
        require(
            total >= 2 * unit and total % unit == 0,
            "allocator.budget.continuations",
            "at least 2 for budget=trace_roots"
            if unit == 1
            else f"a multiple of {unit}, at least {2 * unit}, for budget=trace_roots with rule={rule.name} "
            f"(2 or more from the prompt, {unit - 1} from prefixes for each)",
            total,
        )
    elif isinstance(rule, RandomRuleConfig):
        per_round = rule.chains * rule.expansions
        require(
            total >= rule.chains and (total - rule.chains) % per_round == 0,
            "allocator.budget.continuations",
            f"chains + a multiple of chains x expansions ({rule.chains} + n x {per_round}) for rule=random",
            total,
        )
