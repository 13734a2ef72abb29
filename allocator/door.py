"""Who comes in and who is gone: hello, goodbye, replaced incarnations, silence, and the silence of all.

The newest incarnation of a name wins: the older one is told `Bye` ("superseded") and never heard again, its
leases go on elsewhere under the next epoch. A peer that is merely silent for `dead_after_s` loses its
leases too, but is taken back when it speaks again; what it then reports about them is fenced. When it was
the allocator that died, all were silent, and none of them is to blame.
"""

from __future__ import annotations

from allocator.endings import end_attempt, end_with_run, retry
from allocator.granting import end_inspection
from allocator.leases import EPOCHS_A_BOOT
from allocator.peers import ACTOR, LEARNER, Peer
from allocator.state import CoreState, Exit
from common.messages import PROTOCOL_VERSION, Bye, Hello, Revoke, Welcome
from common.nouns import Version

CONFIG_ERROR = 2
PROTOCOL_ERROR = 5
PEER_LOST = 6
MAX_RETIRED = 100_000
"""Replaced incarnations remembered; the oldest are forgotten first, long after their processes have
exited."""


def hello(s: CoreState, key: str, message: Hello) -> None:
    """Let a peer in, or tell it in one sentence why not."""
    refusal = refuse(s, key, message)
    if refusal is not None:
        s.counts["refused"] += 1
        s.send(key, refusal)
        return
    peer = s.peers.members.get(key)
    if peer is None:
        peer = _enter(s, key, message)
    elif not peer.alive:
        revive(s, peer)
    peer.seen_at = s.now
    s.send(key, _welcome(s))
    if peer.role == LEARNER and learner_at(s, message):
        for other in s.peers.members.values():
            if other.role == ACTOR and other.alive:
                s.send(other.key, _welcome(s))


def refuse(s: CoreState, key: str, hello: Hello) -> Bye | None:
    """None to welcome; else the goodbye that names what does not fit, expected and got."""
    if hello.protocol != PROTOCOL_VERSION:
        versions = f"the allocator speaks protocol {PROTOCOL_VERSION}, {key} speaks {hello.protocol}"
        return Bye(PROTOCOL_ERROR, f"{versions}; run the same release everywhere")
    if hello.role not in (ACTOR, LEARNER):
        return Bye(PROTOCOL_ERROR, f"role must be actor or learner, got {hello.role!r}")
    if key != f"{hello.peer}/{hello.incarnation}":
        return Bye(
            PROTOCOL_ERROR,
            f"sender {key!r} says hello as {hello.peer}/{hello.incarnation}: send from one name",
        )
    if key in s.peers.retired:
        return _superseded(hello)
    if s.ending is not None:
        return Bye(s.ending.code, s.ending.reason)
    mismatch = _mismatch(s, hello)
    return Bye(CONFIG_ERROR, mismatch[:2000]) if mismatch else None


def _superseded(hello: Hello) -> Bye:
    """For the older process: its work is not done, so it must not end as if it were."""
    remedy = "give each actor an actor.name of its own" if hello.role == ACTOR else "keep one of the two"
    return Bye(PEER_LOST, f"superseded: a newer process says hello as {hello.role} {hello.peer}; {remedy}")


def _mismatch(s: CoreState, hello: Hello) -> str:
    """One sentence about the first setting that differs, empty when all agree."""
    expected, got = s.settings.agreed, hello.agreed
    who = f"{hello.role} {hello.peer}"
    for key in sorted({*expected, *got}):
        ours, theirs = _shown(expected.get(key)), _shown(got.get(key))
        if expected.get(key) != got.get(key):
            return f"{key} differs: the allocator has {ours}, {who} has {theirs}; start both alike"
    ours, theirs = s.tokenizer_hash, hello.tokenizer_hash
    if hello.role == ACTOR and ours and theirs and ours != theirs:
        return f"tokenizer differs: the learner serves {ours}, {who} has {theirs}; empty its directory"
    if hello.role == LEARNER and hello.version is None:
        return "a learner's hello must carry the version of its weights, got none"
    if hello.role == ACTOR:
        for name in sorted(s.rule.requires):
            if not getattr(hello.capabilities, name):
                return (
                    f"allocator.rule={s.rule.name} needs actors with {name}, which actor {hello.peer} lacks"
                )
    return ""


def _shown(value: str | None) -> str:
    return "no value" if value is None else value[:200]


def _welcome(s: CoreState) -> Welcome:
    settings = s.settings
    return Welcome(
        run=settings.run,
        config_hash=settings.config_hash,
        tokenizer_hash=s.tokenizer_hash,
        weights_endpoint=s.weights_endpoint,
        hints_endpoint=s.hints_endpoint,
        version=s.version,
        heartbeat_s=settings.heartbeat_s,
        dead_after_s=settings.dead_after_s,
        seed=settings.seed,
        deterministic=settings.deterministic,
    )


def _enter(s: CoreState, key: str, message: Hello) -> Peer:
    """A new incarnation; it replaces the one that had its name."""
    older = s.peers.named(message.role, message.peer)
    if older is not None:
        s.counts["superseded"] += 1
        s.send(older.key, _superseded(message))
        leave(s, older, "fenced", "superseded")
    can = message.capabilities
    peer = s.peers.add(key, message.role, message.peer, message.incarnation, can, s.now)
    s.remind(s.now + s.settings.dead_after_s, "silence", peer)
    if message.role == LEARNER and message.version is not None:
        s.version = message.version
        _redeliver(s, message.version)
    return peer


def learner_at(s: CoreState, message: Hello) -> bool:
    """Where the learner is and what it serves, from each of its hellos. True when that is news."""
    before = s.weights_endpoint, s.hints_endpoint, s.tokenizer_hash
    if message.version is not None and (s.version is None or message.version > s.version):
        s.version = message.version
    s.weights_endpoint = message.weights_endpoint
    s.hints_endpoint = message.hints_endpoint
    s.tokenizer_hash = message.tokenizer_hash
    return before != (s.weights_endpoint, s.hints_endpoint, s.tokenizer_hash)


def _redeliver(s: CoreState, version: Version) -> None:
    committed, lost = s.delivery.rejoin(version)
    for tree in committed:
        s.record("tree_committed", tree=tree)
    for tree in lost:
        s.record("tree_dropped", tree=tree, reason="checkpoint_lost", tokens=0)


def leave(s: CoreState, peer: Peer, kind: str, reason: str) -> None:
    """It will not be heard again: its work goes on elsewhere."""
    s.peers.set_alive(peer, False)
    _take_work(s, peer, kind, reason)
    if peer.role == LEARNER:
        s.learner_since = s.now
    s.peers.retire(peer)
    s.departed.append(peer.key)
    while len(s.peers.retired) > MAX_RETIRED:
        del s.peers.retired[next(iter(s.peers.retired))]


def silent(s: CoreState, peer: Peer) -> None:
    """Nothing came from it for `dead_after_s`: its work goes on elsewhere, but it may come back."""
    s.counts["silent_peers"] += 1
    s.peers.set_alive(peer, False)
    _take_work(s, peer, "expired", "peer is silent")
    if peer.role == LEARNER:
        s.learner_since = peer.seen_at
    else:
        s.departed.append(peer.key)


def revive(s: CoreState, peer: Peer) -> None:
    """A silent peer speaks again. What was taken from it meanwhile it should stop."""
    s.counts["revived_peers"] += 1
    s.peers.set_alive(peer, True)
    s.remind(s.now + s.settings.dead_after_s, "silence", peer)
    for lease in peer.stopping:
        s.send(peer.key, Revoke(lease, "taken away while out of touch"))


def _take_work(s: CoreState, peer: Peer, kind: str, reason: str) -> None:
    for branch in [*peer.running, *peer.queued]:
        if s.ending is None:
            retry(s, branch, peer, kind, reason, confirmed=False)
        else:
            end_with_run(s, branch, peer, reason, confirmed=False)
    for number in list(peer.inspecting):
        end_inspection(s, tree := s.forest.trees[number])
        s.uninspected.append(tree)


def restart(s: CoreState, boot: int) -> None:
    """This process goes on from the books of one that died, or was stopped.

    Nothing that was out can be trusted to be in its peer's hands, or not to be: every live attempt is fenced
    and waits behind its accepted turns, no failure of its own; every tree without a root is set up anew; what
    was delivered goes again. Epochs start where no earlier process can have been. A run that was complete
    stays so; one that was only stopped goes on.
    """
    s.leases.first_epoch = boot * EPOCHS_A_BOOT
    if s.ending is not None and s.ending.code:
        s.ending = None
    for peer in s.peers.members.values():
        s.peers.set_alive(peer, False)
        _fence(s, peer)
    s.uninspected.clear()
    s.uninspected.extend(tree for tree in s.forest.trees.values() if not tree.nodes)
    s.delivery.take_back()
    s.learner_since = s.now


def _fence(s: CoreState, peer: Peer) -> None:
    """Take back all that a peer holds."""
    reason = "the allocator was restarted"
    for branch in [*peer.running, *peer.queued]:
        if s.ending is None:
            end_attempt(s, branch, peer, "fenced", reason, confirmed=False)
            s.leases.want(branch)
        else:
            end_with_run(s, branch, peer, reason, confirmed=False)
    for number in list(peer.inspecting):
        end_inspection(s, s.forest.trees[number])


def end_run(s: CoreState, code: int, reason: str) -> None:
    """No more work: live leases are revoked, actors say goodbye, and the caller drains."""
    if s.ending is not None:
        return
    s.ending = Exit(code, reason)
    for peer in list(s.peers.members.values()):
        if peer.role == ACTOR:
            for branch in [*peer.running, *peer.queued]:
                peer.take(branch)
                s.send(peer.key, Revoke(branch.id, "run ended"))
            s.send(peer.key, Bye(code, reason))
