"""The audit knows by their reasons which continuations were given up without a word of their actor."""

from collections.abc import Callable

import pytest

from common.audit_laws import GIVEN_UP_UNHEARD
from common.messages import Bye, Failed
from common.nouns import LeaseId
from tests.allocator.harness import Rig, small

ACTOR = "a/1"


def no_progress(rig: Rig, lease: LeaseId) -> None:
    rig.live(60)


def silence(rig: Rig, lease: LeaseId) -> None:
    rig.live(29, ACTOR)


def goodbye(rig: Rig, lease: LeaseId) -> None:
    rig.say(ACTOR, Bye(0, "stopped"))


def replacement(rig: Rig, lease: LeaseId) -> None:
    rig.actor("a/2")


def failure(rig: Rig, lease: LeaseId) -> None:
    rig.say(ACTOR, Failed(lease, "the engine is dead", True))


def reason_of_the_drop(way: Callable[[Rig, LeaseId], None]) -> str:
    """A lease that has started ends in some way; no second attempt is allowed."""
    rig = Rig(small(max_attempts=1))
    rig.learner()
    rig.actor(ACTOR)
    rig.inspect(ACTOR)
    lease = rig.leases(ACTOR)[0]
    rig.start(ACTOR, lease)
    way(rig, lease.id)
    ends = [fields for kind, fields in rig.core.take_records() if kind == "lease_ended"]
    (end,) = [end for end in ends if LeaseId(end["tree"], end["number"], end["epoch"]) == lease.id]
    assert end["kind"] == "dropped"
    return str(end["reason"])


def test_each_way_to_take_a_lease_from_its_actor_has_a_reason_that_the_audit_knows() -> None:
    ways = (no_progress, silence, goodbye, replacement)
    assert {reason_of_the_drop(way) for way in ways} == set(GIVEN_UP_UNHEARD)


@pytest.mark.parametrize("reason", GIVEN_UP_UNHEARD)
def test_a_failure_that_its_actor_reported_is_none_of_them(reason: str) -> None:
    assert reason_of_the_drop(failure) != reason
