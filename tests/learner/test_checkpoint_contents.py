"""What is in a checkpoint: the format before, the parts of several ranks, and files that are not what they say."""

import json
import random
import shutil

import numpy as np
import pytest
import torch

from common.config import ModelConfig
from common.errors import StorageError
from common.manifest import MANIFEST_FILE, last_step, read_manifest
from learner import checkpoint as module
from learner.backend.torch_backend import OPTIMIZER_FILE
from learner.checkpoint import (
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from learner.policy import load_model, model_files
from learner.state import Origin, RunState, capture_random, from_ranges, restore_random
from tests.learner.checkpoints import (
    OLD,
    assert_same,
    everything,
    files_of,
    model_and_backend,
    restore,
    save,
    state,
)
from tests.learner.helpers import TOKENIZER

# ------------------------------------------------------------------------------------------- what is in one


def test_a_checkpoint_of_format_1_goes_on_bit_for_bit():
    """Bytes of the release before; its numbers are written down here."""
    found = read_checkpoint(OLD)
    assert (found.state.version.lineage, found.state.step, found.state.resumed) == (1, 2, [0, 1])
    assert (list(from_ranges(found.state.trained)), found.state.highest) == ([0, 1, 2, 5], 5)
    assert found.state.origin == Origin() and found.state.saved_at == 0.0
    tiny = ModelConfig(hidden_size=8, layers=1, heads=2, intermediate_size=8, max_context=64)
    model, backend = model_and_backend(seed=9, steps=0, settings=tiny)
    restore(found, model, backend)
    assert {int(each["step"]) for each in backend.optimizer.state.values()} == {2}
    assert_same(list(load_model(OLD).parameters()), list(model.parameters()))
    restore_random(found.state.random)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    assert drawn == (0.13436424411240122, 0.417022004702574, 0.7576315999031067)


def test_the_old_manifest_says_how_far_the_run_came():
    assert read_manifest(OLD).step == last_step(OLD.parent) == 2
    assert read_manifest(OLD).lineage is None


def test_where_a_checkpoint_comes_from_is_in_it(tmp_path):
    origin = Origin({"seed": 3, "learner": {"steps": 4}}, {"torch": "2"}, "abc", "run-1")
    made = RunState(
        lineage=2, step=3, trained=[], config_hash="c", random=capture_random(), saved_at=7.5, origin=origin
    )
    path = save_checkpoint(tmp_path, made, files_of(*model_and_backend()), keep=2)
    assert read_checkpoint(path).state.origin == origin
    manifest = read_manifest(path)
    assert (manifest.step, manifest.lineage, manifest.saved_at) == (3, 2, 7.5)


# ------------------------------------------------------------------------------------------- several ranks


def parts(ranks: int, world: int) -> dict[str, bytes]:
    model, _ = model_and_backend()
    names = (f"optimizer-zero1-rank{rank:04d}-of-{world:04d}.safetensors" for rank in range(ranks))
    return {**model_files(model, TOKENIZER), **{name: name.encode() for name in names}}


def test_every_ranks_file_comes_back_and_one_that_is_missing_is_damage(tmp_path):
    save(tmp_path, 1)
    files = parts(3, 3)
    path = save_checkpoint(tmp_path, state(2), files, keep=2)
    found = read_checkpoint(path)
    assert {name: found.files[name] for name in files} == files
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    del manifest["files"]["optimizer-zero1-rank0001-of-0003.safetensors"]
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(module.Damaged, match="lacks optimizer-zero1 of rank 1 of 3"):
        read_checkpoint(path)
    assert newest_checkpoint(tmp_path).state.step == 1


@pytest.mark.parametrize("files, word", [(parts(1, 2), "rank 1 of 2"), ({}, "model.safetensors")])
def test_a_save_without_all_files_is_refused_before_anything_is_written(tmp_path, files, word):
    with pytest.raises(ValueError, match=word):
        save_checkpoint(tmp_path, state(1), files, keep=2)
    assert not any(tmp_path.iterdir())


def test_a_part_of_an_optimiser_is_not_taken_for_the_whole(tmp_path):
    found = read_checkpoint(save_checkpoint(tmp_path, state(2), parts(2, 2), keep=2))
    model, backend = model_and_backend(seed=4)
    before = everything(model, backend)
    with pytest.raises(StorageError, match=r"lacks optimizer\.safetensors; .*learner\.backend"):
        backend.load_state(found.files)
    assert_same(before, everything(model, backend))


# ------------------------------------------------------------------------------------------- hostile or full


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b", ".."])
def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path, name):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"size": 1, "sha256": "0"}
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(module.Damaged, match="no plain file name"):
        read_checkpoint(path)


def test_a_save_needs_half_as_much_room_again_as_it_takes(tmp_path, monkeypatch):
    size = read_manifest(save(tmp_path, 1)).bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=int(1.49 * size)))
    with pytest.raises(
        StorageError, match=r"needs \d+\.\d MB of free space, got .* the previous one is untouched"
    ):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=int(1.51 * size)))
    save(tmp_path, 2)


def test_a_pickle_offered_as_the_optimiser_is_not_executed(tmp_path):
    canary = tmp_path / "canary"
    code = f"cbuiltins\nopen\n(V{canary}\nVw\ntR.".encode()
    files = {**parts(0, 1), OPTIMIZER_FILE: code}
    found = read_checkpoint(save_checkpoint(tmp_path / "c", state(2), files, keep=2))
    model, backend = model_and_backend()
    with pytest.raises(StorageError, match=r"optimizer.safetensors of the checkpoint is damaged"):
        restore(found, model, backend)
    assert not canary.exists()


# ------------------------------------------------------------------------------------------- of one step only


def test_a_checkpoint_under_the_name_of_another_step_is_not_taken_for_it(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "step-00000009")
    save(tmp_path, 2, keep=9)
    with pytest.raises(
        module.Damaged, match=r"is of step 1, its name must be step-00000001: was it renamed\?"
    ):
        read_checkpoint(tmp_path / "step-00000009")
    assert newest_checkpoint(tmp_path).state.step == 2
    (aside,) = tmp_path.glob("corrupt-step-00000009-*")
    assert read_checkpoint(aside).state.step == 1, "a name that says no step can be looked at"


@pytest.mark.parametrize("key, said", [("step", "step 7 of lineage 0"), ("lineage", "step 1 of lineage 7")])
def test_a_manifest_of_another_state_is_damage(tmp_path, key, said):
    path = save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    (path / MANIFEST_FILE).write_text(json.dumps({**manifest, key: 7}))
    with pytest.raises(module.Damaged, match=f"says {said}, state.msgpack step 1 of lineage 0"):
        read_checkpoint(path)


def test_a_checkpoint_of_format_1_under_another_name_is_refused_too(tmp_path):
    shutil.copytree(OLD, tmp_path / "step-00000005")
    with pytest.raises(module.Damaged, match="is of step 2"):
        read_checkpoint(tmp_path / "step-00000005")
