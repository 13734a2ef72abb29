"""The run directory: one process per role, files that are whole or not there, endpoints of live processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.errors import PeerLost, StorageError
from common.rundir import RunDir, write_bytes_atomic, write_json_atomic


@pytest.fixture(name="run")
def new_run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "one")


HOLDER = """
import sys, pathlib
from common.rundir import RunDir
lock = RunDir.open(pathlib.Path(sys.argv[1])).lock("learner")
print("held", flush=True)
sys.stdin.read()
"""


def hold(run: RunDir) -> subprocess.Popen[str]:
    """Another process that holds the learner's lock until its stdin closes."""
    command = [sys.executable, "-c", HOLDER, str(run.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_created_run_can_be_opened_and_has_its_name_as_id(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path / "runs")
    opened = RunDir.open(created.path)
    assert opened.id == created.id
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", opened.id)


def test_two_runs_made_in_the_same_second_differ(tmp_path: Path) -> None:
    assert len({RunDir.create(tmp_path).id for _ in range(5)}) == 5


def test_an_existing_run_is_not_created_again(run: RunDir) -> None:
    with pytest.raises(StorageError, match="exists already; open it with run="):
        RunDir.create(run.path.parent, "one")


def test_a_directory_of_runs_that_cannot_be_made_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=rf"{runs_dir}: (File exists|Not a directory); .* runs_dir="):
            RunDir.create(runs_dir)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/etc", "a b", "x" * 200, "a\nb", "n\0"])
def test_a_name_that_could_leave_its_folder_is_refused_everywhere(run: RunDir, name: str) -> None:
    with pytest.raises(StorageError, match="letters, digits"):
        RunDir.create(run.path.parent, name)
    for use in (run.actor_dir, run.log_file, run.eval_file, run.lock, run.endpoint):
        with pytest.raises(StorageError, match="letters, digits"):
            use(name)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"not a run directory \(it has no run.json\)"):
        RunDir.open(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(StorageError, match="cannot read"):
        RunDir.open(tmp_path)


def test_a_run_of_another_layout_is_refused_with_both_numbers(run: RunDir) -> None:
    write_json_atomic(run.path / "run.json", {"layout": 99})
    with pytest.raises(StorageError, match="layout 99, this release reads layout 1"):
        RunDir.open(run.path)


def test_paths_stay_valid_when_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(Path("runs"), "one")
    monkeypatch.chdir("/")
    assert run.checkpoints == tmp_path / "runs/one/learner/checkpoints"
    assert run.checkpoints.is_dir()


def test_a_second_process_of_a_role_is_refused_within_a_second_and_told_who_holds_it(run: RunDir) -> None:
    holder = hold(run)
    try:
        began = time.monotonic()
        with pytest.raises(StorageError) as caught:
            run.lock("learner")
        assert time.monotonic() - began < 1
        assert caught.value.exit_code == 4
        for part in (f"process {holder.pid}", f"on {socket.gethostname()}", "since 2"):
            assert part in str(caught.value)
        run.lock("allocator").release()
    finally:
        holder.communicate()


def test_a_killed_holder_leaves_no_lock_behind(run: RunDir) -> None:
    holder = hold(run)
    holder.kill()
    holder.wait()
    with run.lock("learner"):
        pass


def test_a_lock_is_exclusive_within_a_process_and_free_after_release(run: RunDir) -> None:
    lock = run.lock("learner")
    with pytest.raises(StorageError, match=f"process {os.getpid()}"):
        run.lock("learner")
    lock.release()
    lock.release()
    run.lock("learner").release()


def test_a_child_process_does_not_inherit_the_lock(run: RunDir) -> None:
    program = "print('started', flush=True); input()"
    with run.lock("learner"):
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
    run.lock("learner").release()
    child.communicate(b"\n")


def test_a_published_endpoint_is_found_by_another_process_that_waits_for_it(run: RunDir) -> None:
    threading.Timer(0.1, run.publish_endpoint, ("allocator", "tcp://127.0.0.1:4321")).start()
    assert run.endpoint("allocator") is None
    assert RunDir.open(run.path).wait_endpoint("allocator", 5) == "tcp://127.0.0.1:4321"


def test_waiting_for_an_endpoint_ends_with_the_role_and_its_log_named(run: RunDir) -> None:
    with pytest.raises(PeerLost, match=r"the tracker published no endpoint .* within 0.1 s; .*tracker.log"):
        run.wait_endpoint("tracker", 0.1)


def test_the_endpoint_of_a_process_that_is_gone_is_not_believed(run: RunDir) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    entry = {"endpoint": "tcp://127.0.0.1:1", "host": socket.gethostname(), "pid": done.pid, "since": ""}
    write_json_atomic(run.path / "endpoints" / "learner.json", entry)
    assert run.endpoint("learner") is None
    write_json_atomic(run.path / "endpoints" / "learner.json", {**entry, "host": "elsewhere"})
    assert run.endpoint("learner") == "tcp://127.0.0.1:1"


def test_a_reader_sees_the_old_file_or_the_new_one_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json_atomic(path, {"filler": "a" * 10_000})
    stop = threading.Event()

    def replace() -> None:
        for letter in "bcdefghij":
            write_json_atomic(path, {"filler": letter * 10_000})
        stop.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not stop.is_set():
        assert len(set(json.loads(path.read_text())["filler"])) == 1
    writer.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "value"
    write_bytes_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["value"]


def test_the_file_and_its_directory_are_synced_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(fd: int) -> None:
        calls.append("sync dir" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        real_sync(fd)

    def replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    write_bytes_atomic(tmp_path / "value", b"new")
    assert calls == ["sync file", "rename", "sync dir"]
