"""The router: one endpoint in front of pools whose workers have different CP degrees.

``core`` is pure policy (``on_event(event, now) -> effects``), ``io`` owns sockets, HTTP,
clocks and metrics, ``protocol`` and ``lattice`` are the vocabulary shared with the pools.
Nothing here imports torch or sglang.
"""
