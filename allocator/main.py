"""The allocator process: takes the run up where its journal ends, serves it, leaves an exit code."""

from __future__ import annotations

import gc
import logging
from functools import partial

from allocator.core import AllocatorCore
from allocator.recovery import recover
from allocator.settings import GC_THRESHOLD
from common.config import Config
from common.errors import TreewardError
from common.logs import fields, setup_logs
from common.rundir import RunDir

LOG = logging.getLogger("treeward.allocator")
ROLE = "allocator"


def run_allocator(config: Config, rundir: RunDir) -> int:
    """Serve the run in `rundir` until it is over; returns the exit code.

    Raises:
        StorageError: another allocator works on the run, or it is over; its journal is damaged, leads
            elsewhere under this release, or cannot be written.
        ConfigError: the run was begun with other settings, or the endpoint cannot be bound.
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
    from allocator.serve import serve  # knows sockets: the rest of the room imports without them

    gc.set_threshold(*GC_THRESHOLD)
    return serve(recover(partial(AllocatorCore.from_config, config, rundir.id), rundir), config, rundir)
