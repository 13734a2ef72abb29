"""Which code is running: a version number does not change with every edit, so the sources are hashed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
GIT_S = 10.0
"""How long git may take to name a commit."""


@functools.cache
def code_id(*rooms: str) -> str:
    """Hash over the sources in these rooms, 16 hex digits: equal where the code is the same."""
    digest = hashlib.blake2b(digest_size=8)
    for room in rooms:
        for path in sorted((HOME / room).rglob("*.py")):
            digest.update(path.relative_to(HOME).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "mlflow")
"""What computes, or writes what is kept."""


@functools.cache
def packages() -> dict[str, str]:
    """Versions of Python, of this project and of `PACKAGES`; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in ("treeward", *PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@functools.cache
def commit() -> str:
    """The git commit of the sources; empty where they are no checkout, or git is missing."""
    command = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
