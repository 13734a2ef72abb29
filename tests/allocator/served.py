"""An allocator that speaks through sockets: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import zmq

from allocator.core import AllocatorCore
from allocator.loop import AllocatorLoop
from common.config import ClusterConfig, Config, Role, TrackingConfig
from common.config_allocator import AllocatorConfig, BudgetConfig
from common.config_learner import LearnerConfig
from common.journal import JournalWriter, Record, read_journal
from common.metrics import MetricsClient
from common.rundir import RunDir
from common.sockets import SocketFactory, bound_endpoint
from tests.allocator.clients import WAIT_S, Client, FakeActor, FakeLearner, until


def configuration(connect_timeout_s: float = 10.0) -> Config:
    """Three updates of two trees; peers are dead after a second."""
    return Config(
        role=Role.ALLOCATOR,
        learner=LearnerConfig(steps=3, batch_trees=2, max_policy_lag=1),
        allocator=AllocatorConfig(budget=BudgetConfig(continuations=3), journal_flush_ms=20.0),
        cluster=ClusterConfig(
            allocator="tcp://127.0.0.1:0",
            heartbeat_s=0.2,
            dead_after_s=1.0,
            connect_timeout_s=connect_timeout_s,
        ),
        tracking=TrackingConfig(enabled=False),
    )


class Served:
    """An allocator in a thread of this process, and its clients; to be closed, so use it in a `with`."""

    def __init__(self, path: Path, config: Config, loop: type[AllocatorLoop] = AllocatorLoop) -> None:
        self.config = config
        self.rundir = RunDir.create(path, "run")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = SocketFactory(config.security, self.context).router("tcp://127.0.0.1:0")
        self.endpoint = bound_endpoint(router)
        self.core = AllocatorCore.from_config(config, self.rundir.id)
        self.journal = JournalWriter(self.rundir.allocator_journal)
        metrics = MetricsClient("", "allocator", "allocator")
        flush_s = config.allocator.journal_flush_ms / 1000
        self.loop = loop(self.core, router, self.journal, metrics, flush_s)
        self.result: int | BaseException | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.clients: list[Client] = []

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            self.result = self.loop.run()
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.result = error

    def actor(self, name: str = "a", incarnation: str = "1") -> FakeActor:
        client = FakeActor(self.endpoint, "actor", name, "", incarnation)
        self.clients.append(client)
        return client

    def learner(self) -> FakeLearner:
        client = FakeLearner(self.endpoint, "learner", "l", self.rundir.id, config=self.config)
        self.clients.append(client)
        return client

    def ended(self) -> int | BaseException | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the allocator goes on"
        self.journal.close()
        return self.result

    def records(self) -> list[Record]:
        return list(read_journal(self.rundir.allocator_journal))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.loop.stop_signal = signal.SIGTERM
        self.thread.join(WAIT_S)
        self.journal.close()
        # Not earlier: a client whose connection breaks loses what it has not read yet (ZMQ_IMMEDIATE).
        self.context.destroy(0)


def run_to_the_end(served: Served, *actors: FakeActor) -> FakeLearner:
    learner = served.learner()
    learner.join()
    for actor in actors:
        actor.hello(served.config)

    def step() -> None:
        for client in (learner, *actors):
            client.step()

    until(lambda: learner.done, step, served.core.stats)
    return learner


PROCESS = """
import sys
from pathlib import Path
from allocator.main import run_allocator
from common.errors import TreewardError
from common.rundir import RunDir
from tests.allocator.served import configuration
try:
    code = run_allocator(configuration(), RunDir.open(Path(sys.argv[1])))
except TreewardError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


def start_process(rundir: RunDir) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(rundir.path)], env=environment, stderr=subprocess.PIPE, text=True
    )
