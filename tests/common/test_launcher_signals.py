"""How a launcher may die: it takes its children along, and a closed terminal does not end it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.common.launched import FAKE, ROOT

DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from common.config import Config
from common.launcher import run_local
config = Config()
config.cluster.actors = 2
sys.exit(run_local(config, lambda role, words: [sys.executable, {str(FAKE)!r}, role, *words]))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> subprocess.Popen[str]:
    """A launcher in a process of its own, with a run that would never end."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path, env={**os.environ, "TREEWARD_FAKE": json.dumps({"learner": "endless"})},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def children_of(launcher: subprocess.Popen[str], run_dir: Path) -> list[psutil.Process]:
    """Its children, once tracker, allocator, learner and two actors are running."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = psutil.Process(launcher.pid).children(recursive=True)
        if list(run_dir.glob("runs/*/training")) and len(found) >= 5:
            return found
        time.sleep(0.05)
    pytest.fail(f"the launcher did not get that far: {launcher.communicate()}")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_ends_all_children_and_says_one_line(
    number: signal.Signals, code: int, launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    children = children_of(launcher, tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert err == ""
    assert re.fullmatch(
        rf"stopped by {number.name}: all processes have ended, run runs/\S+", out.splitlines()[-1]
    )
    assert not any(child.is_running() for child in children)


def test_killed_outright_it_takes_its_children_along_within_10_s(
    launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    children = children_of(launcher, tmp_path)
    launcher.kill()
    launcher.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_closed_terminal_does_not_end_the_run(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    children = children_of(launcher, tmp_path)
    time.sleep(0.3)
    assert launcher.poll() is None and all(child.is_running() for child in children)
    launcher.terminate()
    assert launcher.wait(timeout=30) == 143
    assert launcher.stderr is not None and launcher.stderr.read() == ""
    launcher.stderr.close()
