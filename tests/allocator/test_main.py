"""The allocator's process: how it leaves, and which runs it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from allocator.main import run_allocator
from common.errors import PeerLost, StorageError
from common.journal import read_journal
from common.messages import Bye, Welcome
from common.rundir import RunDir
from tests.allocator.clients import WAIT_S, FakeActor
from tests.allocator.served import Served, configuration, run_to_the_end, start_process


def test_sigterm_tells_the_peers_and_leaves_in_order(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    process = start_process(rundir)
    try:
        endpoint = rundir.wait_endpoint("allocator", WAIT_S)
        actor = FakeActor(endpoint, "actor", "a", "")
        actor.hello(configuration())
        assert actor.wait(Welcome).run == "run"
        process.send_signal(signal.SIGTERM)
        bye = actor.wait(Bye)
        assert bye.code == 6 and "stopped" in bye.reason
        actor.hear(0.1)
        assert process.wait(WAIT_S) == 0
        actor.close()
        assert list(read_journal(rundir.allocator_journal))[-1].kind == "end"
    finally:
        process.kill()
        process.communicate()


def test_a_second_allocator_on_a_run_is_refused(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    with rundir.lock("allocator"), pytest.raises(StorageError, match="is held by"):
        run_allocator(configuration(), rundir)


def test_a_run_that_is_over_is_refused_in_one_sentence(tmp_path: Path) -> None:
    config = configuration(connect_timeout_s=1.0)
    with Served(tmp_path, config) as served:
        run_to_the_end(served, served.actor())
        assert served.ended() == 0
    with pytest.raises(StorageError, match="run has been trained already: resume="):
        run_allocator(config, served.rundir)


def test_a_run_that_ended_for_want_of_a_learner_can_be_started_again(tmp_path: Path) -> None:
    """It said: start it again, then the run."""
    config = configuration(connect_timeout_s=0.5)
    with Served(tmp_path, config) as served:
        assert isinstance(served.ended(), PeerLost)
    with pytest.raises(PeerLost, match="no learner has said hello"):
        run_allocator(config, served.rundir)
    kinds = [record.kind for record in read_journal(served.rundir.allocator_journal)]
    assert kinds.count("start") == kinds.count("end") == 2 and kinds.count("recovered") == 1
