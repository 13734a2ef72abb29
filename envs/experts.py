"""Scripted experts with a measured amount of clumsiness: what warm starts are made from."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping

from common.errors import ConfigError
from envs.base import Environment

ACTION_SETS: Mapping[str, str] = {
    "frozenlake": "envs.frozenlake:ACTIONS",
}
"""Registry name -> `module:TUPLE` of every valid action, for environments that have few."""


def actions_of(name: str) -> tuple[str, ...]:
    """Every valid action of the environment `name`; empty where they cannot be listed."""
    if name not in ACTION_SETS:
        return ()
    module, _, attribute = ACTION_SETS[name].partition(":")
    return tuple(getattr(importlib.import_module(module), attribute))


def noisy_action(world: Environment, noise: float, rng: random.Random) -> str:
    """What the expert would do now; with probability `noise`, or where it knows nothing, any valid action.

    Raises:
        ConfigError: the environment has no expert, or its actions cannot be listed.
    """
    expert = world.expert_action(rng.getrandbits(62))
    if rng.random() >= noise and expert is not None:
        return expert
    choices = actions_of(world.name)
    if not choices:
        raise ConfigError(
            f"env.name={world.name} has {'no list of valid actions' if expert else 'no scripted expert'}: "
            "set warmstart.noise=0 or start from a model with model.path="
        )
    return rng.choice(choices)
