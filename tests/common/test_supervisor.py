"""What happens when a child crashes, leaves, or the supervisor is told to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import common.supervisor
from common.supervisor import Fate, Interrupted, RoleLost, Supervisor


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(common.supervisor, "BACKOFF_S", 0.01)
    monkeypatch.setattr(common.supervisor, "LEFT_BY_ITSELF_S", 0.05)
    monkeypatch.setattr(common.supervisor, "TICK_S", 0.02)
    with Supervisor(tmp_path, 2, said.append, grace_s=1.0) as supervisor:
        yield supervisor


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_a_task_that_ends_well_is_done(supervisor: Supervisor) -> None:
    supervisor.start("task", sh("exit 0"))
    assert supervisor.wait(lambda: supervisor.is_done("task"), timeout_s=10)


def test_a_role_that_crashes_stops_the_run_with_what_it_said_last(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.start("learner", sh("echo first; echo 'error: no space left' >&2; exit 70"))
    with pytest.raises(RoleLost) as raised:
        supervisor.wait(lambda: supervisor.is_done("learner"), timeout_s=10)
    sentence = str(raised.value)
    assert "learner stopped (exit code 70)" in sentence and "first | error: no space left" in sentence
    assert str(tmp_path / "learner.out") in sentence and "\n" not in sentence
    assert raised.value.exit_code == 6


def test_a_role_that_goes_on_where_it_was_is_restarted_until_it_ends_well(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    """Killed the first time, broken the second, done the third."""
    script = (
        f"echo x >> {tmp_path}/starts; case $(wc -l < {tmp_path}/starts) in 1) kill -9 $$;; 2) exit 70;; esac"
    )
    supervisor.start("allocator", sh(script), fate=Fate.RESUME)
    assert supervisor.wait(lambda: supervisor.is_done("allocator"), timeout_s=10)
    assert len(said) == 2 and "restart 1 of 2" in said[0]
    assert (tmp_path / "starts").read_text() == "x\n" * 3


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6])
def test_a_role_that_says_it_cannot_go_on_where_it_was_is_believed(
    code: int, supervisor: Supervisor, said: list[str]
) -> None:
    supervisor.start("allocator", sh(f"exit {code}"), fate=Fate.RESUME)
    with pytest.raises(RoleLost) as raised:
        supervisor.wait(lambda: False, timeout_s=10)
    assert raised.value.exit_code == code and said == []


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_a_meaningful_exit_code_is_kept_and_not_tried_again(
    code: int, supervisor: Supervisor, said: list[str]
) -> None:
    supervisor.start("actor-0", sh(f"exit {code}"), fate=Fate.RESTART)
    with pytest.raises(RoleLost) as raised:
        supervisor.wait(lambda: False, timeout_s=10)
    assert raised.value.exit_code == code and said == []


def test_an_actor_that_crashes_is_started_again_until_it_has_done_so_too_often(
    supervisor: Supervisor, said: list[str], tmp_path: Path
) -> None:
    supervisor.start("actor-0", sh("echo start >> count; echo why; exit 1"), fate=Fate.RESTART, cwd=tmp_path)
    with pytest.raises(RoleLost, match=r"actor-0 stopped after 2 restarts .*it said: why; log: "):
        supervisor.wait(lambda: False, timeout_s=10)
    assert (tmp_path / "count").read_text().count("start") == 3
    assert [line.split(":")[0] for line in said] == ["actor-0 stopped (exit code 1)"] * 2
    assert "restart 1 of 2" in said[0] and "restart 2 of 2" in said[1]


def test_an_actor_killed_once_is_back(supervisor: Supervisor, said: list[str]) -> None:
    first = supervisor.start("actor-0", ["sleep", "60"], fate=Fate.RESTART)
    os.kill(first.process.pid, signal.SIGKILL)

    def back() -> bool:
        return supervisor.watched["actor-0"].child is not first and supervisor.is_running("actor-0")

    assert supervisor.wait(back, timeout_s=10)
    assert "killed by SIGKILL" in said[0]


def test_an_actor_that_leaves_by_itself_is_started_again_after_a_while(
    supervisor: Supervisor, said: list[str]
) -> None:
    first = supervisor.start("actor-0", sh("exit 0"), fate=Fate.RESTART)
    assert supervisor.wait(lambda: supervisor.watched["actor-0"].child is not first, timeout_s=10)
    assert said == []


def test_a_retired_child_may_exit_with_any_code_and_stays_away(supervisor: Supervisor) -> None:
    child = supervisor.start("actor-0", sh("sleep 0.1; exit 9"), fate=Fate.RESTART)
    supervisor.retire("actor-0")
    assert supervisor.wait(lambda: supervisor.is_done("actor-0"), timeout_s=10)
    assert supervisor.watched["actor-0"].child is child


def test_a_child_that_waits_for_its_restart_can_be_retired(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.supervisor, "BACKOFF_S", 60.0)
    supervisor.start("actor-0", sh("exit 1"), fate=Fate.RESTART)
    supervisor.wait(lambda: supervisor.watched["actor-0"].restart_at is not None, timeout_s=10)
    supervisor.retire("actor-0")
    assert supervisor.wait(lambda: supervisor.is_done("actor-0"), timeout_s=10)


def test_a_tracker_that_cannot_be_kept_alive_only_warns(supervisor: Supervisor, said: list[str]) -> None:
    supervisor.start("tracker", sh("exit 4"), fate=Fate.WARN)
    assert supervisor.wait(lambda: supervisor.is_done("tracker"), timeout_s=10)
    assert len(said) == 3 and "going on without it" in said[-1]


def test_waiting_has_a_bound_and_a_tick(supervisor: Supervisor) -> None:
    ticks: list[int] = []
    assert not supervisor.wait(lambda: False, timeout_s=0.1, every_tick=lambda: ticks.append(1))
    assert ticks


def test_an_error_in_the_middle_leaves_no_child_behind(tmp_path: Path, said: list[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    pids = []

    def fail() -> None:
        with Supervisor(tmp_path, 0, said.append, grace_s=5.0) as supervisor:
            pids.extend(supervisor.start(f"c{i}", ["sleep", "60"]).process.pid for i in range(3))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert len(pids) == 3 and not any(psutil.pid_exists(pid) for pid in pids)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_wait_and_ends_the_children(
    number: signal.Signals, tmp_path: Path, said: list[str]
) -> None:
    with Supervisor(tmp_path, 0, said.append, grace_s=5.0) as supervisor:
        child = supervisor.start("c", ["sleep", "60"])
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Interrupted) as raised:
            supervisor.wait(lambda: False, timeout_s=10)
    assert raised.value.signal_number == number
    assert child.exit_code() == -signal.SIGTERM


def test_the_second_signal_means_now(tmp_path: Path, said: list[str]) -> None:
    began = time.monotonic()
    with Supervisor(tmp_path, 0, said.append, grace_s=60.0) as supervisor:
        child = supervisor.start("c", sh("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
        supervisor.wait(lambda: child.last_lines() == "ready", timeout_s=10)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(Interrupted):
            supervisor.wait(lambda: False, timeout_s=30)
    assert child.exit_code() == -signal.SIGKILL
    assert time.monotonic() - began < 20
