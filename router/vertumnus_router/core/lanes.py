"""The timelines of the candidates while the queue is planned onto them."""

from dataclasses import dataclass

from vertumnus_router.core.workers import Candidates


@dataclass(slots=True)
class Lanes:
    """One timeline per candidate, in columns: a pass over the queue reads them all many times.

    ``queue_s`` seconds until the candidate is free; ``loads`` the uncached tokens of its
    unfinished prefills, and of those without the last bound. Made anew from the ledger for each
    pass, so that planning touches nothing.
    """

    candidates: Candidates
    queue_s: list[float]
    loads: list[tuple[int, int]]

    def plan(self, at: int, service_s: float, uncached_tokens: int, binds: bool) -> None:
        """The next request waits behind lane ``at``; one that binds also takes up room."""
        self.queue_s[at] += service_s
        if binds:
            tokens, _ = self.loads[at]
            self.loads[at] = tokens + uncached_tokens, tokens
