"""A child that fails is one sentence, and an interrupted benchmark leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import children
from benchmarks.children import run_command
from benchmarks.results import ROOT, BenchmarkFailed


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_runs_at_the_root_with_its_output_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.out"
    for _ in range(2):
        assert run_command("a", python("import os; print(os.getcwd())"), log) >= 0
    assert log.read_text() == f"{ROOT}\n", "of the last time only"


def test_a_failure_names_the_command_its_last_words_and_its_log(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed) as caught:
        run_command("seed 3", python("import sys; print('no such map'); sys.exit(4)"), tmp_path / "a.out")
    assert str(caught.value) == (
        f"seed 3 ended with exit code 4: no such map; its output: {tmp_path / 'a.out'}"
    )


def test_a_long_command_says_its_newest_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "SAY_S", 0.3)
    code = "import time; print('step 3/60', flush=True); time.sleep(1)"
    run_command("a", python(code), tmp_path / "a.out")
    assert "    step 3/60" in capsys.readouterr().out.splitlines()


def test_an_interruption_ends_the_child(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    code = (
        "import pathlib, sys\nfrom benchmarks.children import run_command\n"
        f"run_command('a', [sys.executable, '-c', {child!r}], pathlib.Path({str(tmp_path / 'a.out')!r}))"
    )
    outer = subprocess.Popen(python(code), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    outer.send_signal(signal.SIGINT)
    assert outer.wait(timeout=30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
