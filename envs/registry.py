"""The closed list of environments: name -> class, and the one function that builds them.

Classes are named by string and imported when first built, so that an environment with a heavy dependency
costs nothing to runs that do not use it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from common.errors import ConfigError, nearest
from envs.base import Environment

ENVIRONMENTS: Mapping[str, str] = {
    "frozenlake": "envs.frozenlake:FrozenLake",
}
"""Registry name -> `module:Class`."""


def environment_class(name: str) -> type[Environment]:
    """The class registered under `name`.

    Raises:
        ConfigError: there is none; the message gives the nearest valid name.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"env.name={name!r} is not an environment{nearest(name, ENVIRONMENTS)}; "
            f"valid: {', '.join(sorted(ENVIRONMENTS))}"
        )
    module, _, attribute = ENVIRONMENTS[name].partition(":")
    return cast(type[Environment], getattr(importlib.import_module(module), attribute))


def make_env(name: str, options: Mapping[str, Any]) -> Environment:
    """Build the environment `name` with `options` as its keyword arguments.

    Raises:
        ConfigError: unknown name or option, or an option value the environment refuses.
    """
    cls = environment_class(name)
    valid = list(inspect.signature(cls).parameters)
    for key in options:
        if key not in valid:
            raise ConfigError(
                f"env.{key} is not an option of {name!r}{nearest(key, valid)}; "
                f"valid: {', '.join(valid) or 'none'}"
            )
    return cls(**options)
