"""Turns between clients: who has a long queue must not keep the others waiting.

Virtual token counters (Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024): the
next request comes from the client that has been served the fewest tokens since it began to wait.
A client that comes back starts with the least of those that wait, so that nobody saves up turns.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vertumnus_router.core.requests import Entry


class Shares:
    """Counts the tokens of each client, as long as it matters."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._queued: Counter[str] = Counter()
        self._last = 0

    def enter(self, client: str) -> None:
        """One more request of the client waits."""
        if not self._queued[client]:
            least = min((self._served[other] for other in self._queued), default=self._last)
            self._served[client] = max(self._served.get(client, 0), least)
        self._queued[client] += 1

    def leave(self, client: str) -> None:
        """One of them waits no longer."""
        self._queued[client] -= 1
        if not self._queued[client]:
            del self._queued[client]
            self._last = self._served[client]

    def waiting(self) -> dict[str, int]:
        """The requests of each client that wait."""
        return dict(self._queued)

    def charge(self, client: str, tokens: int) -> None:
        """A request of the client is served, which computes ``tokens``."""
        self._served[client] = self._served.get(client, 0) + tokens

    def crowder(self, client: str) -> str:
        """Who has the most requests waiting; ``client`` if nobody has more than it."""
        most = max(self._queued.values(), default=0)
        if self._queued[client] >= most:
            return client
        return min(other for other, queued in self._queued.items() if queued == most)

    def turns(self, queue: Iterable["Entry"]) -> Iterator["Entry"]:
        """``queue``, in the order of a common queue, dealt out in turns within each priority.
        Requests of one client keep their order."""
        if len(self._queued) < 2:
            yield from queue
            return
        for _, alike in groupby(queue, key=lambda entry: entry.request.priority):
            hands: defaultdict[str, deque[Entry]] = defaultdict(deque)
            for entry in alike:
                hands[entry.request.client].append(entry)
            heap = [
                (self._served.get(client, 0), hand[0].key, client) for client, hand in hands.items()
            ]
            heapify(heap)
            while heap:
                served, _, client = heap[0]
                hand = hands[client]
                entry = hand.popleft()
                yield entry
                if hand:
                    served += entry.request.input_tokens
                    heapreplace(heap, (served, hand[0].key, client))
                else:
                    heappop(heap)
