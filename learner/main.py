"""The learner process: it turns finished trees into new weights.

    allocator ─TreeReady─▶ link ─▶ intake ─batch─▶ update ─▶ checkpoint if due ─▶ publish ─▶ weights server
        ▲                                             │                                          │
        └──────── Credit, Consumed, Committed ────────┘              actors ◀─ manifest, chunks ─┘

consumes: trees.  produces: versions of the weights, checkpoints, metrics.
waits for: a batch of trees.  unblocked by: the allocator's deliveries, its loss or goodbye, SIGTERM.

The loop is `Learner.train`. It runs in the main thread and does no network I/O: one thread owns the line to
the allocator (`link`), one serves weights (`serve`).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from common.codec import new_sender
from common.config import Config, agreed_settings, config_hash
from common.errors import PeerLost, ProtocolError, StorageError, TreewardError
from common.journal import JournalWriter
from common.logs import fields, setup_logs
from common.messages import MAX_BATCH, PROTOCOL_VERSION, Bye, Capabilities, Committed, Consumed, Hello
from common.metrics import MetricsClient
from common.nouns import Tree, Version
from common.ranks import given_rank
from common.rundir import RunDir
from common.traffic import TRAFFIC
from common.usage import usage
from learner.assembly import assembly
from learner.backend.group import open_group
from learner.backend.worker import Ranks, run_rank
from learner.controls import shuffle_rewards
from learner.intake import Intake, Stop
from learner.link import AllocatorLink, Dismissed, Event
from learner.lora import PolicyFiles
from learner.policy import use_threads
from learner.publish import VersionStore
from learner.queue import TreeQueue
from learner.report import Stopwatch, log_step, step_metrics
from learner.rows import Clock
from learner.savings import Savings
from learner.serve import WeightsServer
from learner.start import Start, origin_of, start_run
from learner.update import UpdateReport

LOG = logging.getLogger("treeward.learner")
ROLE = "learner"

DRAIN_S = 20.0
"""How long the end of a run may wait for the allocator's acknowledgements."""
GOODBYE_S = 2.0
"""How long it may wait where none need come: for the goodbye's own, or after the allocator's goodbye."""


def run_learner(config: Config, rundir: RunDir) -> int:
    """Train until `learner.steps`, SIGTERM, or the allocator's goodbye; returns the exit code.

    Raises:
        StorageError: no starting weights, a foreign checkpoint, another learner on this run, or a full disk.
        PeerLost: the allocator is gone for longer than cluster.connect_timeout_s.
        ConfigError, SecurityError: an endpoint cannot be bound.
    """
    settings, build = config.learner.backend, assembly(config, rundir)
    use_threads(1 if config.deterministic else None)
    if (rank := given_rank()) > 0:
        name = f"{ROLE}-rank{rank}"
        setup_logs(name, rundir.log_file(name), run=rundir.id)
        return run_rank(settings, rundir.log_file(ROLE).parent, build)
    setup_logs(ROLE, rundir.log_file(ROLE), run=rundir.id)
    with rundir.lock(ROLE), open_group(settings, rundir.log_file(ROLE).parent) as group, ExitStack() as stack:
        start = start_run(config, rundir)
        ranks = Ranks(group, build, start.folder, resumed=start.resumed)
        learner = Learner(config, rundir, start, ranks, stack)
        with stop_on_signals(learner.stop):
            code = learner.run()
        ranks.end()
        return code


class Learner:
    """One start of the learner: its neighbours, and the loop."""

    def __init__(
        self, config: Config, rundir: RunDir, start: Start, ranks: Ranks[UpdateReport], stack: ExitStack
    ) -> None:
        settings = config.learner
        self._config, self._settings, self._start, self._rundir = config, settings, start, rundir
        self._version = start.version
        self._sender = new_sender(ROLE)
        self._watch = Stopwatch()
        self._events: SimpleQueue[Event | Stop] = SimpleQueue()
        self._ranks = ranks
        self._policy_files = PolicyFiles(ranks.backend.model, start.tokenizer, start.folder, settings.lora)
        self._files: dict[str, bytes] = {}
        self._files_of: Version | None = None
        self._savings = Savings(
            rundir.checkpoints,
            self._files_to_save,
            every=1 if config.deterministic else settings.checkpoint_every,
            keep=settings.keep_checkpoints,
            config_hash=config_hash(config),
            origin=partial(origin_of, config, rundir),
            trained=start.trained,
            resumed=start.resumed_at,
            saved=start.version if start.resumed else None,
        )
        self._journal = stack.enter_context(JournalWriter(rundir.learner_journal))
        self._metrics = MetricsClient(
            config.cluster.tracker if config.tracking.enabled else "",
            ROLE, ROLE, run=rundir.id, security=config.security,
        )  # fmt: skip
        stack.callback(self._metrics.close)
        self._queue = TreeQueue(
            batch_trees=settings.batch_trees,
            capacity=(settings.max_policy_lag + 2) * settings.batch_trees,
            vocab_size=start.tokenizer.vocab_size,
            settled=start.trained,
        )
        self._store = VersionStore(settings.max_policy_lag + 1 + settings.keep_versions)
        self._stack = stack

    def stop(self) -> None:
        """End after what is in hand. Called by signal handlers."""
        self._events.put(Stop())

    def run(self) -> int:
        """From the first publication to the last acknowledgement; returns the exit code."""
        self._journal.append(
            "start",
            incarnation=self._sender,
            lineage=self._version.lineage,
            step=self._version.step,
        )
        self._journal.flush(sync=True)  # the next start must know that this lineage is taken
        if not self._start.resumed:
            self._save(final=True)
        self._open()
        code, patience_s = 0, DRAIN_S
        try:
            self.train()
        except Dismissed as dismissed:
            LOG.warning("%s", dismissed)
            code, patience_s = dismissed.exit_code, GOODBYE_S
        except (PeerLost, ProtocolError):
            self._save(final=True)  # what was learnt must not go with the allocator
            raise
        self._finish(patience_s)
        return code

    def train(self) -> None:
        """The loop: a batch, an update, a checkpoint if due, a new version, and word of it."""
        while self._version.step < self._settings.steps:
            trees = self._intake.next_batch(self._clock)
            if not trees:
                return
            report = self._update(trees)
            safe = self._save() if self._savings.is_due(self._version.step) else None
            self._publish()
            self._tell(trees, report, safe)

    # --- the stages of a step ------------------------------------------------------------------------------

    @property
    def _clock(self) -> Clock:
        return Clock(self._version, self._settings.max_policy_lag, self._start.resumed_at)

    def _update(self, trees: Sequence[Tree]) -> UpdateReport:
        """Train on a batch; the version grows by one."""
        step, batch = self._version.step, list(trees)
        if self._settings.shuffle_rewards:
            batch = shuffle_rewards(trees, self._config.seed, step)
        with self._watch.timed("train_s"):
            report = self._ranks.update(batch, self._clock)
        if not report.applied:
            skipped, parts = report.minibatches_skipped, report.minibatches
            what = f"the gradient of {skipped} of {parts} parts of the batch is not finite"
            rest = "moved by the other parts only" if skipped < parts else "stay as they were"
            LOG.error("step %d: %s; the weights %s", step + 1, what, rest)
        self._version = Version(lineage=self._version.lineage, step=step + 1)
        numbers = [tree.id for tree in trees]
        self._savings.trained(numbers)
        counts = report.counts
        self._journal.append(  # the three together are all tokens of the trees
            "consumed", trees=numbers, lineage=self._version.lineage, step=self._version.step,
            tokens_trained=counts.tokens_trained, tokens_no_contrast=counts.tokens_without_contrast,
            tokens_context=counts.tokens_context,
        )  # fmt: skip
        self._journal.flush(sync=False)
        return report

    def _save(self, final: bool = False) -> list[int] | None:
        """Write a checkpoint: the trees that are safe by it. A last or deterministic one must not fail."""
        with self._watch.timed("save_s"):
            safe = self._savings.save(self._version)
        if safe is None and (final or self._config.deterministic):
            raise StorageError(f"the checkpoint of {self._version} could not be written; see the log above")
        if safe is not None:
            self._journal.append("committed", lineage=self._version.lineage, step=self._version.step)
            self._journal.flush(sync=True)
        return safe

    def _files_to_save(self) -> dict[str, bytes]:
        """The current policy's files, and the optimiser's of every rank."""
        return {**self._current_files(), **self._ranks.state_files()}

    def _current_files(self) -> dict[str, bytes]:
        """The files of the current version; made once, since gathering the weights takes all ranks."""
        if self._files_of != self._version:
            self._files = self._policy_files.of(self._ranks.full_weights())
            self._files_of = self._version
        return self._files

    def _publish(self) -> None:
        """Serve the current weights and announce them."""
        with self._watch.timed("publish_s"):
            self._server.announce(self._store.publish(self._version, self._current_files()))

    def _tell(self, trees: Sequence[Tree], report: UpdateReport, safe: Sequence[int] | None) -> None:
        """Tell the allocator, the tracker and the person what was done."""
        self._link.send(Consumed(trees=[tree.id for tree in trees], version=self._version))
        self._send_committed(safe)
        step = self._link.progress = self._version.step
        self._intake.take_in(self._clock)
        metrics = step_metrics(
            trees, report, self._watch.lap(), self._queue.dropped, self._queue.stale_since()
        )
        metrics.update(trees_queued=len(self._queue), trees_repeated=self._queue.repeated, **TRAFFIC.totals())
        self._journal.append("usage", **usage(time.monotonic(), self._watch.totals, step=step))
        self._link.running = len(self._queue)
        self._metrics.log(step, **metrics)
        log_step(step, self._settings.steps, metrics)

    def _send_committed(self, safe: Sequence[int] | None) -> None:
        for first in range(0, len(safe or ()), MAX_BATCH):
            part = list(safe or ())[first : first + MAX_BATCH]
            self._link.send(Committed(version=self._version, trees=part))

    # --- beginning and end ---------------------------------------------------------------------------------

    def _open(self) -> None:
        """Serve weights first, then say hello: whoever is told where they are will find them."""
        cluster, security = self._config.cluster, self._config.security
        self._server = WeightsServer(self._store, cluster.weights, cluster.hints, security, self._rundir.id)
        self._stack.callback(self._server.close)
        self._publish()
        self._rundir.publish_endpoint("weights", self._server.weights_endpoint)
        self._rundir.publish_endpoint("hints", self._server.hints_endpoint)
        self._link = AllocatorLink(
            cluster, security, self._sender, self._hello, self._events.put, self._rundir.id
        )
        self._stack.callback(self._link.close)
        self._intake = Intake(
            self._queue, self._link, self._events, self._journal, self._watch, self._start.trained
        )
        LOG.info("serving %s at %s", self._version, self._server.weights_endpoint, extra=fields("serving"))

    def _hello(self) -> Hello:
        name, _, incarnation = self._sender.partition("/")
        return Hello(
            role=ROLE,
            peer=name,
            incarnation=incarnation,
            protocol=PROTOCOL_VERSION,
            capabilities=Capabilities(deterministic=self._config.deterministic),
            agreed=agreed_settings(self._config),
            weights_endpoint=self._server.weights_endpoint,
            hints_endpoint=self._server.hints_endpoint,
            tokenizer_hash=self._start.tokenizer.sha256,
            version=self._version,
        )

    def _finish(self, patience_s: float) -> None:
        """Save, commit, and leave; say goodbye for the run if its last step is done."""
        self._send_committed(self._save(final=True))
        done = self._version.step >= self._settings.steps
        if not self._link.drain(patience_s):
            LOG.warning("the allocator did not acknowledge everything within %g s", patience_s)
        if done:
            self._link.send(Bye(0, f"all {self._settings.steps} steps are done"))
            self._link.drain(GOODBYE_S)  # an allocator that has gone already cannot acknowledge it
        with suppress(TreewardError):  # what arrived meanwhile is in flight, and must be on record as such
            self._intake.take_in(self._clock)
        self._journal.append("end", queued=self._queue.holds())
        LOG.info("%s at %s", "all steps done" if done else "stopped", self._version)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT; only the main thread may ask for that, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
