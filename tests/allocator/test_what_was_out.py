"""What an allocator that died had out: leases are fenced, trees go again, nobody is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from allocator.leases import EPOCHS_A_BOOT
from allocator.replay import replay
from common.messages import Committed, Expanded, Failed, Revoke, TreeReady
from common.nouns import LeaseId, Turn, TurnStatus, Version
from tests.allocator.harness import LEARNER, hello, small
from tests.allocator.mortal import Mortal, maker, rig_of

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def test_every_process_counts_epochs_from_a_number_of_its_own(mortal: Mortal) -> None:
    """What the dead one had granted, and not got to disk, cannot have the epoch of anything granted later."""
    issued = mortal.records("lease_issued")
    told = max(r.offset for r in mortal.records("input") if r.offset < issued[-3].offset)
    mortal.kill(keep=told)
    rig = rig_of(mortal)
    rig.learner()
    rig.actor("a/1", slots=8)
    rig.inspect("a/1")
    rig.work("a/1")
    lost = {(r.fields["tree"], r.fields["number"], r.fields["epoch"]) for r in issued[-3:]}
    recovered = mortal.records("recovered")[0].offset
    after = [r.fields for r in mortal.records("lease_issued") if r.offset > recovered]
    assert after and all(fields["epoch"] >= EPOCHS_A_BOOT for fields in after)
    assert not lost & {(f["tree"], f["number"], f["epoch"]) for f in after}


def test_every_live_lease_is_fenced_and_its_late_turns_are_counted_once(mortal: Mortal) -> None:
    live = [r.fields for r in mortal.records("lease_issued") if r.fields["peer"] == "b/1"]
    mortal.kill()
    recovered = mortal.records("recovered")[0].fields
    ends = [r.fields for r in mortal.records("lease_ended") if r.fields["kind"] == "fenced"]
    assert recovered["fenced"] == len(ends) == 1 and ends[0]["reason"] == "the allocator was restarted"
    rig = rig_of(mortal)
    rig.actor("b/1", slots=2)
    revoked = rig.take("b/1", Revoke)
    assert {(r.lease.tree, r.lease.number) for r in revoked} == {(end["tree"], end["number"]) for end in ends}
    lease = LeaseId(live[-1]["tree"], live[-1]["number"], live[-1]["epoch"])
    late = Expanded(lease, 1, Turn(action=b"\1\0\0\0" * 3, status=TurnStatus.OPEN))
    for _ in range(2):
        assert rig.say("b/1", late).ack
    mortal.kill()
    rig.actor("b/1", slots=2)
    assert rig.say("b/1", late).ack, "told again to the next process"
    assert rig.say("b/1", Failed(lease, "revoked", False, 2)).ack
    assert rig.stat("events/crossed_tokens") == 3 and rig.stat("events/discarded_tokens") == 2
    fenced = [r.fields["fenced"] for r in mortal.records("recovered")]
    assert rig.stat("leases/fenced") == sum(fenced) and len(fenced) == 2


def test_a_restart_is_no_failure_of_a_continuation(mortal: Mortal) -> None:
    for _ in range(10):
        mortal.kill()
        rig = rig_of(mortal)
        rig.learner()
        rig.actor("a/1", slots=8)
        rig.inspect("a/1")
        for lease in rig.leases("a/1"):
            rig.start("a/1", lease)
        for revoke in rig.take("a/1", Revoke):
            rig.say("a/1", Failed(revoke.lease, "revoked", False))
    branches = mortal.branches()
    assert max(len(branch.endings) for branch in branches) >= 9
    assert all(branch.failures == 0 and not branch.ended.startswith("dropped") for branch in branches)


def test_trees_on_their_way_go_again_within_the_same_credit(mortal: Mortal) -> None:
    before = [r.fields["tree"] for r in mortal.records("tree_delivered")]
    assert len(before) == 1 == rig_of(mortal).stat("trees/delivered")
    mortal.kill()
    rig = rig_of(mortal)
    assert rig.stat("trees/delivered") == 0
    rig.learner(credit=1)
    assert [message.tree.id for message in rig.take(LEARNER, TreeReady)] == before
    assert mortal.core.audit() == []


def test_a_tree_that_was_trained_meanwhile_is_not_sent_again(mortal: Mortal) -> None:
    """The learner's word about it comes to the new process, before or after it goes again."""
    (tree,) = [r.fields["tree"] for r in mortal.records("tree_delivered")]
    mortal.kill()
    rig = rig_of(mortal)
    rig.say(LEARNER, hello("learner", LEARNER, version=Version(0, 1)))
    rig.consume([tree], 1)
    assert rig.stat("trees/consumed") == 1
    mortal.kill()
    rig.sent.clear()
    rig.learner(credit=1, step=1)
    assert tree not in [message.tree.id for message in rig.take(LEARNER, TreeReady)]


def test_nobody_is_waited_for_longer_than_usual_after_a_restart(mortal: Mortal) -> None:
    mortal.kill(mortal.core.state.now + 1000.0)
    rig = rig_of(mortal)
    limit = mortal.core.state.settings.connect_timeout_s
    rig.tick(limit - 1.0)
    assert mortal.core.ending is None
    rig.tick(2.0)
    assert mortal.core.ending is not None and "the learner is gone" in mortal.core.ending.reason


def test_a_run_that_was_stopped_goes_on_with_all_its_continuations(mortal: Mortal) -> None:
    rig = rig_of(mortal)
    rig.core.stop(6, "drill", rig.now)
    for kind, values in mortal.core.take_records():
        mortal.journal.append(kind, **values)
    live = [b.id for b in mortal.branches() if b.live]
    rig.say("b/1", Failed(live[0], "run ended", False))
    mortal.end()
    mortal.kill()
    assert mortal.core.ending is None and mortal.core.audit() == []
    kinds = [r.fields["kind"] for r in mortal.records("lease_ended")]
    assert kinds.count("run_ended") == 1 and kinds.count("fenced") == len(live) - 1
    given_up = [b for b in mortal.branches() if b.ended in ("run_ended", "fenced")]
    assert not given_up
    assert replay(mortal.fresh(), mortal.records()) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_after_allocator_and_learner_were_resumed_no_burst_of_trees_is_opened(
    tmp_path: Path, lag: int
) -> None:
    """AReaL #1345: the version was restored, what had been accepted was not, and stale work piled up."""
    mortal = Mortal(maker(small(steps=20, max_policy_lag=lag)), tmp_path)
    rig = rig_of(mortal)
    opened = []
    for process in range(3):
        learner = rig.learner(step=process, lineage=process, incarnation=str(process))
        rig.actor(f"a/{process}", slots=64)
        rig.work(f"a/{process}")
        trees = [message.tree.id for message in rig.take(learner, TreeReady)][:2]
        rig.consume(trees, process + 1, process, learner)
        rig.say(learner, Committed(Version(process, process + 1), trees))
        rig.work(f"a/{process}")
        opened.append(mortal.core.state.delivery.opened)
        mortal.kill()
    assert opened == [(step + lag + 1) * 2 for step in (1, 2, 3)], "(step + K + 1) batches, and none again"
