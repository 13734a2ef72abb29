"""Branch rules by name: a closed registry."""

from __future__ import annotations

from allocator.rules.base import Rule
from allocator.rules.flat import FlatRule
from allocator.rules.random import RandomRule
from common.config import RandomRuleConfig, RuleConfig
from common.errors import ConfigError, nearest

NAMES = ("flat", "random")


def make_rule(config: RuleConfig) -> Rule:
    """The rule that `allocator.rule` names. Raises `ConfigError` for an unknown one."""
    if isinstance(config, RandomRuleConfig):
        return RandomRule(config.chains, config.expansions)
    if config.name == "flat":
        return FlatRule()
    raise ConfigError(
        f"allocator.rule.name must be one of {', '.join(NAMES)}{nearest(config.name, NAMES)}, "
        f"got {config.name!r}"
    )
