"""The allocator on its endpoint: bind, say where, run the loop.

A restarted allocator listens where the one before it did, though port 0 was asked for: its peers know no
other place, and connect again by themselves.
"""

from __future__ import annotations

import logging
import time

import zmq

from allocator.loop import AllocatorLoop
from allocator.recovery import Recovery
from allocator.snapshots import Snapshots
from common.config import Config
from common.errors import ConfigError
from common.journal import JournalWriter
from common.logs import fields
from common.metrics import MetricsClient
from common.rundir import RunDir
from common.sockets import LINGER_MS, SocketFactory, bound_endpoint

LOG = logging.getLogger("treeward.allocator")

ALIASES = {"tcp://*": "tcp://0.0.0.0", "tcp://localhost": "tcp://127.0.0.1"}
"""Addresses that a bound socket calls otherwise."""
REBIND_S, REBIND_EVERY_S = 2.0, 0.05
"""How long the old port is waited for: it goes with the process that had it, which may be about to end."""


def serve(recovery: Recovery, config: Config, rundir: RunDir) -> int:
    """Serve the run until it is over; returns the exit code.

    Raises:
        ConfigError: the endpoint cannot be bound.
        SecurityError: it would be open to others.
        StorageError, PeerLost: see `AllocatorLoop.run`.
    """
    tracker = config.cluster.tracker if config.tracking.enabled else ""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = MetricsClient(tracker, "allocator", "allocator", run=rundir.id, security=config.security)
    flush_s = config.allocator.journal_flush_ms / 1000
    snapshots = Snapshots(rundir.allocator_snapshots, recovery.boot, recovery.inputs, recovery.replayed)
    try:
        with JournalWriter(rundir.allocator_journal, recovery.sound_to) as journal:
            router = bind(SocketFactory(config.security, context), config.cluster.allocator, recovery, rundir)
            endpoint = bound_endpoint(router)
            rundir.publish_endpoint("allocator", endpoint)
            LOG.info("serving run %s at %s", rundir.id, endpoint, extra=fields("serving", endpoint=endpoint))
            with router:
                loop = AllocatorLoop(recovery.core, router, journal, metrics, flush_s, recovery, snapshots)
                loop.listen_for_signals()
                return loop.run()
    finally:
        snapshots.close()
        metrics.close()
        context.destroy(linger=LINGER_MS)


def bind(
    factory: SocketFactory[zmq.Socket[bytes]], wanted: str, recovery: Recovery, rundir: RunDir
) -> zmq.Socket[bytes]:
    """A router at `wanted`; after a restart, where its peers know it.

    Raises:
        ConfigError: that place is taken, or no address of this machine.
    """
    before = rundir.last_endpoint("allocator") if recovery.boot else None
    address, _, port = wanted.rpartition(":")
    if before is not None and port == "0" and before.startswith(f"{ALIASES.get(address, address)}:"):
        wanted = before
    deadline = time.monotonic() + (REBIND_S if recovery.boot else 0.0)
    while True:
        try:
            return factory.router(wanted)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(REBIND_EVERY_S)
