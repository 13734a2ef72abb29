"""One end of a line to the allocator: in order, repeated until acknowledged, as the real senders do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.messages import Message

if TYPE_CHECKING:
    from benchmarks.fleet import Fleet


class Line:
    """What one peer says. Messages may be lost, doubled or late, as `Faults` says; order is kept by
    waiting."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self.fleet = fleet
        self.key = key
        self.unacked: dict[int, Message] = {}
        self.alive = True
        self._next = 0
        self._timer = False
        self._last_arrival = 0.0

    def send(self, message: Message) -> None:
        number = self._next
        self._next += 1
        self.unacked[number] = message
        self._transmit(number)
        if not self._timer:
            self._timer = True
            self.fleet.after(self.fleet.config.resend_s, self._resend)

    def _transmit(self, number: int) -> None:
        fleet, message = self.fleet, self.unacked[number]
        faults = fleet.config.faults
        copies = 1 + (fleet.rng.random() < faults.duplicated)
        for _ in range(copies):
            if fleet.rng.random() >= faults.lost:
                arrival = max(self._last_arrival, fleet.now + fleet.latency())
                if fleet.rng.random() < faults.reordered:
                    arrival += fleet.rng.expovariate(1 / fleet.config.turn_s)
                else:
                    self._last_arrival = arrival
                fleet.after(arrival - fleet.now, lambda: self._arrive(number, message))

    def _arrive(self, number: int, message: Message) -> None:
        if self.fleet.deliver(self.key, message).ack:
            self.unacked.pop(number, None)

    def _resend(self) -> None:
        self._timer = False
        if not self.alive or not self.unacked:
            return
        for number in list(self.unacked):
            self._transmit(number)
        self._timer = True
        self.fleet.after(self.fleet.config.resend_s, self._resend)
