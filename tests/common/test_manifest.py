"""What is said of a manifest that is none."""

import json
from pathlib import Path

import pytest

from common.manifest import MANIFEST_FILE, is_whole, read_manifest


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
