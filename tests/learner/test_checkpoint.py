"""Checkpoints: whole or not at all, on disk and in memory; damage is loud and never a fresh start."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, ModelConfig
from common.errors import StorageError
from common.manifest import MANIFEST_FILE
from common.rundir import RunDir
from learner import checkpoint as module
from learner.assembly import assembly
from learner.backend.alone import Alone
from learner.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from learner.policy import load_model
from learner.state import capture_random, from_ranges, restore_random, to_ranges
from tests.learner.checkpoints import (
    FILES,
    ROOT,
    assert_same,
    everything,
    files_of,
    flip_a_bit,
    model_and_backend,
    restore,
    save,
    state,
)


def test_model_and_optimiser_come_back_bit_for_bit_and_go_on_the_same_way(tmp_path):
    model, backend = model_and_backend()
    save_checkpoint(tmp_path, state(7, [0, 1, 2, 9]), files_of(model, backend), keep=2)
    found = newest_checkpoint(tmp_path)
    assert (found.state.step, list(from_ranges(found.state.trained))) == (7, [0, 1, 2, 9])
    other, other_backend = model_and_backend(seed=5, steps=1)
    restore(found, other, other_backend)
    assert_same(everything(model, backend), everything(other, other_backend))
    for one, its in ((model, backend), (other, other_backend)):
        its.backward(one(input_ids=torch.tensor([[7, 8, 9]])).logits.sum())
        its.step(0.01)
    assert_same(everything(model, backend), everything(other, other_backend))


def test_a_checkpoint_before_the_first_step_has_no_moments_and_loads(tmp_path):
    model, backend = model_and_backend(steps=0)
    save_checkpoint(tmp_path, state(0), files_of(model, backend), keep=2)
    other, other_backend = model_and_backend(seed=2, steps=1)
    restore(newest_checkpoint(tmp_path), other, other_backend)
    assert_same(everything(model, backend), everything(other, other_backend))
    assert not other_backend.optimizer.state


def test_a_checkpoint_is_also_a_model_folder(tmp_path):
    path = save(tmp_path, 3)
    model, _ = model_and_backend()
    assert_same(list(load_model(path).parameters()), list(model.parameters()))


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]


def test_what_a_kill_in_the_middle_of_a_save_left_is_no_checkpoint_and_is_cleared_away(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".tmp-00000002-abcd")
    (tmp_path / ".tmp-00000002-abcd" / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path).state.step == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


KILLED_SAVE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from learner import checkpoint
from tests.learner.checkpoints import save

count = 0
real = checkpoint.os.fsync
def fsync(fd):
    global count
    count += 1
    if count == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(fd)
checkpoint.os.fsync = fsync
save(Path({folder!r}), 2, seed=9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 6, 8])
def test_kill_9_at_a_sync_of_a_save_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, at):
    save(tmp_path, 1)
    script = textwrap.dedent(KILLED_SAVE).format(root=str(ROOT), folder=str(tmp_path), at=at)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ.copy(), check=False)
    assert done.returncode == -signal.SIGKILL
    found = newest_checkpoint(tmp_path)
    assert found.state.step in (1, 2)
    assert not list(tmp_path.glob("corrupt-*"))


def test_the_order_of_a_save_is_write_sync_manifest_sync_rename_sync(tmp_path, monkeypatch):
    calls: list[str] = []
    real_write, real_sync = module._write, module.fsync_dir
    real_rename = Path.rename
    monkeypatch.setattr(module, "_write", lambda p, d: (calls.append(p.name), real_write(p, d))[1])
    monkeypatch.setattr(module, "fsync_dir", lambda p: (calls.append(f"sync {p.name[:4]}"), real_sync(p))[1])
    monkeypatch.setattr(Path, "rename", lambda s, t: (calls.append("rename"), real_rename(s, t))[1])
    save(tmp_path, 1)
    assert calls[len(FILES) :] == ["manifest.json", "sync .tmp", "rename", f"sync {tmp_path.name[:4]}"]
    assert set(calls[: len(FILES)]) == set(FILES)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("file", [*FILES, MANIFEST_FILE])
def test_damage_to_any_file_is_noticed_and_the_previous_checkpoint_is_taken(tmp_path, damage, file, caplog):
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    found = newest_checkpoint(tmp_path)
    assert found.state.step == 1
    assert any(name.name.startswith("corrupt-step-00000002") for name in tmp_path.iterdir())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_if_no_checkpoint_is_sound_the_run_stops_instead_of_starting_afresh(tmp_path):
    truncate(save(tmp_path, 1) / "model.safetensors")
    for _ in range(2):  # and it stays so at the next start
        with pytest.raises(StorageError, match=r"no checkpoint in .* can be read"):
            newest_checkpoint(tmp_path)


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    assert newest_checkpoint(tmp_path) is None


def test_a_checkpoint_of_a_newer_format_is_refused_not_set_aside(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="format 99, this release reads formats 1 and 2"):
        newest_checkpoint(tmp_path)
    assert path.exists()


@pytest.mark.parametrize(
    "other, words",
    [
        (
            ModelConfig(hidden_size=16, layers=2, heads=2, intermediate_size=48),
            r"down_proj.*expected \[16, 48\].*found \[16, 32\]",
        ),
        (ModelConfig(hidden_size=16, layers=3, heads=2, intermediate_size=32), r"layers\.2.*it is missing"),
        (ModelConfig(hidden_size=16, layers=1, heads=2, intermediate_size=32), r"layers\.1.*no such tensor"),
    ],
)
def test_a_foreign_checkpoint_names_a_tensor_expected_and_found_and_assigns_nothing(tmp_path, other, words):
    save(tmp_path, 1)
    model, backend = model_and_backend(settings=other)
    before = everything(model, backend)
    with pytest.raises(StorageError, match=words):
        restore(read_checkpoint(tmp_path / "step-00000001"), model, backend)
    assert_same(before, everything(model, backend))


def test_weights_that_are_not_finite_are_refused_by_every_rank_that_loads_them(tmp_path):
    model, backend = model_and_backend()
    with torch.no_grad():
        list(model.parameters())[-1][0] = float("nan")
    path = save_checkpoint(tmp_path, state(1), files_of(model, backend), keep=2)
    build = assembly(Config(), RunDir.create(tmp_path / "runs"))
    with pytest.raises(StorageError, match=r"holds a value in .* that is not finite"):
        build(Alone(torch.device("cpu")), path)


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_half_written(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(StorageError, match="No space left on device; the previous one is untouched"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_random_states_come_back():
    saved = capture_random()
    expected = random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()
    restore_random(saved)
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()) == expected


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_numbers_given(numbers):
    ranges = to_ranges(numbers)
    assert list(from_ranges(ranges)) == sorted(numbers)
    assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(ranges))


# -------------------------------------------------------------------------------- where two of a step meet


def test_a_kill_while_a_checkpoint_is_replaced_by_one_of_the_same_step_loses_neither(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2, trained=[4])
    real, renamed = Path.rename, []

    def rename(path: Path, target: Path):
        if path.name.startswith(".tmp-"):
            raise KeyboardInterrupt  # stands for the kill: nothing after it runs
        renamed.append(target.name)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, seed=5)
    monkeypatch.undo()
    assert renamed == [".old-step-00000002"] and not (tmp_path / "step-00000002").exists()
    found = newest_checkpoint(tmp_path)
    assert (found.state.step, found.state.highest) == (2, 4)
    save(tmp_path, 2, seed=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert newest_checkpoint(tmp_path).state.highest == -1


def test_a_checkpoint_that_is_not_whole_is_not_counted_among_those_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (tmp_path / "step-00000003" / "config.json").unlink()
    save(tmp_path, 4, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-0000000{step}" for step in (2, 3, 4)]
