"""Paths that wait at their horizon for the rule's word."""

from __future__ import annotations

from allocator.tree import Branch, GrowingTree


def waiting_path(rule: str, tree: GrowingTree, number: int, verb: str) -> Branch:
    """The path that waits at its horizon for the word of `rule`, which is given once.

    Raises:
        RuntimeError: it does not, or has heirs already: a bug of the rule. Heirs share what their parent
            weighs; a second set would weigh it twice.
    """
    branch = tree.branches[number]
    if branch.ended != "horizon" or branch.heirs:
        state = f"is {branch.ended or 'outstanding'}, not waiting at a horizon"
        why = f"has the heirs {branch.heirs} already" if branch.heirs else state
        raise RuntimeError(f"rule {rule!r} {verb} lease {number} of tree {tree.id}, which {why}")
    return branch
