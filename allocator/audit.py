"""The conservation law inside one process, and the numbers that show it live.

    issued leases  = live + ended{kind}              every attempt exactly one of them
    opened trees   = open + ready + delivered + consumed + committed + dropped{reason}

`audit` recomputes everything from the objects themselves and compares it with the counters that the decisions
use: a counter that drifts would starve or flood an anchor, a prompt or an actor long before anything is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from allocator.accounts import account_stats
from allocator.delivery import TreeState
from allocator.leases import KINDS
from allocator.peers import ACTOR
from allocator.state import CoreState
from allocator.tree import Branch, BranchState, GrowingTree
from common.nouns import NO_LEASE, Tree


def audit(s: CoreState) -> list[str]:
    """One sentence for each violation, empty when the law holds."""
    return [
        *_leases(s),
        *_trees(s),
        *_peers(s),
        *(f for tree in s.forest.trees.values() for f in _tree(s, tree)),
    ]


def _differ(what: str, counted: object, found: object) -> Iterator[str]:
    if counted != found:
        yield f"{what}: counted {counted}, found {found}"


def _branches(s: CoreState) -> list[Branch]:
    return [branch for tree in s.forest.trees.values() for branch in tree.branches.values()]


def _leases(s: CoreState) -> Iterator[str]:
    branches = _branches(s)
    book = s.leases
    yield from _differ("issued leases = live + ended", book.issued, book.live + sum(book.ended.values()))
    yield from _differ("live leases", book.live, sum(b.live for b in branches))
    yield from _differ("pending", book.pending, sum(b.state is BranchState.PENDING for b in branches))
    yield from (f"unknown ending {kind!r}" for kind in book.ended if kind not in KINDS)
    for branch in branches:
        yield from _differ(f"endings of {branch.id}", branch.attempts - branch.live, len(branch.endings))
        if branch.epoch < branch.attempts - 1:
            yield f"the {branch.attempts} attempts at {branch.id} share an epoch"
        ended = branch.state is BranchState.ENDED
        if ended != bool(branch.ended):
            yield f"{branch.id} is {branch.state.value} and ended as {branch.ended!r}"
        if branch.outcome is not None and branch.ended not in ("finished", "stopped"):
            yield f"{branch.id} has an outcome but ended as {branch.ended!r}"
        if branch.ended in ("finished", "horizon") and branch.endings.count(branch.ended) != 1:
            yield f"{branch.id} ended as {branch.ended} through attempts {branch.endings}"
        if branch.failures > s.settings.max_attempts:
            yield f"{branch.id} was attempted {branch.failures} times, more than {s.settings.max_attempts}"
    pins = Counter(b.predictor_version for b in branches if b.state is not BranchState.ENDED)
    yield from _differ("pinned predictor versions", dict(s.predictor.pinned()), dict(pins))


def _trees(s: CoreState) -> Iterator[str]:
    d = s.delivery
    total = len(s.forest.trees) + len(d.parcels) + d.committed + sum(d.dropped.values())
    yield from _differ(
        "opened trees = open + ready + delivered + consumed + committed + dropped", d.opened, total
    )
    found = Counter(parcel.state for parcel in d.parcels.values())
    yield from _differ("finished trees by state", +d.states, found)
    yield from _differ("committed trees", d.committed, sum(map(len, d.committed_at.values())))
    if d.sent > d.credit:
        yield f"delivered {d.sent} trees on a credit of {d.credit}"
    if d.taken > s.settings.trees:
        yield f"{d.taken} slots are taken, the run trains on {s.settings.trees}"
    grown = [tree for tree in s.forest.trees.values() if not tree.candidate]
    yield from _differ("candidates", s.forest.candidates, len(s.forest.trees) - len(grown))
    slots = [t.slot for t in grown] + [p.slot for p in d.parcels.values()]
    slots += [slot for entries in d.committed_at.values() for _, slot in entries]
    if len(set(slots)) != len(slots):
        yield "two trees share a slot"
    if s.ending is None:
        yield from _pools(s, len(slots))
    for parcel in d.parcels.values():
        yield from _finished(parcel.tree, parcel.tokens)


def _pools(s: CoreState, slots: int) -> Iterator[str]:
    """Each taken slot has a tree or belongs to a pool, which will be whole; and no wave waits for itself."""
    d = s.delivery
    pooled = Counter(tree.wave for tree in s.forest.trees.values() if tree.candidate)
    yield from _differ("taken slots", d.taken, slots + len(d.pools) * s.settings.batch_trees)
    for wave, missing in d.pools.items():
        yield from _differ(f"prompts for the pool of wave {wave}", d.pool, missing + pooled.pop(wave, 0))
    yield from (f"{count} candidates of wave {wave} have no pool" for wave, count in pooled.items())
    busy = {tree.wave for tree in s.forest.trees.values() if not tree.parked}
    for wave, waiting_trees in s.forest.parked.items():
        if wave not in busy:
            yield f"trees {sorted(waiting_trees)} of wave {wave} wait for others of it, and there are none"


def _finished(tree: Tree, tokens: int) -> Iterator[str]:
    owners = Counter((node.lease, node.offset) for node in tree.nodes)
    yield from (f"tree {tree.id} has turn {turn} {n} times" for turn, n in owners.items() if n > 1)
    yield from _differ(f"tokens of tree {tree.id}", tokens, tree.num_action_tokens())
    if not any(True for _ in tree.leaves()):
        yield f"tree {tree.id} was finished without an outcome"
    owned = sum(len(c.nodes) for c in tree.continuations)
    yield from _differ(f"nodes of tree {tree.id}", len(tree.nodes) - 1, owned)
    for c in tree.continuations:
        if not c.ended:
            yield f"tree {tree.id} was closed while its lease {c.number} was outstanding"


def _tree(s: CoreState, tree: GrowingTree) -> Iterator[str]:
    out = [b for b in tree.branches.values() if b.state is not BranchState.ENDED]
    yield from _differ(f"outstanding of tree {tree.id}", tree.outstanding, len(out))
    by_anchor, by_decision = Counter(b.anchor for b in out), Counter(b.decision for b in out)
    yield from _differ(f"in flight by anchor of tree {tree.id}", +Counter(tree.flying), by_anchor)
    yield from _differ(
        f"outstanding by decision of tree {tree.id}", +Counter(tree.outstanding_of), by_decision
    )
    paid = sum(b.heir_of == NO_LEASE for b in tree.branches.values())
    yield from _differ(f"budget spent by tree {tree.id}", tree.spent, paid)
    if tree.budget_left < 0:
        yield f"tree {tree.id} spent {tree.spent} of {tree.allowance} continuations"
    owned = [index for b in tree.branches.values() for index in b.nodes]
    yield from _differ(f"nodes of tree {tree.id}", max(0, len(tree.nodes) - 1), len(set(owned)))
    for b in tree.branches.values():
        places = [(tree.nodes[i].lease, tree.nodes[i].offset) for i in b.nodes]
        yield from _differ(f"turns of {b.id}", [(b.number, k) for k in range(len(b.nodes))], places)
    stuck = tree.allowance is not None and tree.outstanding == 0 and not (tree.settled or tree.parked)
    if stuck and s.ending is None:
        yield f"tree {tree.id} is open though nothing is outstanding and nobody will ask about it"


def _peers(s: CoreState) -> Iterator[str]:
    yield from _differ("room at actors", s.peers.free, sum(p.room for p in s.peers.members.values()))
    held: dict[Branch, str] = {}
    for peer in s.peers.members.values():
        for state, leases in ((BranchState.QUEUED, peer.queued), (BranchState.RUNNING, peer.running)):
            for branch in leases:
                held[branch] = peer.key
                if branch.state is not state or branch.holder != peer.key:
                    yield f"{peer.key} is booked for {branch.id}, which is {branch.state.value}"
        uncounted = [lease for lease in peer.stopping if lease not in peer.taken]
        yield from (f"nobody counts the turns of {lease}, which {peer.key} stops" for lease in uncounted)
    yield from (f"nobody is booked for {b.id}" for b in _branches(s) if b.live and b not in held)
    inspecting = sum(len(p.inspecting) for p in s.peers.members.values())
    yield from _differ("trees being set up", s.forest.inspecting, inspecting)


def waiting(s: CoreState) -> str:
    """What holds the core up, in one word; `working` = actors have all they can hold."""
    learner = s.peers.learner
    if s.ending is not None:
        return "ending"
    if s.version is None or learner is None:
        return "learner"
    if s.peers.actors_alive == 0:
        return "actors"
    if s.peers.free == 0:
        return "working"
    if s.delivery.states[TreeState.READY] and s.delivery.sent >= s.delivery.credit:
        return "credit"
    if s.forest.trees:
        return "outcomes"
    return "work_ahead" if s.delivery.room(s.version.step, 0) <= 0 else "working"


def stats(s: CoreState) -> dict[str, float]:
    """Flat numbers: `group/name`.

    `leases/<kind>` counts the endings of attempts (`leases.KINDS`), `trees/dropped/<reason>` trees,
    `waiting/<word>` ticks. `events/…` counts messages and what was done about them, from the first time on:

        duplicates      said before; no effect                    strangers    the sender was not let in
        gaps            before what precedes it; asked again      forbidden    not for its role to say
        invalid         cannot be; no effect                      refused      hellos answered with goodbye
        crossed         of a lease that was taken back            superseded   replaced by a newer process
        fenced          of an older attempt, or another's         silent_peers, revived_peers
        late            of a tree that is gone                    failures, inspections_failed
        too_old         starts revoked: scores too old            rebalanced   moves of queued leases
        given_back      continuations, for that reason
        discarded_tokens   action tokens that `Failed` reports: sampled, never sent as a turn. Each attempt
                           once, also where the word crosses a revoke.
        crossed_tokens     action tokens of turns that came after their lease was taken back, each turn once.

    `growth/…` is what closed trees cost, from the prompt and from prefixes, in continuations and action
    tokens (`accounts`), `budget/…` and `predictor/…` what those two say of themselves.

    Hence sampled action tokens = those of accepted turns + crossed_tokens + discarded_tokens, but for what
    incarnations that were replaced, or died, could not report any more.
    """
    members, forest, d = s.peers.members.values(), s.forest, s.delivery
    running = sum(len(peer.running) for peer in members)
    values: dict[str, float] = {
        "peers/actors": s.peers.actors_alive,
        "peers/actors_silent": sum(p.role == ACTOR and not p.alive for p in members),
        "peers/learner": s.peers.learner is not None and s.peers.learner.alive,
        "peers/room": s.peers.free,
        "leases/issued": s.leases.issued,
        "leases/pending": s.leases.pending,
        "leases/queued": s.leases.live - running,
        "leases/running": running,
        "leases/speculative_share": forest.speculative / max(1, forest.grown),
        "leases/score_age_max": forest.oldest_score,
        "decisions/made": forest.decided,
        "decisions/changed_by_news": forest.changed,
        "decisions/unlocked_by_news": forest.unlocked,
        "trees/opened": d.opened,
        "trees/open": len(forest.trees),
        "trees/inspecting": forest.inspecting,
        "trees/committed": d.committed,
        "trees/dropped": sum(d.dropped.values()),
        "work/step": s.version.step if s.version is not None else 0,
        "work/credit_left": d.credit - d.sent,
        "predictor/version": s.predictor.version,
        "predictor/censored": s.waves.censored,
        "predictor/targets": s.waves.targets,
    }
    values |= {f"trees/{state.value}": d.states[state] for state in TreeState}
    values |= {f"leases/{kind}": s.leases.ended[kind] for kind in KINDS}
    values |= {f"trees/dropped/{reason}": count for reason, count in d.dropped.items()}
    values |= {f"events/{name}": count for name, count in s.counts.items()}
    values |= {f"waiting/{name}": count for name, count in s.waited.items()}
    values |= {f"predictor/{name}": value for name, value in s.predictor.stats().items()}
    values |= {f"budget/{name}": value for name, value in s.budget.stats().items()}
    values |= {f"growth/{name}": value for name, value in account_stats(forest.account).items()}
    return values
