"""What the learner says about the trees it was sent. Idempotent by tree id and cumulative credit."""

from __future__ import annotations

from typing import Any

from allocator.growing import Handler, heartbeat
from allocator.peers import Peer
from allocator.state import CoreState
from common.messages import Committed, Consumed, Credit, Dropped, Heartbeat, Message


def credit(s: CoreState, peer: Peer, message: Credit) -> bool:
    s.delivery.credit = max(s.delivery.credit, message.total)
    return True


def consumed(s: CoreState, peer: Peer, message: Consumed) -> bool:
    """An update was made: newer weights, and room for more trees."""
    if s.version is None or message.version.lineage != s.version.lineage:
        s.counts["invalid"] += 1
        return True
    s.version = max(s.version, message.version)
    for tree in message.trees:
        if s.delivery.consume(tree, message.version.step):
            s.record("tree_consumed", tree=tree, **_version(message))
        else:
            s.counts["duplicates"] += 1
    return True


def dropped(s: CoreState, peer: Peer, message: Dropped) -> bool:
    parcel = s.delivery.discard(message.tree, message.reason[:64])
    if parcel is None:
        s.counts["duplicates"] += 1
    else:
        s.record("tree_dropped", tree=message.tree, reason=message.reason, tokens=parcel.tokens)
    return True


def committed(s: CoreState, peer: Peer, message: Committed) -> bool:
    for tree in message.trees:
        if s.delivery.commit(tree, message.version.step):
            s.record("tree_committed", tree=tree)
        else:
            s.counts["duplicates"] += 1
    return True


def _version(message: Consumed) -> dict[str, Any]:
    return {"lineage": message.version.lineage, "step": message.version.step}


HANDLERS: dict[type[Message], Handler] = {
    Heartbeat: heartbeat,
    Credit: credit,
    Consumed: consumed,
    Dropped: dropped,
    Committed: committed,
}
"""What a learner may say, `Hello` and `Bye` aside."""
