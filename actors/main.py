"""The actor process: it takes leases, runs them, and pulls the weights they are sampled from.

    allocator ─Grant, Inspect, Revoke─▶ link ─▶ foreman ─▶ expand × slots ─▶ ledger, link ─▶ allocator
    learner ─────────weights──────────▶ puller ─▶ engine ──────┘

consumes: messages of the allocator, weights of the learner.  produces: turns and ends of leases.
waits for: a Welcome, the first weights, leases; each wait is bounded by `cluster.connect_timeout_s` without a
word from the allocator.  unblocked by: messages, SIGTERM, or the failure of any task, which ends the process:
no task fails unnoticed. An actor may start in an empty directory and needs only `cluster.allocator`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket as system_socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import zmq.asyncio

from actors.build import build_engine, build_tools, engine_class, has_process_score
from actors.engines.base import Engine
from actors.foreman import Foreman
from actors.lease_table import LeaseTable
from actors.ledger import Ledger
from actors.link import Handlers, Link, Timing
from actors.restore import env_factory
from actors.weights import WeightsPuller
from common.codec import new_sender
from common.config import Config, agreed_settings, config_hash
from common.errors import ConfigError, StorageError, TreewardError, require
from common.logs import setup_logs
from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Grant,
    Heartbeat,
    Hello,
    Inspect,
    Revoke,
    Welcome,
)
from common.metrics import MetricsClient
from common.nouns import Version
from common.rundir import NAME
from common.sockets import SocketFactory
from common.tokenizer import WordTokenizer
from common.traffic import TRAFFIC
from common.usage import usage

LOG = logging.getLogger("treeward.actor")

ROLE = "actor"
TICK_S = 0.5
METRICS_S = 5.0
STOP_WORK_S, DRAIN_S, FAREWELL_S = 3.0, 4.0, 0.5
"""Longest times to stop running leases, to hand over what was reported, to say Bye; 10 s are granted."""
CRASHED = 70


class Dismissed(TreewardError):
    """The allocator said `Bye` with a code; its reason is the sentence to print."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.exit_code = code


def run_actor(config: Config) -> int:
    """Run an actor until the run is over or it is told to stop; returns the exit code.

    Raises:
        ConfigError: settings that differ from the run's, or an environment the model does not know.
        PeerLost: no allocator within `cluster.connect_timeout_s`.
        StorageError: the directory cannot be used, or another actor uses it.
    """
    name = config.actor.name or _default_name()
    require(bool(NAME.match(name)), "actor.name", "letters, digits, '.', '_' and '-'", name)
    directory = Path(config.actor.dir or f"actor-{name}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the actor's directory {directory}: {error.strerror}") from error
    setup_logs(ROLE, directory / "actor.log", peer=name)
    engine_class(config)  # imported before anybody is greeted, who would then wait for it
    try:
        return asyncio.run(_run(config, name, directory))
    except TreewardError:
        raise
    except Exception:  # whatever broke, the log must say where before the process ends
        LOG.critical("this actor is broken and ends", exc_info=True)
        return CRASHED


async def _run(config: Config, name: str, directory: Path) -> int:
    return await Actor(config, name, directory).run()


class Actor:
    """One actor process: wires link, puller, engine and foreman together, and ends them in order."""

    def __init__(self, config: Config, name: str, directory: Path) -> None:
        self._config, self._name = config, name
        self._sender = new_sender(name)
        self._process_scores = has_process_score(env_factory(config.env)())
        self._context = zmq.asyncio.Context()
        factory = SocketFactory(config.security, self._context)
        cluster = config.cluster
        self._ledger = Ledger(directory)
        handlers = Handlers(
            self._hello, self._heartbeat, self._on_welcome, self._on_message, self._ledger.flush
        )
        timing = Timing(cluster.heartbeat_s, cluster.dead_after_s, cluster.connect_timeout_s)
        self._link = Link(factory, cluster.allocator, self._sender, handlers, timing)
        self._puller = WeightsPuller(factory, directory / "weights", self._sender, self._install)
        table = LeaseTable(config.engine.max_batch, config.engine.prefetch)
        self._foreman = Foreman(table, self._ledger, self._link.send, self._spawn)
        self._engine: Engine | None = None
        self._tokenizer_hash = ""
        self._welcome: Welcome | None = None
        self._metrics: MetricsClient | None = None
        self._leaving = self._in_order = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Work until the end; the exit code."""
        self._ledger.start(self._name, self._sender.partition("/")[2])
        self._listen_for_signals()
        for work, name in (
            (self._link.run(), "link"),
            (self._puller.run(), "weights"),
            (self._puller.run_hints(), "hints"),
            (self._watch(), "watch"),
            (self._report(), "metrics"),
        ):
            self._spawn(work, name)
        try:
            return await self._end
        finally:
            await self._close()

    # --- what the link asks and tells --------------------------------------------------------------------

    def _hello(self) -> Hello:
        engine = self._config.engine
        return Hello(
            role=ROLE,
            peer=self._name,
            incarnation=self._sender.partition("/")[2],
            protocol=PROTOCOL_VERSION,
            capabilities=Capabilities(
                slots=engine.max_batch,
                prefetch=engine.prefetch,
                engine=engine.name,
                features=engine.features,
                scores=True,
                process_scores=self._process_scores,
                deterministic=self._config.deterministic,
            ),
            agreed=agreed_settings(self._config),
            tokenizer_hash=self._tokenizer_hash,
            version=self._foreman.version,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._foreman.progress, self._foreman.table.running)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.config_hash and welcome.config_hash != config_hash(self._config):
            raise ConfigError(
                f"run {welcome.run!r} has other env or engine settings than this actor; start it with the "
                "same env and engine options as the allocator"
            )
        if self._welcome is None:
            LOG.info("%s joined run %s at %s", self._name, welcome.run, self._config.cluster.allocator)
            self._metrics = self._open_metrics(welcome.run)
        self._welcome = welcome
        self._puller.want(welcome.version, welcome.weights_endpoint)
        self._puller.follow(welcome.hints_endpoint)

    def _open_metrics(self, run: str) -> MetricsClient:
        endpoint = self._config.cluster.tracker if self._config.tracking.enabled else ""
        return MetricsClient(endpoint, ROLE, self._name, run=run, security=self._config.security)

    def _on_message(self, message: Any) -> None:
        match message:
            case Grant():
                self._puller.want(message.version, message.weights_endpoint)
                self._foreman.on_grant(message)
            case Revoke():
                self._foreman.on_revoke(message)
            case Inspect():
                self._puller.want(message.version, message.weights_endpoint)
                self._foreman.on_inspect(message)
            case Bye(code=code, reason=reason):
                self._leave("run ended", code, retry=False, sentence=reason)
            case _:
                LOG.debug("ignored a %s", type(message).__name__)

    async def _install(self, version: Version, folder: Path) -> None:
        """Checked weights have arrived; the first ones bring model and tokenizer."""
        tokenizer = WordTokenizer.load(folder)
        expected = self._tokenizer_hash or (self._welcome.tokenizer_hash if self._welcome else "")
        if expected and tokenizer.sha256 != expected:
            raise ConfigError(
                f"the tokenizer served with weights {version} has hash {tokenizer.sha256[:12]}, the run's "
                f"has {expected[:12]}; learner and allocator belong to different runs"
            )
        self._tokenizer_hash = tokenizer.sha256
        if self._engine is not None:
            await self._engine.load_weights(version, folder)
            self._foreman.schedule()
            return
        # In a thread: heartbeats go on meanwhile, and the allocator does not take this actor for dead.
        self._engine = await asyncio.to_thread(build_engine, self._config, folder)
        tools = build_tools(self._config, self._engine, tokenizer)
        await self._engine.load_weights(version, folder)
        self._foreman.equip(tools)

    # --- tasks -------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work`; if it fails, the process ends with its error."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._foreman.tick(TICK_S)
            self._write_usage()
            if self._welcome is not None and self._welcome.version is None and self._puller.held is None:
                # The learner came after this actor: no Inspect says where its weights are.
                self._link.greet()

    def _write_usage(self) -> None:
        now, engine = asyncio.get_running_loop().time(), self._engine
        busy_s = engine.counters().get("busy_s", 0.0) if engine is not None else 0.0
        self._ledger.usage(**usage(now, self._spent(), engine_s=busy_s))

    def _spent(self) -> dict[str, float]:
        return self._foreman.spending.totals(asyncio.get_running_loop().time())

    async def _report(self) -> None:
        """Numbers to the tracker, as rates over the interval."""
        loop, before, counts = asyncio.get_running_loop(), 0.0, self._foreman.counts.copy()
        while True:
            before = loop.time()
            await asyncio.sleep(METRICS_S)
            took = loop.time() - before
            now = self._foreman.counts.copy()
            version = self._foreman.version
            if self._metrics is not None:
                rates = {
                    f"{name}_per_s": (now[name] - counts[name]) / took for name in ("expanded", "tokens")
                }
                self._metrics.log(
                    version.step if version else 0, **rates, **self._gauges(), lag_s=took - METRICS_S
                )
            counts = now

    def _gauges(self) -> dict[str, float]:
        table, engine = self._foreman.table, self._engine
        return {
            **self._foreman.counts,
            **({f"engine_{key}": value for key, value in engine.counters().items()} if engine else {}),
            "leases_running": table.running,
            "leases_queued": table.queued,
            "outbox": self._link.undelivered,
            "sessions": self._link.sessions,
            "bad_frames": self._link.bad_frames,
            "weights_pulled": self._puller.pulled,
            "weights_failed": self._puller.failed,
            **{f"spent_{state}_s": seconds for state, seconds in self._spent().items()},
            **TRAFFIC.totals(),
        }

    # --- leaving -----------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """The first asks to leave in order, the second to leave now."""
        if self._leaving and not self._end.done():
            self._end.set_result(128 + number)
        reason = f"the actor was stopped by {signal.Signals(number).name}"
        self._leave(reason, 0, retry=True, sentence=reason)

    def _leave(self, reason: str, code: int, *, retry: bool, sentence: str) -> None:
        if not self._leaving:
            self._leaving = True
            self._spawn(self._leave_in_order(reason, code, retry, sentence), "leave")

    async def _leave_in_order(self, reason: str, code: int, retry: bool, sentence: str) -> None:
        """Stop the work, hand over what was reported, say Bye."""
        LOG.info("leaving: %s", sentence)
        self._foreman.stop(reason, retry=retry)
        self._in_order = await self._foreman.idle(STOP_WORK_S)
        if not await self._link.drain(DRAIN_S):
            LOG.warning("%d messages were not confirmed by the allocator", self._link.undelivered)
        self._link.post(Bye(0, reason))
        await self._link.drain(FAREWELL_S)
        if self._end.done():
            return
        if code:
            self._end.set_exception(Dismissed(sentence, code))
        else:
            self._end.set_result(0)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
        if self._foreman.tools is not None:
            self._foreman.tools.worlds.close()
        if self._metrics is not None:
            version = self._foreman.version
            self._metrics.log(version.step if version else 0, **self._gauges())
            self._metrics.close()
        self._write_usage()
        self._ledger.close(in_order=self._in_order)
        self._context.destroy(linger=500)


def _default_name() -> str:
    """One that no other actor of the run has: host and process."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{system_socket.gethostname()}-{os.getpid()}")[-100:]
