"""An `Explanation` in words: a headline, the anchors that were weighed as a table, and what else counted."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from allocator.explanation import Allowance, Draw, Explanation, News, Owner, Running, Sight, Weighed
from common.nouns import NO_LEASE

ROWS = 40
"""Anchors shown; those that were chosen always are."""
WIDTH = 96
"""Of a list that is longer than a line, in characters."""
CHOSEN, ALSO = "*", "+"


def lines(explanation: Explanation) -> Iterator[str]:
    """The explanation of a node, line by line."""
    e = explanation
    where = f"node {e.node} of tree {e.tree} ({e.task}, wave {e.wave})"
    if e.allowance is not None:
        yield f"{where} is its prompt"
        yield from _allowance(e, e.allowance)
    if e.owner is not None and e.sight is not None:
        yield f"{where} is turn {e.owner.turn} of {e.owner.turns} of continuation {e.owner.number}"
        yield _chosen(e, e.owner, e.sight)
        yield ""
        yield from _table(e, e.owner, e.sight)
        yield ""
        yield from _circumstances(e, e.owner, e.sight)


def number(value: float) -> str:
    """Four decimals, or what a whole, a very large or a very small one needs."""
    if isinstance(value, int):
        return str(value)
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value + 0.0:.4f}"  # no minus before a zero


def count(value: float) -> str:
    """A whole number without decimals."""
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def predicted(mean: float, std: float) -> str:
    return f"{mean:.3f} ± {std:.3f}"


def listed(numbers: Sequence[int], noun: str) -> str:
    """`continuation 3`, `continuations 3, 4`."""
    plural = "" if len(numbers) == 1 else "s"
    return f"{noun}{plural} {', '.join(map(str, numbers))}"


def _row(label: str, value: str) -> str:
    return f"  {label:<12}{value}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells under one another, all but the last column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


# ----------------------------------------------------------------------------------- a node that was sampled


def _chosen(e: Explanation, owner: Owner, sight: Sight) -> str:
    depth = next(a.depth for a in sight.anchors if a.node == owner.anchor)
    others = [n for a in sight.anchors for n in a.started if n != owner.number]
    beside = f", with {listed(sorted(others), 'continuation')}" if others else ""
    kind = f"an heir of continuation {owner.heir_of}" if owner.heir_of != NO_LEASE else "which"
    goes = "goes on" if owner.heir_of != NO_LEASE else "started"
    return (
        f"continuation {owner.number}, {kind}, {goes} from node {owner.anchor} (depth {depth}): "
        f"decision {sight.decision} of rule {e.rule}{beside}"
    ).replace(", which, ", " ")


def _table(e: Explanation, owner: Owner, sight: Sight) -> Iterator[str]:
    terms = list(dict.fromkeys(name for anchor in sight.anchors for name in anchor.terms))
    total = ["probability" if sight.draws else "total"] if sight.weighs else []
    head = ["", "node", "depth", "in flight", "won/tried", "predicted", *terms, *total, ""]
    shown = [a for i, a in enumerate(sight.anchors) if i < ROWS or a.started or a.stopped]
    rows = [_anchor(anchor, owner, terms, bool(total)) for anchor in shown]
    yield from aligned([head, *rows])
    if len(shown) < len(sight.anchors):
        yield f"  and {len(sight.anchors) - len(shown)} more, none of them chosen"
    if not sight.weighs:
        yield f"  rule {e.rule} weighs nothing here: these anchors have no scores"


def _anchor(anchor: Weighed, owner: Owner, terms: list[str], total: bool) -> list[str]:
    mark = (CHOSEN if anchor.node == owner.anchor else ALSO) if anchor.started else ""
    return [
        mark,
        str(anchor.node),
        str(anchor.depth),
        str(anchor.in_flight),
        f"{count(anchor.wins)}/{anchor.trials}",
        predicted(anchor.mean, anchor.std),
        *(number(anchor.terms[name]) if name in anchor.terms else "-" for name in terms),
        *(["-" if anchor.total is None else number(anchor.total)] if total else []),
        _fate(anchor),
    ]


def _fate(anchor: Weighed) -> str:
    """What the decision does at an anchor."""
    chosen = f"chosen for {listed(anchor.started, 'continuation')}" if anchor.started else ""
    stopped = f"stops {listed(anchor.stopped, 'continuation')}" if anchor.stopped else ""
    return "; ".join(filter(None, (chosen, stopped)))


def _circumstances(e: Explanation, owner: Owner, sight: Sight) -> Iterator[str]:
    if sight.draws:
        for place, text in enumerate(textwrap.wrap(", ".join(map(_drawn, sight.draws)), WIDTH)):
            yield _row("" if place else "drawn", text)
    for place, running in enumerate(sight.running):
        yield _row("" if place else "in flight", _running(running))
    if not sight.running:
        yield _row("in flight", "nothing else in this tree")
    yield _row("staleness", _staleness(e, owner, sight))
    yield _row("fixed", _fixed(owner))
    yield _row("budget", f"{e.budget}: {sight.spent} of {sight.allowance} continuations were spent before")
    yield _row("news", _news(e, sight.news))
    reward = "" if owner.reward is None else f", reward {number(owner.reward)}"
    attempts = f" after {len(owner.attempts)} attempts" if len(owner.attempts) > 1 else ""
    yield _row("came of it", f"{owner.ended}{reward}{attempts}")


def _drawn(draw: Draw) -> str:
    """`2 of 3`, with the probability where it was not a third."""
    uniform = math.isclose(draw.probability, 1 / draw.options)
    at = "" if uniform else f" at {number(draw.probability)}"
    return f"{draw.drawn + 1} of {draw.options}{at}"


def _running(running: Running) -> str:
    turns = f"{running.turns} turn{'' if running.turns == 1 else 's'}"
    return f"continuation {running.number} from node {running.anchor}, {turns} so far ({running.state})"


def _staleness(e: Explanation, owner: Owner, sight: Sight) -> str:
    if not e.reads:
        return f"rule {e.rule} reads nothing, so no score can be stale"
    started = "" if owner.age_at_start is None else f", {owner.age_at_start} when it started"
    kind = "speculative" if owner.speculative else "nothing it reads was outstanding"
    return f"stamp {sight.stamp}, age {sight.age} when decided{started}, at most D = {e.bound}: {kind}"


def _fixed(owner: Owner) -> str:
    baseline = "none" if owner.baseline is None else number(owner.baseline)
    until = f"at most {owner.horizon} turns" if owner.horizon else "to the end"
    return (
        f"weight {number(owner.weight)}, baseline {baseline} by predictor version {owner.predictor_version}, "
        f"{until}"
    )


def _news(e: Explanation, news: News | None) -> str:
    if news is None:
        return (
            "no outcome since the decision before" if "outcome" in e.reads else "the rule reads no outcomes"
        )
    since = f"{listed(news.continuations, 'continuation')} ended since the decision before"
    if not news.changed:
        return f"{since}, and the decision would have been the same without that"
    if not news.anchors:
        return f"{since}; without that, nothing would have been started"
    return f"{since}; without that, the choice would have been {listed(news.anchors, 'node')}"


# ---------------------------------------------------------------------------------------------- a prompt


def _allowance(e: Explanation, allowance: Allowance) -> Iterator[str]:
    yield _row("budget", f"{e.budget} gave it {_continuations(allowance.first)} when its root was known")
    what = predicted(allowance.mean, allowance.std)
    yield _row("predicted", f"success {what}, by predictor version {allowance.predictor_version}")
    for extra in allowance.extras:
        won = f"{count(extra.wins)} of {extra.trials} won"
        yield _row("added", f"{_continuations(extra.continuations)} before decision {extra.decision}, {won}")
    total = allowance.first + sum(extra.continuations for extra in allowance.extras)
    yield _row("spent", f"{allowance.spent} of {total}, of weight {_weights(allowance.weights)}")
    if allowance.budget_stats:
        stats = (f"{name}={number(value)}" for name, value in allowance.budget_stats.items())
        yield _row("it knew", ", ".join(stats))
    if len(allowance.together) > 1:
        yield ""
        yield f"{len(allowance.together)} prompts got their continuations together:"
        rows = [["", "tree", "predicted", "continuations", ""]]
        for each in sorted(allowance.together, key=lambda c: (-c.allowance, c.tree)):
            mark = CHOSEN if each.tree == e.tree else ""
            rows.append([mark, str(each.tree), predicted(each.mean, each.std), str(each.allowance), ""])
        yield from aligned(rows)


def _continuations(number: int) -> str:
    return f"{number} continuation{'' if number == 1 else 's'}"


def _weights(weights: list[float]) -> str:
    different = list(dict.fromkeys(weights))
    return f"{number(different[0])} each" if len(different) == 1 else ", ".join(map(number, weights)) or "0"
