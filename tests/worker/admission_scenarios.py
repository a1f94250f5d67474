"""Ranks that agree on cached prefixes: each with a scheduler, tree and KV pool of SGLang's own."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_vertumnus.config import PoolConfig
from tests.patches.schedulers import (
    Size,
    free_tokens,
    kv_of,
    namespace,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)
from tests.worker.link_scenarios import joined

USUAL = Size()
#: More collectives than any agreement needs.
ENDLESS = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scene:
    """``held[rank]`` was served by that rank, oldest first; ``occupied[rank]`` tokens of its pool
    belong to running requests."""

    requests: tuple[Prompt, ...]
    held: tuple[tuple[Prompt, ...], ...]
    size: Size = USUAL
    occupied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has seen; ``sent`` are the tokens whose KV went over the group."""

    lengths: tuple[int, ...]
    copied: int
    sent: int
    matched: tuple[int, ...]
    is_right: bool
    room_before: int
    room_after: int
    held: tuple[int, ...]


class Counted:
    """A group that counts, and ends what does not end by itself."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = group.rank
        self.sent = 0
        self._rounds = 0

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        self._rounds += 1
        if self._rounds > ENDLESS:
            raise AssertionError("the ranks never agree")
        rows: list[list[int]] = self._group.gather_numbers(numbers)
        return rows

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        self.sent += tensor.shape[2]
        self._group.broadcast(tensor, owner)


class Meeting:
    """Where the ranks of a block that are threads of one process exchange values."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def leave(self) -> None:
        """Whoever waits need not."""
        self._barrier.abort()


class ThreadGroup:
    """What ``CpGroup`` offers, among threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        rows = self._meeting.exchange(self.rank, list(numbers))
        assert len({len(row) for row in rows}) == 1, rows
        return rows

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        sent = self._meeting.exchange(self.rank, tensor.clone() if owner == self.rank else None)
        tensor.copy_(sent[owner])


def in_threads(scene: Scene) -> list[Outcome]:
    """The outcome on each rank."""
    size = len(scene.held)
    meeting = Meeting(size)
    outcomes: list[Any] = [None] * size

    def act(rank: int) -> None:
        try:
            outcomes[rank] = agreed(scene, rank, ThreadGroup(rank, meeting))
        except BaseException as exc:
            outcomes[rank] = exc
            meeting.leave()

    with sglang_context(scene.size):
        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return outcomes


def in_processes(_: Any, config: PoolConfig, rank: int, scenes: tuple[Scene, ...]) -> list[Outcome]:
    """This rank's outcome of each scene, over the pool's real group."""
    with joined(config, rank) as links:
        (link,) = links.values()
        outcomes = []
        for scene in scenes:
            with sglang_context(scene.size):
                outcomes.append(agreed(scene, rank, link.group))
        return outcomes


def agreed(scene: Scene, rank: int, group: Any) -> Outcome:
    from vertumnus_patches import prefixes
    from vertumnus_patches.prefix_marks import SURPLUS_PRIORITY

    from sgl_vertumnus.worker.admission import agree

    scheduler = scheduler_with_pools(scene.size)
    served = [serve(scheduler, prompt) for prompt in scene.held[rank]]
    if scene.occupied:
        scheduler.token_to_kv_pool_allocator.alloc(scene.occupied[rank])
    requests = [
        receive(scheduler, f"r{number}", prompt.tokens, **prompt.fields)
        for number, prompt in enumerate(scene.requests)
    ]
    room, counted = free_tokens(scheduler), Counted(group)
    agreement = agree(scheduler, requests, counted, SURPLUS_PRIORITY)
    return Outcome(
        lengths=agreement.lengths,
        copied=agreement.copied_tokens,
        sent=counted.sent,
        matched=tuple(prefixes.matched(scheduler, request) for request in requests),
        is_right=all(
            is_right(scheduler, request, length)
            for request, length in zip(requests, agreement.lengths, strict=False)
        ),
        room_before=room,
        room_after=free_tokens(scheduler),
        held=tuple(prefixes.matched(scheduler, request) for request in served),
    )


def serve(scheduler: Any, prompt: Prompt) -> Any:
    """Let the prompt be served, so that it is a cached prefix; the request."""
    fields = {"sampling": {"max_new_tokens": 1, "ignore_eos": True}} | prompt.fields
    request = receive(scheduler, "served", prompt.tokens, **fields)
    while not request.finished():
        assert step(scheduler) is not None
    return request


def is_right(scheduler: Any, request: Any, length: int) -> bool:
    """Whether the first ``length`` tokens have the KV that a model would give them."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = scheduler.tree_cache
    tokens = request.origin_input_ids[:length]
    key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
    found = tree.match_prefix(MatchPrefixParams(key=key))
    slots = tree.path_device_indices(found.last_device_node)
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if len(slots) < length:
        return False
    buffers = zip(pool.k_buffer, pool.v_buffer, strict=True)
    kv = torch.stack([torch.stack((k[slots], v[slots])) for k, v in buffers])
    return torch.equal(kv, kv_of(tokens, 0, length, namespace(request)))
