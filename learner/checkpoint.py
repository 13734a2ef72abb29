"""Checkpoints: written whole or not at all, loaded whole or not at all.

    .tmp-00000012-<random>/  write, sync each file ─▶ manifest.json last ─▶ sync ─▶ rename ─▶ step-00000012/

    step-00000012/
        config.json model.safetensors tokenizer.json   the model, as anyone loads it
        optimizer.safetensors                          its state, where one learner process has all of it;
        optimizer-…-rank0001-of-0004.safetensors       else the part of each
        state.msgpack                                  step, lineage, trees inside, random states, origin
        manifest.json                                  step, lineage, date; sizes and SHA-256 of those above

Loading checks everything against the manifest and against the model before it assigns anything
(`learner.assembly`). A damaged newest checkpoint is set aside as `corrupt-…` with an error in the log, and
the one before it is taken; where some exist and none is valid, the run stops. Nothing is pickled.

This is format 2. Format 1, which knew neither parts nor where a checkpoint came from, is read too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from common.errors import StorageError
from common.journal import fsync_dir
from common.manifest import (
    MANIFEST_FILE,
    Entry,
    Manifest,
    encode_manifest,
    entries_of,
    is_whole,
    read_manifest,
    step_name,
)
from common.rundir import NAME
from learner.policy import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from learner.state import RunState, decode_state, encode_state

LOG = logging.getLogger("treeward.learner.checkpoint")

FORMAT = 2
READABLE = (1, FORMAT)
STATE_FILE = "state.msgpack"
OPTIMIZER = "optimizer"
"""How the names of the optimiser's files begin."""
NEEDED = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, STATE_FILE)
"""Files of every checkpoint; those of the optimiser come to these."""
RANK_FILE = re.compile(r"(.+)-rank(\d+)-of-(\d+)\.[a-z]+")
SPARE = 1.5
"""Free space that a save needs, in sizes of the checkpoint: logs and journals grow beside it."""


class Damaged(StorageError):
    """This checkpoint is not what was written: fall back to the one before it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose bytes are those that were written."""

    path: Path
    state: RunState
    weights: Mapping[str, Tensor]
    files: Mapping[str, bytes]
    """All of them by name."""


def parts_missing(names: Iterable[str]) -> list[str]:
    """What these files lack: an optimiser, or the parts of some ranks, as sentences."""
    names = list(names)
    if not any(name.startswith(OPTIMIZER) for name in names):
        return [f"no file {OPTIMIZER}…"]
    parts: dict[tuple[str, int], set[int]] = {}
    for found in filter(None, map(RANK_FILE.fullmatch, names)):
        parts.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    return [
        f"{stem} of rank {rank} of {world}"
        for (stem, world), ranks in sorted(parts.items())
        for rank in sorted(set(range(world)) - ranks)
    ]


# ------------------------------------------------------------------------------------------------- saving


def save_checkpoint(folder: Path, state: RunState, files: Mapping[str, bytes], keep: int) -> Path:
    """Write `folder/step-…` atomically, then remove all but the newest `keep`. Returns its path.

    Args:
        folder: the run's checkpoints; one process writes there.
        state: where the run stands.
        files: the model's, and those of every rank's optimiser.
        keep: checkpoints kept, this one included; such that are not whole do not count.

    Raises:
        StorageError: the disk refused, or lacks room; what was there before is untouched.
        ValueError: a file is missing from `files`.
    """
    files = {**files, STATE_FILE: encode_state(state)}
    _check_complete(files)
    final = folder / step_name(state.step)
    neighbour = folder / f".tmp-{state.step:08d}-{secrets.token_hex(4)}"
    manifest = Manifest(FORMAT, state.step, entries_of(files), state.lineage, state.saved_at)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        _check_room(folder, manifest.bytes)
        neighbour.mkdir()
        for name, data in files.items():
            _write(neighbour / name, data)
        _write(neighbour / MANIFEST_FILE, encode_manifest(manifest))
        fsync_dir(neighbour)
        _put_in_place(neighbour, final)
        fsync_dir(folder)
    except OSError as error:
        shutil.rmtree(neighbour, ignore_errors=True)
        raise StorageError(
            f"cannot write the checkpoint {final}: {error.strerror}; the previous one is untouched"
        ) from error
    _remove_old(folder, keep)
    return final


def _check_complete(files: Mapping[str, bytes]) -> None:
    missing = [name for name in NEEDED if name not in files] + parts_missing(files)
    odd = [name for name in files if not NAME.match(name)]
    if missing or odd:
        raise ValueError(f"a checkpoint must have all files under plain names, lacks {missing}, got {odd}")


def _check_room(folder: Path, size: int) -> None:
    """A disk that fills up in the middle of a save costs the journals their next record too."""
    free = shutil.disk_usage(folder).free
    if free < SPARE * size:
        raise StorageError(
            f"cannot write a checkpoint to {folder}: it needs {SPARE * size / 1e6:.1f} MB of free space, got "
            f"{free / 1e6:.1f} MB; the previous one is untouched"
        )


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(neighbour: Path, final: Path) -> None:
    """Rename. One of the same step first makes room: `_take_back` knows it by its name if we die between."""
    if final.exists():
        final.rename(final.with_name(f".old-{final.name}"))
    neighbour.rename(final)


def _take_back(folder: Path) -> None:
    """A checkpoint whose successor of the same step never came into its place."""
    for path in folder.glob(".old-step-*"):
        final = path.with_name(path.name.removeprefix(".old-"))
        if not final.exists():
            path.rename(final)


def _remove_leftovers(folder: Path) -> None:
    """What a crash left: the role's lock guarantees that nobody else is writing here."""
    _take_back(folder)
    for pattern in (".tmp-*", ".trash-*", ".old-step-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _remove_old(folder: Path, keep: int) -> None:
    """First out of sight in one step, so that a half-deleted checkpoint never looks like one."""
    found = list_checkpoints(folder)
    whole = [path for path in found if is_whole(path)]
    for path in found[: found.index(whole[-keep:][0])] if whole else ():
        path.rename(path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}"))
    _remove_leftovers(folder)


# ------------------------------------------------------------------------------------------------ reading


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint directories, oldest first, sound or not."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest sound checkpoint, None where there never was one. Damaged ones are set aside, loudly.

    Raises:
        StorageError: checkpoints exist and none is sound: never start from scratch without being told to.
    """
    _take_back(folder)
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except Damaged as error:
            aside = path.with_name(f"corrupt-{path.name}-{secrets.token_hex(2)}")
            path.rename(aside)
            LOG.error("%s; set aside as %s, taking the one before it", error, aside.name)
    if found or any(folder.glob("corrupt-*")):
        raise StorageError(
            f"no checkpoint in {folder} can be read (see corrupt-*); restore one from a copy, "
            "or start a new run"
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint and check every byte against its manifest.

    Raises:
        Damaged: a file is missing, of another size, or its hash differs, or the folder, the manifest and the
            state are of different steps.
        StorageError: it was written by a newer release.
    """
    manifest = checked_manifest(path)
    files = {name: _read_checked(path / name, entry) for name, entry in manifest.files.items()}
    try:
        state = decode_state(files[STATE_FILE])
        weights = parse_tensors(files[WEIGHTS_FILE])
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"the checkpoint {path} is damaged: {error}") from error
    _check_one_step(path, manifest, state)
    return Checkpoint(path, state, weights, files)


def _check_one_step(path: Path, manifest: Manifest, state: RunState) -> None:
    """A folder under another step's name would be taken for a newer one. `corrupt-…` says none."""
    named = path.name.startswith("step-")
    if named and path.name != step_name(state.step):
        raise Damaged(
            f"the checkpoint {path} is of step {state.step}, its name must be {step_name(state.step)}: was "
            "it renamed?"
        )
    # Format 1 says no lineage, and may say no step: then it was taken from the name.
    lineage = state.lineage if manifest.lineage is None else manifest.lineage
    if (manifest.step, lineage) != (state.step, state.lineage) and (named or manifest.format > 1):
        raise Damaged(
            f"the checkpoint {path} is damaged: {MANIFEST_FILE} says step {manifest.step} of lineage "
            f"{lineage}, {STATE_FILE} step {state.step} of lineage {state.lineage}"
        )


def checked_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint that this release can read and that lists all it needs.

    Raises:
        Damaged: it is missing, no manifest, or lacks a file.
        StorageError: it was written by a newer release.
    """
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        raise Damaged(f"the checkpoint {path} has no readable {MANIFEST_FILE}: {error}") from error
    if manifest.format not in READABLE:
        raise StorageError(
            f"the checkpoint {path} has format {manifest.format}, this release reads formats "
            f"{' and '.join(map(str, READABLE))}"
        )
    missing = [name for name in NEEDED if name not in manifest.files] + parts_missing(manifest.files)
    if missing:
        raise Damaged(f"the checkpoint {path} lacks {', '.join(missing)}")
    return manifest


def _read_checked(file: Path, entry: Entry) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Damaged(f"the checkpoint file {file} cannot be read: {error}") from error
    if len(data) != entry.size:
        raise Damaged(f"the checkpoint file {file} has {len(data)} bytes, expected {entry.size}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Damaged(f"the checkpoint file {file} is damaged: its SHA-256 differs from the manifest")
    return data
