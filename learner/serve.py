"""The thread that serves weights: one ROUTER for pulls, one PUB for hints.

consumes: `GetManifest`, `GetChunk`; manifests to announce.  produces: `Manifest`, `Chunk`, `Refused`; hints.
waits for: a request, or a manifest from the training loop.  unblocked by: either, and by `close`.

Both sockets live in this thread alone. A puller that is slow or gone loses its answer and asks again; hints
may be lost, since every `Grant` repeats the version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from socket import gethostname
from typing import Any

import zmq

from common.codec import decode, encode, new_sender
from common.config import SecurityConfig
from common.errors import ProtocolError
from common.logs import Repeats, fields
from common.messages import Message, ToWeights, WeightsManifest, WeightsPublished
from common.sockets import SocketFactory, bound_endpoint
from learner.publish import VersionStore
from learner.wake import Wake

LOG = logging.getLogger("treeward.learner.serve")


class WeightsServer:
    """Serves a `VersionStore` until closed.

    Raises:
        SecurityError, ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self, store: VersionStore, weights: str, hints: str, security: SecurityConfig, run: str = ""
    ) -> None:
        self._store, self._run = store, run
        self._sender = new_sender("weights")
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = Wake(self._context)
        self._announced: deque[WeightsManifest] = deque()
        self._closing = threading.Event()
        self._repeats = Repeats()
        self.bad_frames = self.lost_answers = 0
        factory = SocketFactory(security, self._context)
        try:
            self._router = factory.router(weights)
            self._pub = factory.pub(hints)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.weights_endpoint = reachable(bound_endpoint(self._router))
        self.hints_endpoint = reachable(bound_endpoint(self._pub))
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def announce(self, manifest: WeightsManifest) -> None:
        """Send a hint that a version is there."""
        self._announced.append(manifest)
        self._wake.up()

    def close(self) -> None:
        """Stop serving; returns when the sockets are closed."""
        self._closing.set()
        self._wake.up()
        self._thread.join()
        self._wake.close()
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.receiver, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll())
                self._wake.clear()
                while self._announced:
                    self._pub.send_multipart(self._encode(WeightsPublished(self._announced.popleft())))
                if self._router in ready:
                    self._answer_one()
        finally:
            self._wake.receiver.close(0)
            self._router.close(0)
            self._pub.close()

    def _answer_one(self) -> None:
        routing_id, *frames = self._router.recv_multipart()
        try:
            request = decode(frames, ToWeights).message
        except ProtocolError as error:
            self._bad_frame(error)
            return
        try:
            self._router.send_multipart([routing_id, *self._encode(self._store.answer(request))])
        except zmq.ZMQError:  # gone, or its queue is full: it asks again if it still wants to know
            self.lost_answers += 1

    def _encode(self, message: Message) -> list[bytes]:
        return encode(message, run=self._run, sender=self._sender)

    def _bad_frame(self, error: ProtocolError) -> None:
        self.bad_frames += 1
        held_back = self._repeats.allow("bad_frame", time.monotonic())
        if held_back is not None:
            LOG.warning(
                "ignored a damaged request: %s", error, extra=fields("bad_frame", held_back=held_back)
            )


def reachable(endpoint: str) -> str:
    """Where others connect to: an address that means every interface is replaced by this host's name."""
    for wildcard in ("0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{wildcard}:", f"tcp://{gethostname()}:")
    return endpoint
