"""Checkpoints: written whole or not at all, loaded whole or not at all.

    .tmp-00000012-<random>/  write, sync each file ─▶ manifest.json last ─▶ sync ─▶ rename ─▶ step-00000012/

    step-00000012/
        config.json model.safetensors tokenizer.json   the model, as anyone loads it
        optimizer.safetensors                          AdamW's moments
        state.msgpack                                  step, lineage, trees inside, random states
        manifest.json                                  sizes and SHA-256 of the files above

Loading checks everything against the manifest and against the model before it assigns anything. A damaged
newest checkpoint is set aside as `corrupt-…` with an error in the log, and the one before it is taken; where
some exist and none is valid, the run stops. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import StorageError
from common.journal import fsync_dir
from common.tokenizer import WordTokenizer
from learner.policy import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, model_files
from learner.state import RunState, decode_state, encode_state

LOG = logging.getLogger("treeward.learner.checkpoint")

FORMAT = 1
OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE = "optimizer.safetensors", "state.msgpack", "manifest.json"
FILES = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, OPTIMIZER_FILE, STATE_FILE)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter; the moments have its shape, `step` is a number."""


class Damaged(StorageError):
    """This checkpoint is not what was written: fall back to the one before it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose bytes are those that were written."""

    path: Path
    state: RunState
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


# ------------------------------------------------------------------------------------------------- saving


def save_checkpoint(
    folder: Path,
    state: RunState,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: WordTokenizer,
    keep: int,
) -> Path:
    """Write `folder/step-…` atomically, then remove all but the newest `keep`. Returns its path.

    Raises:
        StorageError: the disk refused; what was there before is untouched.
    """
    files = {
        **model_files(model, tokenizer),
        OPTIMIZER_FILE: dump_tensors(moments_of(model, optimizer)),
        STATE_FILE: encode_state(state),
    }
    final = folder / step_name(state.step)
    neighbour = folder / f".tmp-{state.step:08d}-{secrets.token_hex(4)}"
    try:
        _remove_leftovers(folder)
        neighbour.mkdir(parents=True)
        for name, data in files.items():
            _write(neighbour / name, data)
        _write(neighbour / MANIFEST_FILE, _manifest(files))
        fsync_dir(neighbour)
        if final.exists():
            _move_to_trash(final)
        neighbour.rename(final)
        fsync_dir(folder)
    except OSError as error:
        shutil.rmtree(neighbour, ignore_errors=True)
        raise StorageError(
            f"cannot write the checkpoint {final}: {error.strerror}; the previous one is untouched"
        ) from error
    for old in list_checkpoints(folder)[:-keep]:
        _move_to_trash(old)
    _remove_leftovers(folder)
    return final


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def moments_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as `<moment>/<parameter>` tensors; empty before the first step."""
    found = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            if moment in MOMENTS:
                found[f"{moment}/{name}"] = torch.as_tensor(value, dtype=torch.float32).contiguous()
    return found


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _manifest(files: Mapping[str, bytes]) -> bytes:
    entries = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    return json.dumps({"format": FORMAT, "files": entries}, indent=2, sort_keys=True).encode()


def _move_to_trash(path: Path) -> None:
    """First out of sight in one step, so that a half-deleted checkpoint never looks like one."""
    path.rename(path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}"))


def _remove_leftovers(folder: Path) -> None:
    """What a crash left: the role's lock guarantees that nobody else is writing here."""
    for pattern in (".tmp-*", ".trash-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ reading


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint directories, oldest first, sound or not."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest sound checkpoint, None where there never was one. Damaged ones are set aside, loudly.

    Raises:
        StorageError: checkpoints exist and none is sound: never start from scratch without being told to.
    """
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
        Damaged: a file is missing, of another size, or its hash differs.
        StorageError: it was written by a newer release.
    """
    entries = _read_manifest(path)
    data = {name: _read_checked(path / name, entries[name]) for name in FILES}
    try:
        return Checkpoint(
            path,
            decode_state(data[STATE_FILE]),
            parse_tensors(data[WEIGHTS_FILE]),
            parse_tensors(data[OPTIMIZER_FILE]),
        )
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"the checkpoint {path} is damaged: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
        version, entries = manifest["format"], manifest["files"]
        missing = [name for name in FILES if name not in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the checkpoint {path} has no readable {MANIFEST_FILE}: {error}") from error
    if version != FORMAT:
        raise StorageError(f"the checkpoint {path} has format {version}, this release reads format {FORMAT}")
    if missing:
        raise Damaged(f"the checkpoint {path} lacks {', '.join(missing)}")
    return dict(entries)


def _read_checked(file: Path, entry: Any) -> bytes:
    try:
        data = file.read_bytes()
        size, digest = entry["size"], entry["sha256"]
    except (OSError, KeyError, TypeError) as error:
        raise Damaged(f"the checkpoint file {file} cannot be read: {error}") from error
    if len(data) != size:
        raise Damaged(f"the checkpoint file {file} has {len(data)} bytes, expected {size}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged(f"the checkpoint file {file} is damaged: its SHA-256 differs from the manifest")
    return data


# ---------------------------------------------------------------------------------------------- restoring


def restore(checkpoint: Checkpoint, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint into a model and its optimiser: all of it, or nothing when anything does not fit.

    Raises:
        StorageError: it belongs to another model; the message names a tensor, expected and found.
    """
    parameters = dict(model.named_parameters())
    _check_tensors(checkpoint.path, {name: p.shape for name, p in parameters.items()}, checkpoint.weights)
    if checkpoint.moments:
        shapes = {
            f"{moment}/{name}": torch.Size(()) if moment == "step" else parameter.shape
            for name, parameter in parameters.items()
            for moment in MOMENTS
        }
        _check_tensors(checkpoint.path, shapes, checkpoint.moments)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.weights[name])
    optimizer.state.clear()
    for name, parameter in parameters.items() if checkpoint.moments else ():
        optimizer.state[parameter] = {m: checkpoint.moments[f"{m}/{name}"].clone() for m in MOMENTS}


def _check_tensors(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    """Names, shapes, types and values, before anything is assigned."""
    for name in sorted({*expected, *found}):
        if name not in found or name not in expected:
            where = "the checkpoint lacks it" if name not in found else "this run's model has no such tensor"
            raise _foreign(path, name, where)
        tensor = found[name]
        if tensor.shape != expected[name] or tensor.dtype != torch.float32:
            got = f"{list(tensor.shape)} {tensor.dtype}"
            raise _foreign(path, name, f"expected {list(expected[name])} torch.float32, found {got}")
        if not torch.isfinite(tensor).all():
            raise StorageError(f"the checkpoint {path} holds a value in {name} that is not finite")


def _foreign(path: Path, tensor: str, what: str) -> StorageError:
    return StorageError(
        f"the checkpoint {path} belongs to another model: {tensor}: {what}; "
        "use the model settings it was made with, or start a new run"
    )
