"""The states of a process add up to its time, and a record says what they were."""

from __future__ import annotations

import pytest

from common import usage as module
from common.traffic import Traffic
from common.usage import Spending, usage


def test_states_add_up_to_the_time_that_has_passed() -> None:
    spending = Spending()
    for state, now in (("weights", 10.0), ("leases", 12.0), ("work", 13.5), ("work", 14.0), ("leases", 20.0)):
        spending.turn_to(state, now)
    assert spending.totals(21.0) == {"weights": 2.0, "leases": 2.5, "work": 6.5}
    assert sum(spending.totals(31.0).values()) == 21.0


def test_nothing_is_spent_before_the_first_state() -> None:
    assert Spending().totals(5.0) == {}


def test_a_usage_record_has_the_clock_the_processor_the_states_and_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic()
    monkeypatch.setattr(module, "TRAFFIC", traffic)
    traffic.add("tcp://127.0.0.1:1", sent=3)
    found = usage(7.0, {"work": 1.0}, step=4)
    assert found.pop("cpu_s") > 0
    assert found == {
        "now": 7.0,
        "seconds": {"work": 1.0},
        "traffic": {"tcp://127.0.0.1:1": [3, 0]},
        "step": 4,
    }
