"""Look at checkpoints without a run.

    python -m learner.checkpoint_tool ls RUN_OR_FOLDER            what there is, oldest first
    python -m learner.checkpoint_tool verify RUN_OR_FOLDER        every byte of every checkpoint; 1 on damage
    python -m learner.checkpoint_tool diff CHECKPOINT CHECKPOINT  what differs; 1 if anything does

It only reads: the run may still be going. Damage that a learner set aside (`corrupt-…`) is damage too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from safetensors.torch import load as parse_tensors
from torch import Tensor

from common.errors import StorageError, TreewardError
from common.manifest import MANIFEST_FILE
from common.resuming import flat
from learner.checkpoint import Checkpoint, checked_manifest, list_checkpoints, read_checkpoint
from learner.state import from_ranges


def found_at(place: Path) -> list[Path]:
    """The checkpoints of a run, of a folder of checkpoints, or the one named, those set aside included.

    Raises:
        StorageError: there are none.
    """
    for folder in (place / "learner" / "checkpoints", place):
        found = [*sorted(folder.glob("corrupt-step-*")), *list_checkpoints(folder)]
        if found:
            return found
    if (place / MANIFEST_FILE).is_file():
        return [place]
    raise StorageError(f"{place} must be a run, a folder of checkpoints, or a checkpoint: none is there")


def listed(place: Path) -> Iterator[str]:
    """A line for each."""
    for path in found_at(place):
        try:
            manifest = checked_manifest(path)
        except StorageError as error:
            yield f"{path.name}  {error}"
            continue
        when = (
            datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds") if manifest.saved_at else "?"
        )
        lineage = "?" if manifest.lineage is None else manifest.lineage
        yield (
            f"{path.name}  lineage {lineage}  saved {when}  {manifest.bytes / 1e6:.1f} MB  "
            f"{len(manifest.files)} files  format {manifest.format}"
        )


def verify(place: Path) -> tuple[list[str], bool]:
    """A line for each checkpoint, and whether all are sound."""
    lines, sound = [], True
    for path in found_at(place):
        try:
            checkpoint = read_checkpoint(path)
        except StorageError as error:
            lines.append(f"damaged: {error}")
            sound = False
            continue
        trees, extra = sum(1 for _ in from_ranges(checkpoint.state.trained)), extra_files(checkpoint)
        more = f", not in the manifest: {', '.join(extra)}" if extra else ""
        lines.append(f"sound: {path.name}, step {checkpoint.state.step}, {trees} trees inside{more}")
        sound = sound and not path.name.startswith("corrupt-")
    return lines, sound


def extra_files(checkpoint: Checkpoint) -> list[str]:
    """Files beside those that the manifest lists."""
    there = {path.name for path in checkpoint.path.iterdir()}
    return sorted(there - {*checkpoint.files, MANIFEST_FILE})


def differing(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """What two checkpoints do not share, a line each."""
    for name in ("step", "lineage", "resumed", "trained", "config_hash", "random"):
        was, now = getattr(one.state, name), getattr(other.state, name)
        if was != now:
            yield f"{name}: {'differs' if name == 'random' else f'{was} and {now}'}"
    for what in ("packages", "config"):
        yield from _values(what, getattr(one.state.origin, what), getattr(other.state.origin, what))
    for name in sorted({*one.files, *other.files}):
        if name not in one.files or name not in other.files:
            yield f"{name}: only in one"
        elif name.endswith(".safetensors") and one.files[name] != other.files[name]:
            yield from _tensors(name, parse_tensors(one.files[name]), parse_tensors(other.files[name]))
        elif not name.endswith(".msgpack") and one.files[name] != other.files[name]:
            yield f"{name}: differs"


def _values(what: str, one: dict[str, object], other: dict[str, object]) -> Iterator[str]:
    was, now = flat(one), flat(other)
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            yield f"{what}: {key}: {was.get(key)} and {now.get(key)}"


def _tensors(name: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> Iterator[str]:
    for key in sorted({*one, *other}):
        if key not in one or key not in other:
            yield f"{name}: {key}: only in one"
        elif one[key].shape != other[key].shape or one[key].dtype != other[key].dtype:
            yield f"{name}: {key}: {list(one[key].shape)} {one[key].dtype} and {list(other[key].shape)}"
        elif not one[key].equal(other[key]):
            largest = float((one[key].double() - other[key].double()).abs().max())
            yield f"{name}: {key}: by {largest:.3g} at most"


def main(words: Sequence[str]) -> int:
    """Print what was asked for; 0, or 1 for damage and differences."""
    parser = argparse.ArgumentParser(
        prog="python -m learner.checkpoint_tool", description="Look at checkpoints without a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("ls", "what there is"), ("verify", "check every byte")):
        commands.add_parser(name, help=what).add_argument("place", type=Path)
    compare = commands.add_parser("diff", help="what differs between two checkpoints")
    compare.add_argument("one", type=Path)
    compare.add_argument("other", type=Path)
    args = parser.parse_args(words)
    if args.command == "ls":
        lines, fine = list(listed(args.place)), True
    elif args.command == "verify":
        lines, fine = verify(args.place)
    else:
        lines = list(differing(read_checkpoint(args.one), read_checkpoint(args.other)))
        fine = not lines
    for line in lines:
        print(line)
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TreewardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
