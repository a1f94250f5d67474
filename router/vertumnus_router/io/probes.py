"""How the router finds out whether a server still answers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probes:
    """Asked every ``every_s``, a server has ``timeout_s`` to answer. After ``misses`` in a row
    without an answer it counts as lost."""

    every_s: float
    timeout_s: float
    misses: int
