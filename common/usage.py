"""Where the time of a process goes: what each role writes into its journal as `usage`, and shows as metrics.

    usage(now, cpu_s, seconds{state: total}, traffic{endpoint: [sent, received]}, …)

Every number is a total since the start of the process, so that a rate over any stretch of a run is a
difference between two records. `now` is the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from common.traffic import TRAFFIC


class Spending:
    """Seconds by state. Time is an argument; the first call of `turn_to` starts the clock.

    Example: `spending.turn_to("work", 3.0); spending.turn_to("leases", 5.0)` has spent 2 s on work.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._state, self._since = "", 0.0

    def turn_to(self, state: str, now: float) -> None:
        """From `now` on, time is spent on `state`; until now it was spent on what was said before."""
        if self._state:
            self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._state, self._since = state, now

    def totals(self, now: float) -> dict[str, float]:
        """Seconds by state until `now`."""
        if self._state:
            self.turn_to(self._state, now)
        return dict(self._seconds)


def usage(now: float, seconds: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """The fields of a `usage` record, for `JournalWriter.append("usage", **usage(…))`."""
    traffic = TRAFFIC.by_endpoint()
    return {"now": now, "cpu_s": time.process_time(), "seconds": dict(seconds), "traffic": traffic, **more}
