"""The price of one request at every candidate, seconds.

J differs between the candidates of one degree that hold the same prefix by their queues alone, so
what does not is worked out once for all of them: an ``Offer``. What only explains a choice, the
terms of every candidate, is worked out when somebody reads it.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from vertumnus_router.core.effects import CostTerms
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.pulls import PullTerms
from vertumnus_router.core.trie import PrefixMatch
from vertumnus_router.core.types import RequestId
from vertumnus_router.core.workers import Candidate

#: What candidates of one offer have in common: their kind, and how many blocks of the prompt they
#: have or what is copied to them.
Alike = tuple[int, int | PullTerms]


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What a prefill costs at candidates that are alike: J without the queue.

    ``service_j`` is β·s and ``extra_j`` is λ·(C·s − GPU time that is no extra). ``pull_tokens``
    are copied first, and ``pull_s`` for it is part of ``service_s``; 0 without a pull.
    """

    degree: int
    cached_tokens: int
    uncached_tokens: int
    service_s: float
    extra_gpu_s: float
    lam: float
    service_j: float
    extra_j: float
    pull_tokens: int = 0
    pull_s: float = 0.0


@dataclass(slots=True, eq=False)
class Quotes:
    """The prices of one request as they were at one moment, by candidate. Never empty.

    ``match`` and ``stored``, the blocks that a rank of each candidate holds, tell what the ranks
    of a candidate have to copy among themselves. ``choice`` is the position of the one to take.
    """

    request: RequestId
    candidates: Sequence[Candidate]
    #: positions of the candidates in the lanes
    lanes: Sequence[int]
    queue_s: Sequence[float]
    #: GPU-seconds that their ranks stand still first; None where none do
    idle_gpu_s: Sequence[float] | None
    #: by what the candidates of one offer have in common
    offers: Mapping[Alike, Offer]
    alike: Sequence[Alike]
    totals: Sequence[float]
    choice: int
    match: PrefixMatch
    stored: Sequence[int]
    beta: float
    profile: Profile

    @property
    def offer(self) -> Offer:
        """That of the choice."""
        return self.offers[self.alike[self.choice]]

    @property
    def candidate(self) -> Candidate:
        """The choice."""
        return self.candidates[self.choice]

    @property
    def lane(self) -> int:
        """That of the choice."""
        return self.lanes[self.choice]

    def preferred(self) -> Candidate:
        """The cheapest one if nobody had a queue."""
        at = min(self._ranked(), key=lambda at: self.totals[at] - self.queue_s[at])
        return self.candidates[at]

    def chosen(self) -> CostTerms:
        """The terms of the choice."""
        return self._terms(self.choice)

    def terms(self) -> tuple[CostTerms, ...]:
        """The terms of every candidate: the choice, then the others by rising price."""
        return tuple(map(self._terms, self._ranked()))

    def _ranked(self) -> list[int]:
        ranked = sorted(range(len(self.totals)), key=self.totals.__getitem__)
        ranked.remove(self.choice)
        return [self.choice, *ranked]

    def _terms(self, at: int) -> CostTerms:
        candidate, offer = self.candidates[at], self.offers[self.alike[at]]
        idle_gpu_s = 0.0 if self.idle_gpu_s is None else self.idle_gpu_s[at]
        return CostTerms(
            worker=candidate.id,
            degree=offer.degree,
            cached_tokens=offer.cached_tokens,
            reconcile_tokens=self._reconcile_tokens(at),
            queue_s=self.queue_s[at],
            service_s=offer.service_s,
            extra_gpu_s=offer.extra_gpu_s + idle_gpu_s,
            beta=self.beta,
            lam=offer.lam,
            total=self.totals[at],
            pull_tokens=offer.pull_tokens,
            pull_s=offer.pull_s,
            extrapolated=self.profile.extrapolates(
                offer.degree, offer.uncached_tokens, offer.cached_tokens
            ),
        )

    def _reconcile_tokens(self, at: int) -> int:
        """Of the cached tokens, those that a rank of the candidate holds and another one lacks.
        What is pulled comes to one rank, and the others take it over as well."""
        candidate, offer = self.candidates[at], self.offers[self.alike[at]]
        if offer.degree == 1:
            return 0
        block_tokens = candidate.pool.block_tokens
        common = self.match.common(candidate.ranks) * block_tokens
        if offer.pull_tokens:
            return max(0, offer.cached_tokens - common)
        return max(0, min(offer.cached_tokens, self.stored[at] * block_tokens) - common)


def pick(
    request: RequestId,
    candidates: Sequence[Candidate],
    totals: Sequence[float],
    tie_s: float,
    seed: int,
) -> int:
    """The position of the lowest of ``totals``, or of one of those within ``tie_s`` of it,
    another one for another request.

    A hash, not a generator: ``explain`` gives the choice that placement will make, and
    several routers with their own seeds do not herd.
    """
    least = min(totals)
    near = [at for at, total in enumerate(totals) if total - least <= tie_s]
    if len(near) == 1:
        return near[0]
    near.sort(key=totals.__getitem__)  # of equal hashes the cheapest
    start = zlib.crc32(f"{seed}/{request}/".encode())
    return min(near, key=lambda at: zlib.crc32(candidates[at].id.encode(), start))
