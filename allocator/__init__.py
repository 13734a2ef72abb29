"""The allocator: decides which anchor of which tree gets the next continuation, and who runs it.

`core.AllocatorCore` is the pure decision core; `loop` is the thin socket loop around it.
"""
