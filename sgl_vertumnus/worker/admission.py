"""Before a prefill step, the ranks of a block agree on the cached prefix of every request.

The ranks may hold different prefixes: they served apart once, or evicted different copies. What
one of them holds and others lack is copied between them, the missing blocks only; what cannot be
copied is not used by any.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vertumnus_patches import prefixes
from vertumnus_patches.prefix_marks import Budget

#: Requests looked at for one step.
MAX_REQUESTS = 128


class Group(Protocol):
    """What this needs of ``vertumnus_patches.cp_group.CpGroup``."""

    rank: int

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]: ...

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """KV of tokens [start, end) of a request, which rank ``owner`` holds and some other lacks."""

    request: int
    start: int
    end: int
    owner: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The prefixes of the first ``len(lengths)`` requests of the queue, and how many tokens this
    rank took over for them."""

    lengths: tuple[int, ...]
    copied_tokens: int


def first_of_step(lengths: Sequence[int], totals: Sequence[int], budget: int) -> int:
    """How many requests, in order, a step of ``budget`` new tokens may take.

    ``lengths`` are their cached prefixes, ``totals`` their tokens. The last of them may not fit
    as a whole.
    """
    for count, (cached, total) in enumerate(zip(lengths, totals, strict=True), start=1):
        budget -= total - cached
        if budget <= 0:
            return count
    return len(lengths)


def copies(
    held: Sequence[Sequence[int]], first_missing: Callable[[int, int], Hashable]
) -> list[Copy]:
    """What to copy so that all ranks hold what one of them does.

    ``held[rank][request]`` is the prefix that the rank holds. ``first_missing(request, start)``
    names the prefix of the request that ends one page behind ``start``: of requests that lack
    the same, the first one's is copied, and the others look again afterwards.
    """
    found: list[Copy] = []
    due: set[Hashable] = set()
    for request, lengths in enumerate(zip(*held, strict=True)):
        start, end = min(lengths), max(lengths)
        if start == end:
            continue
        name = first_missing(request, start)
        if name not in due:
            due.add(name)
            found.append(Copy(request, start, end, lengths.index(end)))
    return found


def agree(scheduler: Any, requests: Sequence[Any], group: Group, priority: int) -> Agreement:
    """Collective over the block, with the same ``requests`` on every rank.

    ``priority`` is the eviction priority of the copies that are made.
    """
    if not requests:
        return Agreement((), 0)
    requests = requests[:MAX_REQUESTS]
    totals = [len(prefixes.tokens_of(request)) for request in requests]
    held = _held(scheduler, requests, group)
    best = [max(lengths) for lengths in zip(*held, strict=True)]
    count = first_of_step(best, totals, prefixes.chunk_tokens(scheduler))
    requests = requests[:count]
    held = [row[:count] for row in held]
    page = prefixes.page_tokens(scheduler)

    def first_missing(request: int, start: int) -> Hashable:
        tokens = prefixes.tokens_of(requests[request])[: start + page]
        return prefixes.namespace_of(requests[request]), tokens.tobytes()

    copied, tried = 0, set[int]()
    while True:
        # Once each: where memory is short, one copy may have evicted another, for ever.
        due = [copy for copy in copies(held, first_missing) if copy.request not in tried]
        if not due:
            return Agreement(tuple(map(min, zip(*held, strict=True))), copied)
        tried.update(copy.request for copy in due)
        copied += _carry_out(scheduler, requests, due, held, group, priority)
        held = _held(scheduler, requests, group)


def agree_on_budget(
    scheduler: Any, requests: Sequence[Any], lengths: Sequence[int], group: Group
) -> Budget:
    """Collective over the block: what every rank has for a step that uses ``lengths`` of the
    requests' cached prefixes, which all ranks hold."""
    mine = [prefixes.cost(scheduler, *one) for one in zip(requests, lengths, strict=True)]
    told = group.gather_numbers([*mine, *prefixes.room(scheduler)])
    *costs, tokens, rows = zip(*told, strict=True)
    most = {id(request): max(row) for request, row in zip(requests, costs, strict=True)}
    return Budget(min(tokens), min(rows), most)


def _held(scheduler: Any, requests: Sequence[Any], group: Group) -> list[list[int]]:
    return group.gather_numbers([prefixes.matched(scheduler, request) for request in requests])


def _carry_out(
    scheduler: Any,
    requests: Sequence[Any],
    due: Sequence[Copy],
    held: Sequence[Sequence[int]],
    group: Group,
    priority: int,
) -> int:
    """Make the copies that every rank has room for; the tokens that this rank took over."""
    mine = held[group.rank]
    # Making room for one copy must not evict what another one is read from or put behind.
    with prefixes.locked(
        scheduler, [(requests[c.request], min(mine[c.request], c.end)) for c in due]
    ):
        incoming = [
            prefixes.reserve(scheduler, requests[c.request], mine[c.request], c.end)
            if mine[c.request] < c.end
            else None
            for c in due
        ]
        has_room = [
            int(place is not None or mine[c.request] >= c.end)
            for c, place in zip(due, incoming, strict=True)
        ]
        agreed = [all(rows) for rows in zip(*group.gather_numbers(has_room), strict=True)]
        taken = 0
        for copy, place, everywhere in zip(due, incoming, agreed, strict=True):
            if not everywhere:
                if place is not None:
                    prefixes.give_up(scheduler, place)
                continue
            if copy.owner == group.rank:
                kv = prefixes.read(scheduler, requests[copy.request], copy.start, copy.end)
            else:
                kv = prefixes.empty(scheduler, copy.end - copy.start)
            group.broadcast(kv, copy.owner)
            if place is not None:
                missing = kv[:, :, mine[copy.request] - copy.start :]
                prefixes.store(scheduler, place, missing, priority)
                taken += copy.end - mine[copy.request]
        return taken
