"""What is said of a manifest that is none."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.manifest import (
    MANIFEST_FILE,
    Manifest,
    damage,
    encode_manifest,
    entries_of,
    is_whole,
    last_step,
    read_manifest,
    step_name,
)


@pytest.mark.parametrize(
    "plain, said",
    [
        ([], r"^it must be a map, got \[\]$"),
        (None, "^it must be a map, got null$"),
        ({"format": 2, "step": 1, "files": []}, r"^its 'files' must be a map, got \[\]$"),
        ({"format": 2, "step": 1, "files": {"a": 3}}, "^its 'a' must be a map, got 3$"),
        ({"format": 2, "step": 1, "files": {"a": {"size": 3}}}, "^it lacks 'sha256'$"),
        ({"format": 2, "step": None, "files": {}}, "^a number in it must be one: "),
        ({"step": 1, "files": {}}, "^it lacks 'format'$"),
    ],
)
def test_a_manifest_that_is_none_is_refused_in_words(tmp_path: Path, plain: object, said: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=said):
        read_manifest(tmp_path)
    assert not is_whole(tmp_path)


# --------------------------------------------------------------------------------------------- damaged files


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        files = {"model": b"0123456789", "state": bytes([step])}
        place = folder / step_name(step)
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        (place / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(2, step, entries_of(files))))


DAMAGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    # what was done; what is said of it; whether sizes alone tell
    "cut": (lambda at: (at / "model").write_bytes(b"012"), "model has 3 bytes, expected 10", True),
    "gone": (lambda at: (at / "state").unlink(), "state cannot be read: No such file", True),
    "flipped": (lambda at: (at / "model").write_bytes(b"0123456780"), "model is damaged: its SHA-256", False),
    "no manifest": (lambda at: (at / MANIFEST_FILE).unlink(), "manifest.json cannot be read: No such", True),
    "odd": (lambda at: (at / MANIFEST_FILE).write_text("{}"), "manifest.json is no manifest: it lacks", True),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_told_by_its_file_and_does_not_count(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 2, 4)
    newest = tmp_path / step_name(4)
    assert damage(newest, hashed=True) == "" and last_step(tmp_path) == 4
    act, said, told_by_sizes = DAMAGES[kind]
    act(newest)
    assert damage(newest, hashed=True).startswith(said)
    assert is_whole(newest) is (not told_by_sizes)
    assert last_step(tmp_path) == 2
