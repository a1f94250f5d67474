"""The KV service of a rank: copies cached prefixes from other ranks, gives its own to them, and
deletes and lists them when told to.

``service`` ties together: ``baton`` (who may touch the tree), ``index`` (prefixes by block hash),
``exports`` and ``imports`` (the two ends of a copy), ``transports`` (how the bytes travel),
``sockets`` and ``messages`` (how ranks and the front talk).
"""
