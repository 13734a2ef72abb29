"""Help, and how the command ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import run
from common import cli
from common.config import Role
from common.errors import PeerLost
from tests.run.door import ROOT, python


def test_help_is_quick_and_serves_a_newcomer(elsewhere: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("--help", cwd=elsewhere)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    for role in Role:
        assert f"  {role.value} " in done.stdout
    for group, options in cli.groups(run.CONFIGS).items():
        assert group == "role" or f"\n  {group}\n" in done.stdout
        for option, text in options.items():
            assert option in done.stdout and text and text in done.stdout
    assert done.stdout.count("  python run.py") >= 3
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


def test_a_roles_error_is_its_sentence_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: object) -> int:
        raise PeerLost("the allocator has been silent for 60 s")

    monkeypatch.setattr(run, "start", fail)
    assert run.main([]) == 6
    assert capsys.readouterr().err == "error: the allocator has been silent for 60 s\n"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(config: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "start", interrupt)
    assert run.main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_early_is_no_error(elsewhere: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 141


def test_threads_are_limited_unless_the_user_says_otherwise(elsewhere: Path) -> None:
    script = "import os, run; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    environment = {**os.environ, "MKL_NUM_THREADS": "3", "PYTHONPATH": str(ROOT)}
    del environment["OMP_NUM_THREADS"]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "3"]
