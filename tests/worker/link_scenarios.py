"""What ranks do in ``test_links``; runs in processes of its own."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from vertumnus_router.lattice import Block, lattice

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker import groups
from sgl_vertumnus.worker.exchange import receive_step, send_step
from sgl_vertumnus.worker.groups import Links, build_links, connect_store
from sgl_vertumnus.worker.stream import Content
from tests.patches.sglang_requests import generate_request


@contextmanager
def joined(config: PoolConfig, rank: int) -> Iterator[dict[Block, Links]]:
    groups.GROUP_TIMEOUT = timedelta(seconds=40)  # a hang must fail the test, not outlast it
    store = connect_store(config)
    yield dict(build_links(config, rank, store, torch.device("cpu")))


def steps() -> list[list[Any]]:
    """What a leader sends, step by step."""
    from sglang.srt.managers import io_struct
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    sampling = {"max_new_tokens": 7, "stop": ["a", "ö"], "json_schema": "{}", "top_k": 3}
    return [
        [],
        [generate_request("short", [5], sampling=sampling, time_stats=APIServerReqTimeStats())],
        [],
        [
            generate_request("long", range(200_000), cache_salt="s", routed_dp_rank=1),
            io_struct.AbortReq(rid="short"),
            io_struct.FlushCacheReqInput(),
            generate_request("empty", []),
            io_struct.SetInternalStateReq(server_args={"vertumnus.epoch": 2}),
        ],
        [io_struct.AbortReq(abort_all=True)],
        [],
    ]


def exchange(_: Any, config: PoolConfig, rank: int) -> list[str]:
    """Differences between what was sent and what this rank has; the leader's own is exact."""
    (block,) = lattice(config.size, config.degrees)
    with joined(config, rank) as links:
        stream = links[block].stream
        problems = []
        for number, sent in enumerate(steps()):
            if rank == block.leader:
                send_step(sent, stream)
                continue
            got = receive_step(stream)
            for message in sent:
                if hasattr(message, "time_stats"):
                    message.time_stats = None
            if got != sent:
                problems.append(f"step {number}: {got!r} is not {sent!r}")
        return problems


def tensors(_: Any, config: PoolConfig, rank: int) -> list[list[float]]:
    """What each kind of tensor is after the leader's went over the stream."""
    (block,) = lattice(config.size, config.degrees)
    with joined(config, rank) as links:
        stream = links[block].stream
        seen = []
        for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16):
            tensor = (torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank).t()
            if rank == block.leader:
                stream.send_tensor(Content.KV, tensor)  # not contiguous
            else:
                tensor = tensor.contiguous()
                stream.receive_tensor(Content.KV, tensor)
            seen.append(tensor.flatten().tolist())
        large = torch.full((3 << 20,), float(rank))
        if rank == block.leader:
            stream.send_tensor(Content.KV, large)
        else:
            stream.receive_tensor(Content.KV, large)
        return [*seen, [float(large.sum())]]


def wrong_size(_: Any, config: PoolConfig, rank: int) -> None:
    (block,) = lattice(config.size, config.degrees)
    with joined(config, rank) as links:
        if rank == block.leader:
            links[block].stream.send_tensor(Content.KV, torch.zeros(3))
        else:
            links[block].stream.receive_tensor(Content.KV, torch.zeros(4))


def wrong_turn(_: Any, config: PoolConfig, rank: int) -> None:
    (block,) = lattice(config.size, config.degrees)
    with joined(config, rank) as links:
        if rank == block.leader:
            links[block].stream.send_tensor(Content.TOKENS, torch.zeros(4))
        else:
            receive_step(links[block].stream)


def collectives(_: Any, config: PoolConfig, rank: int) -> dict[tuple[int, int], Any]:
    """(what was gathered, what was broadcast) for every block that this rank belongs to."""
    seen = {}
    with joined(config, rank) as links:
        for block, link in links.items():
            mine = torch.tensor([[float(rank), 100.0 + rank]])
            gathered = torch.empty(block.degree, 2)
            link.group.all_gather_into_tensor(gathered, mine)
            told = torch.tensor([rank])
            link.group.broadcast_from_leader(told)
            seen[block.first, block.degree] = (
                gathered.tolist(),
                told.item(),
                (link.group.rank_in_group, link.group.world_size, link.group.is_first_rank),
            )
    return seen


def sibling_of_a_killed_rank(
    connection: Any, config: PoolConfig, rank: int, victim: int, how: str
) -> str:
    """Works in lockstep until the victim is gone; returns what told this rank."""
    (block,) = lattice(config.size, config.degrees)
    with joined(config, rank) as links:
        link = links[block]
        for turn in range(10_000):
            if rank == victim and turn == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if how == "gather":
                    out = torch.empty(block.degree)
                    link.group.all_gather_into_tensor(out, torch.tensor([float(rank)]))
                elif rank == block.leader:
                    send_step([], link.stream)
                else:
                    receive_step(link.stream)
            except Exception as exc:
                return f"{type(exc).__name__}: {exc}"
    return "never noticed"
