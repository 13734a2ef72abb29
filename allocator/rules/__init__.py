"""Branch rules by name: a closed registry."""

from __future__ import annotations

from allocator.rules.base import Rule
from allocator.rules.entropy import EntropyRule
from allocator.rules.flat import FlatRule
from allocator.rules.igrpo import IgrpoRule
from allocator.rules.patr import PatrRule
from allocator.rules.random import RandomRule
from allocator.rules.trace import TraceRule
from allocator.rules.uucb import UucbRule
from common.config_allocator import (
    EntropyRuleConfig,
    IgrpoRuleConfig,
    PatrRuleConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRuleConfig,
    UucbRuleConfig,
)
from common.errors import ConfigError, nearest

NAMES = ("flat", "random", "entropy", "uucb", "trace", "patr", "igrpo")


def make_rule(config: RuleConfig) -> Rule:
    """The rule that `allocator.rule` names. Raises `ConfigError` for an unknown one."""
    match config:
        case RandomRuleConfig():
            return RandomRule(config.chains, config.expansions)
        case EntropyRuleConfig():
            return EntropyRule(config)
        case UucbRuleConfig():
            return UucbRule(config)
        case TraceRuleConfig():
            return TraceRule(config)
        case PatrRuleConfig():
            return PatrRule(config)
        case IgrpoRuleConfig():
            return IgrpoRule(config)
    if config.name == "flat":
        return FlatRule()
    raise ConfigError(
        f"allocator.rule.name must be one of {', '.join(NAMES)}{nearest(config.name, NAMES)}, "
        f"got {config.name!r}"
    )
