"""Errors that cross a boundary, each with the exit code its process ends with.

    TreewardError
    ├── ConfigError        2   the user's configuration, command line or files
    ├── SecurityError      3   keys, refused binds
    ├── StorageError       4   checkpoints, journals, run directories
    ├── ProtocolError      5   frames, messages, versions
    ├── PeerLost           6   a role that the run cannot go on without
    ├── EngineError       70   generation engine died or refused weights
    └── EnvironmentFault  70   an environment raised or did not restore (never a zero reward)

A message is one sentence: what, where, expected and got, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TreewardError(Exception):
    """Base of every error a user may see; `exit_code` is the process's exit status."""

    exit_code = 70


class ConfigError(TreewardError):
    """A mistake in the configuration, the command line or a file the user named."""

    exit_code = 2


class SecurityError(TreewardError):
    """Missing keys, or a bind that would expose an unauthenticated port."""

    exit_code = 3


class StorageError(TreewardError):
    """A checkpoint, journal or run directory that is missing, damaged, foreign or in use."""

    exit_code = 4


class ProtocolError(TreewardError):
    """A frame or message that is malformed, too large, or of another protocol version."""

    exit_code = 5


class OtherProtocol(ProtocolError):
    """The other end is of another release: nothing that it says can be understood."""


class PeerLost(TreewardError):
    """A role that the run cannot go on without is gone for good."""

    exit_code = 6


class EngineError(TreewardError):
    """The generation engine failed; pending and later requests all raise it."""


class EnvironmentFault(TreewardError):
    """An environment raised, answered nonsense, or did not restore to the state it was forked from."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest valid word, or an empty string when none is close."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require(ok: bool, key: str, rule: str, got: object) -> None:
    """Raise the one-sentence `ConfigError` for `key` unless `ok`."""
    if not ok:
        raise ConfigError(f"{key} must be {rule}, got {got!r}")
