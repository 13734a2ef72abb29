"""Settings by their dotted keys: which there are, what type each has, and how text becomes a value.

The schema stays in `common.config`; this reads it by reflection, so that the command line, a recorded
`config.yaml` and the command lines of child processes agree on keys and types, and so that a mistake is
answered with one sentence naming the key, what was got, what is expected and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from common.config import Config, to_plain
from common.errors import ConfigError, nearest

NAMED_GROUPS = (
    "env",
    "engine",
    "allocator/budget",
    "allocator/predictor",
    "allocator/rule",
    "learner/backend",
    "learner/credit",
    "learner/filter",
    "learner/loss",
    "learner/weight",
)
"""Config groups whose section has a `name`; every such name is also an option of the group."""


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, type, value) of every leaf of a configuration, in the order of the schema."""
    kinds = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", kinds[item.name], value


def set_value(config: Any, key: str, value: Any) -> None:
    """Set one leaf. Rules of the schema are not looked at until `check`, since several settings may have to
    change together."""
    *sections, last = key.split(".")
    for name in sections:
        config = getattr(config, name)
    setattr(config, last, value)


def check(config: Any) -> None:
    """Hold the schema's rules of every section. Raises `ConfigError`."""
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(getattr(config, item.name)):
            check(getattr(config, item.name))
    if hasattr(config, "__post_init__"):
        config.__post_init__()


def expected(kind: Any) -> str:
    """What a setting of this type takes, in words."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}.get(
        kind, "a list like [a,b]"
    )


def convert(key: str, kind: Any, value: Any) -> Any:
    """`value`, text from the command line or a scalar from YAML, as the type of the setting `key`.

    Raises:
        ConfigError: it is of another type; the message names the key, the value and what is expected.
    """
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(key, kind, value)
    if kind == list[str]:
        return _texts(key, value)
    try:
        return _scalar(kind, _unquoted(value) if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{key} must be {expected(kind)}, got {value!r}") from None


def _scalar(kind: Any, value: Any) -> Any:
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if isinstance(value, (bool, list, dict)) or value is None or (kind is int and isinstance(value, float)):
        raise ValueError(value)
    if kind is str:
        return str(value)
    if kind in (int, float):
        number = kind(value)
        if not math.isfinite(number):  # no setting means anything there: bounds, times and rates are numbers
            raise ValueError(value)
        return number
    raise ValueError(value)


def _member(key: str, kind: type[enum.Enum], value: Any) -> enum.Enum:
    word = _unquoted(str(value)).lower()
    for member in kind:
        if word == member.value:
            return member
    valid = [str(member.value) for member in kind]
    raise ConfigError(f"{key} must be {expected(kind)}, got {value!r}{nearest(word, valid)}")


def _texts(key: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    text = str(value).strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise ConfigError(f"{key} must be {expected(list[str])}, got {value!r}")
    return [_unquoted(item.strip()) for item in text[1:-1].split(",") if item.strip()]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def to_text(value: Any) -> str:
    """The value as the command line writes it; `convert` reads it back."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(str(item) for item in value) + "]"
    if isinstance(value, str):
        # One more pair of quotes keeps a text that is itself in quotes, since one pair is taken off.
        return f"'{value}'" if value != _unquoted(value) else value
    return repr(value)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, enums by value; `run=` reads it back."""
    return "".join(f"{line}\n" for line in _yaml_lines(to_plain(config), ""))


def _yaml_lines(section: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            # JSON scalars and lists are YAML too, with every text in quotes.
            yield f"{indent}{key}: {json.dumps(value)}"


def close_keys(key: str, valid: Iterable[str]) -> list[str]:
    """The valid keys most like `key`: by the whole key, else by the last part alone (`lr`), at most three."""
    keys = list(valid)
    last = key.rpartition(".")[2]
    same = [name for name in keys if name.rpartition(".")[2] == last]
    if same:
        return same[:3]
    whole = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    by_last = {name.rpartition(".")[2]: name for name in reversed(keys)}
    parts = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.75)
    return whole or [by_last[part] for part in parts] or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)


def unknown_key(key: str, valid: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, with the nearest ones that do."""
    close = " or ".join(repr(name) for name in close_keys(key, valid))
    hint = f"did you mean {close}? " if close else ""
    return ConfigError(f"unknown setting {key!r}: {hint}python run.py --cfg job lists them all")


def overrides(config: Config) -> list[str]:
    """Command-line words that make `config` again in another process, on top of `experiment=none`.

    Everything that differs from the schema's defaults, and the whole section of every group that is chosen
    by name, since an option's file may override values too.
    """
    words = ["experiment=none"]
    words += [f"{group}={_named(config, group).name}" for group in NAMED_GROUPS]
    usual: Mapping[str, Any] = {key: value for key, _, value in settings(Config())}
    for key, _, value in settings(config):
        section, _, last = key.rpartition(".")
        if section.replace(".", "/") in NAMED_GROUPS:
            if last != "name":
                words.append(f"{key}={to_text(value)}")
        elif value != usual[key]:
            words.append(f"{key}={to_text(value)}")
    return words


def _named(config: Config, group: str) -> Any:
    node: Any = config
    for part in group.split("/"):
        node = getattr(node, part)
    return node
