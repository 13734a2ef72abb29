"""The allocator process: binds the ROUTER, opens the journal, runs the loop, leaves an exit code."""

from __future__ import annotations

import logging

from allocator.core import AllocatorCore
from common.config import Config
from common.errors import TreewardError
from common.logs import fields, setup_logs
from common.opening import refuse_trained
from common.rundir import RunDir

LOG = logging.getLogger("treeward.allocator")
ROLE = "allocator"


def run_allocator(config: Config, rundir: RunDir) -> int:
    """Serve the run in `rundir` until it is over; returns the exit code.

    Raises:
        StorageError: another allocator works on the run, or has already; the journal cannot be written.
        ConfigError: the endpoint cannot be bound.
        PeerLost: no learner within `cluster.connect_timeout_s`, or it is gone for good.
    """
    with rundir.lock(ROLE):
        setup_logs(ROLE, rundir.log_file(ROLE), run=rundir.id)
        try:
            return _serve(config, rundir)
        except TreewardError as error:
            LOG.error("%s", error, extra=fields("error"))
            raise


def _serve(config: Config, rundir: RunDir) -> int:
    from allocator.loop import serve  # the one place with sockets: the rest of the room imports without it

    refuse_trained(rundir)
    return serve(AllocatorCore.from_config(config, rundir.id), config, rundir)
