"""The tool that looks at checkpoints without a run."""

from pathlib import Path

import pytest

from common.errors import StorageError
from learner.checkpoint import read_checkpoint, save_checkpoint
from learner.checkpoint_tool import differing, main
from tests.learner.checkpoints import OLD, files_of, flip_a_bit, model_and_backend, save, state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of a run."""
    found = tmp_path / "run" / "learner" / "checkpoints"
    save(found, 1)
    save(found, 2, trained=[0, 1, 5])
    return found


def test_sound_checkpoints_are_said_to_be_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (folder.parents[1], folder):
        assert main(["verify", str(place)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "sound: step-00000001, step 1, 0 trees inside",
            "sound: step-00000002, step 2, 3 trees inside",
        ]


def test_one_damaged_byte_is_found_named_and_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_bit(folder / "step-00000001" / "optimizer.safetensors")
    (folder / "step-00000002" / "stray").touch()
    assert main(["verify", str(folder)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("damaged: the checkpoint file ") and "step-00000001/optimizer.safetensors" in first
    )
    assert second.endswith("3 trees inside, not in the manifest: stray")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"], (
        "it only reads"
    )


def test_what_a_learner_set_aside_counts_as_damage(folder: Path) -> None:
    flip_a_bit(folder / "step-00000002" / "state.msgpack")
    (folder / "step-00000002").rename(folder / "corrupt-step-00000002-ab")
    assert main(["verify", str(folder)]) == 1


def test_a_list_has_a_line_for_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(folder)]) == main(["ls", str(OLD)]) == 0
    first, second, old = capsys.readouterr().out.splitlines()
    assert first.startswith("step-00000001  lineage 0  ") and second.endswith("5 files  format 2")
    assert "lineage ?" in old and old.endswith("format 1")


def test_a_difference_is_told_by_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(folder / "step-00000001")
    assert main(["diff", one, one]) == 0 and capsys.readouterr().out == ""
    model, backend = model_and_backend()
    next(model.parameters()).data[0, 0] += 0.25
    other = save_checkpoint(folder, state(3, [7]), files_of(model, backend), keep=9)
    told = list(differing(read_checkpoint(Path(one)), read_checkpoint(other)))
    assert "step: 1 and 3" in told and "trained: [] and [(7, 7)]" in told
    assert [line for line in told if "safetensors" in line] == [
        "model.safetensors: model.embed_tokens.weight: by 0.25 at most"
    ]
    assert main(["diff", one, str(other)]) == 1


def test_a_place_without_checkpoints_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="must be a run, a folder of checkpoints, or a checkpoint"):
        main(["verify", str(tmp_path)])
