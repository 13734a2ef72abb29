"""The conservation laws of trees: from the opened one to the checkpoint that holds it.

    opened ──▶ committed | dropped | in flight
    ready ⊇ delivered ──▶ received | on the wire at the end | too large to send
    received ──▶ trained once | dropped | queued | back at the allocator, since its learner started anew
    trained ⇔ consumed, in a checkpoint ⇔ committed
    tokens received = trained + without contrast + context, batch by batch

A learner that starts again resumes from a checkpoint: updates beyond it are abandoned, their trees come
again, except those of a checkpoint that was committed and then lost, which are dropped with that reason.
What one side did while the other had ended is in flight there, unless the learner's goodbye was heard: then
all that it had said before was heard too.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.audit_books import CHECKPOINT_LOST, Books
from common.audit_findings import Finding, Law, lost, not_in_flight, odd, tree_name, twice

UNSENDABLE = "too large to send"
"""Why the allocator drops a finished tree itself."""


def each_opened_tree_ends_once(books: Books) -> Iterator[Finding]:
    """Committed, dropped with a reason, or in flight. A ready tree may be dropped, by the learner."""
    book = books.allocator
    for tree, times in book.opened.items():
        if times > 1:
            yield twice(tree_name(tree), f"opened {times} times")
    for tree in sorted(set(book.ready) | set(book.dropped) | book.committed):
        if tree not in book.opened:
            yield odd(tree_name(tree), "ready, dropped or committed, never opened")
        if len(book.ready.get(tree, ())) > 1:
            yield twice(tree_name(tree), f"ready {len(book.ready[tree])} times")
        ends = len(book.dropped.get(tree, ())) + (tree in book.committed)
        if ends > 1:
            yield twice(tree_name(tree), f"dropped or committed {ends} times")
        if tree in book.ready and tree in book.dropped and not _may_drop(books, tree):
            yield twice(tree_name(tree), "ready and dropped, and the learner did not drop it")
    if book.closed:
        unended = set(book.opened) - set(book.dropped) - book.committed
        for tree in sorted(not_in_flight(unended, book.trees_in_flight)):
            yield lost(tree_name(tree), "opened, not committed, dropped or in flight at the end")


def _may_drop(books: Books, tree: int) -> bool:
    """Whether a finished tree was dropped for a cause: by the learner, with its checkpoint, or unsendable."""
    reason = books.allocator.dropped[tree][0][0]
    if reason == CHECKPOINT_LOST:
        return tree in books.learner.abandoned
    return reason == UNSENDABLE or tree in books.learner.ever_dropped


def delivered_trees_are_ready_and_received(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    for tree in sorted(book.delivered - set(book.ready)):
        yield odd(tree_name(tree), "delivered, never ready")
    for tree in sorted(set(learner.received) - book.delivered):
        yield odd(tree_name(tree), "received by the learner, never delivered")
    for tree, count in learner.received.items():
        sent = book.ready.get(tree, [count])[0]
        if sent != count:
            yield odd(tree_name(tree), f"sent with {sent} tokens, received with {count}")
    if learner.closed and book.closed:
        unsendable = {tree for tree, ends in book.dropped.items() if ends[0][0] == UNSENDABLE}
        for tree in sorted(book.delivered - set(learner.received) - book.on_the_wire - unsendable):
            yield lost(tree_name(tree), "delivered, never received by the learner, not on the wire")


def each_received_tree_is_trained_once_or_dropped(books: Books) -> Iterator[Finding]:
    learner = books.learner
    for tree, times in learner.trained.items():
        if times > 1:
            yield twice(tree_name(tree), f"trained {times} times in the surviving lineage")
        if tree in learner.dropped:
            yield twice(tree_name(tree), f"trained and dropped ({learner.dropped[tree][0][0]})")
    for tree, drops in learner.dropped.items():
        if len(drops) > 1:
            yield twice(tree_name(tree), f"dropped {len(drops)} times by the learner")
    for tree in sorted((set(learner.trained) | set(learner.dropped)) - set(learner.received)):
        yield odd(tree_name(tree), "trained or dropped, never received")
    if learner.closed:
        unended = learner.held - set(learner.trained) - set(learner.dropped)
        for tree in sorted(not_in_flight(unended, learner.queued)):
            yield lost(tree_name(tree), "received, not trained, dropped or queued at the end")


def trees_of_a_learner_that_died_come_again(books: Books) -> Iterator[Finding]:
    """What an earlier start had received and not saved is with the allocator, or was lost by its leave."""
    book, learner = books.allocator, books.learner
    if not book.closed:
        return
    unended = set(learner.received) - learner.held - set(learner.trained) - set(learner.dropped)
    for tree in sorted(unended):
        lost_with_a_checkpoint = tree in learner.abandoned and book.lost_with_a_checkpoint(tree)
        if not book.still_has(tree) and not lost_with_a_checkpoint:
            yield lost(tree_name(tree), "received by a learner that died, and by none after it")


def tokens_of_a_batch_are_those_received(books: Books) -> Iterator[Finding]:
    """In every update, an abandoned one too; and a tree is dropped with all its tokens."""
    received = books.learner.received
    for batch in (*books.learner.batches, *books.learner.abandoned_batches):
        came = sum(received.get(tree, 0) for tree in batch.trees)
        if came != batch.tokens and all(tree in received for tree in batch.trees):
            parts = (
                f"{batch.trained} trained + {batch.no_contrast} without contrast + {batch.context} context"
            )
            yield odd(f"update={batch.lineage}.{batch.step}", f"{came} tokens received, {parts}")
    for tree, drops in books.learner.dropped.items():
        if tree in received and drops[0][1] != received[tree]:
            yield odd(tree_name(tree), f"dropped with {drops[0][1]} tokens, received with {received[tree]}")


def both_sides_agree_on_what_was_trained(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    trained = set(learner.trained)
    for tree in sorted(book.consumed - trained - learner.abandoned):
        yield odd(tree_name(tree), "consumed at the allocator, not trained at the learner")
    if book.closed and learner.closed:
        # Word of it may have died with an earlier start; the tree came again and was committed at once.
        for tree in sorted(trained - book.consumed - (learner.settled & book.committed)):
            if not _was_out_of_hearing(books, tree):
                yield odd(tree_name(tree), "trained, not consumed at the allocator")


def committed_trees_are_in_a_checkpoint(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    saved = {tree for tree, step in learner.trained_at.items() if step <= learner.committed_step}
    # Before a learner gets its first tree, the allocator has taken back what its checkpoint lacks.
    not_told = set() if learner.held else learner.abandoned
    for tree in sorted(book.committed - saved - not_told):
        yield odd(tree_name(tree), "committed, in no checkpoint of the learner")
    if learner.closed:
        for tree in sorted(set(learner.trained) - saved):
            yield lost(tree_name(tree), "trained, in no checkpoint after an orderly end")
    if learner.closed and book.closed:
        for tree in sorted(saved - book.committed):
            if not _was_out_of_hearing(books, tree):
                yield odd(tree_name(tree), "in a checkpoint, not committed at the allocator")


def _was_out_of_hearing(books: Books, tree: int) -> bool:
    """Whether the learner may have said it to nobody: the allocator ended first, and still had the tree."""
    return books.allocator.still_has(tree) and books.learner.sender not in books.allocator.goodbyes


TREE_LAWS: tuple[Law, ...] = (
    each_opened_tree_ends_once,
    delivered_trees_are_ready_and_received,
    each_received_tree_is_trained_once_or_dropped,
    trees_of_a_learner_that_died_come_again,
    tokens_of_a_batch_are_those_received,
    both_sides_agree_on_what_was_trained,
    committed_trees_are_in_a_checkpoint,
)
