"""A queue with one reader: everything that can happen to one request arrives in order."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Unbounded, single-threaded; ``put`` never blocks, ``get`` waits for the next item.

    The task that owns a request waits here and nowhere else, so no wait has to be cancelled
    to tell it something.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def empty(self) -> bool:
        return not self._items

    def take(self) -> T:
        """The next item; ``IndexError`` if there is none."""
        return self._items.popleft()

    async def get(self) -> T:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()
