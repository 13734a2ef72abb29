"""The manifest of a checkpoint: which files make it, with their sizes and hashes. Written last, read first.

It is JSON, so that whoever has no tensors to load (the launcher, an evaluation) can ask how far a run came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.rundir import NAME

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. `size` in bytes, `sha256` as hex digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module docstring."""

    format: int
    step: int
    files: Mapping[str, Entry]
    lineage: int | None = None
    """None in format 1, which did not say."""
    saved_at: float = 0.0
    """Seconds since 1970 by the clock of the machine that saved; 0 in format 1."""

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(entry.size for entry in self.files.values())


def step_name(step: int) -> str:
    """Directory of the checkpoint made after `step` updates."""
    return f"step-{step:08d}"


def entries_of(files: Mapping[str, bytes]) -> dict[str, Entry]:
    """What a manifest says of these files."""
    return {name: Entry(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}


def encode_manifest(manifest: Manifest) -> bytes:
    """As JSON."""
    files = {name: {"size": e.size, "sha256": e.sha256} for name, e in manifest.files.items()}
    plain = {
        "format": manifest.format, "step": manifest.step, "lineage": manifest.lineage,
        "saved_at": manifest.saved_at, "files": files,
    }  # fmt: skip
    return json.dumps(plain, indent=2, sort_keys=True).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's directory.

    Raises:
        OSError: there is none that can be read.
        ValueError: it is no manifest, or names a file that would lie outside the directory.
    """
    try:
        plain = _as_map(json.loads((folder / MANIFEST_FILE).read_bytes()), "it")
        listed = _as_map(plain["files"], "its 'files'")
        entries = {name: _as_map(entry, f"its {name!r}") for name, entry in listed.items()}
        files = {name: Entry(int(e["size"]), str(e["sha256"])) for name, e in entries.items()}
        step = int(plain["step"]) if "step" in plain else int(folder.name.rpartition("-")[2])
        lineage = plain.get("lineage")
        found = Manifest(
            int(plain["format"]), step, files, None if lineage is None else int(lineage),
            float(plain.get("saved_at", 0.0)),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except TypeError as error:
        raise ValueError(f"a number in it must be one: {error}") from error
    odd = [name for name in files if not NAME.match(name)]
    if odd:
        raise ValueError(f"it names {odd[0]!r}, which is no plain file name")
    return found


def _as_map(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a map, got {json.dumps(value)[:40]}")
    return value


def last_step(checkpoints: Path) -> int | None:
    """The step of a run's newest sound checkpoint, every byte looked at: whoever asks is about to load it, or
    to rely on it. None = there is none."""
    for path in newest_first(checkpoints):
        if not damage(path, hashed=True):
            return read_manifest(path).step
    return None


def newest_first(checkpoints: Path) -> list[Path]:
    """The folders of a run's checkpoints, sound or not."""
    return sorted(checkpoints.glob("step-*"), reverse=True)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint has a manifest, and all files in their sizes."""
    return not damage(path)


def damage(path: Path, *, hashed: bool = False) -> str:
    """What is wrong with a checkpoint, in words that begin with the file: `model.safetensors has …`; empty =
    nothing.

    Args:
        hashed: look at every byte, not only at sizes.
    """
    try:
        for name, entry in read_manifest(path).files.items():
            file = path / name
            if (size := file.stat().st_size) != entry.size:
                return f"{name} has {size} bytes, expected {entry.size}"
            if hashed and sha256_of(file) != entry.sha256:
                return f"{name} is damaged: its SHA-256 differs from the manifest"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{MANIFEST_FILE} is no manifest: {error}"
    return ""


def sha256_of(file: Path) -> str:
    """Of its bytes, as hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
