"""The allocator: decides which anchor of which tree gets the next continuation, and who runs it.

`core.AllocatorCore` is the pure decision core; `loop` is the thin socket loop around it. If the process dies,
`recovery` brings the core's books back from the journal and the newest of the `snapshots` beside it.
"""
