"""The connections between the ranks of a block, in real processes over real sockets."""

import importlib.util
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vertumnus_patches.cp_group import CpGroup
from vertumnus_router.lattice import Block, lattice

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.groups import connect_store
from sgl_vertumnus.worker.rendezvous import open_store
from sgl_vertumnus.worker.stream import BlockBroken, BlockStream, Content
from tests.worker import link_scenarios as scenarios
from tests.worker.configs import config_of
from tests.worker.ranks import Died, Raised, run

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang makes the process groups"
)


@pytest.fixture
def pair() -> Iterator[PoolConfig]:
    yield from pool(2, (2,))


@pytest.fixture
def four() -> Iterator[PoolConfig]:
    yield from pool(4, (1, 2, 4))


def pool(size: int, degrees: tuple[int, ...]) -> Iterator[PoolConfig]:
    config = config_of(size, degrees)
    store = open_store(config)
    yield config
    del store


def calls(config: PoolConfig, *more: object) -> list[tuple[object, ...]]:
    return [(config, rank, *more) for rank in range(config.size)]


# -- from the leader to its members ---------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize("size", [2, 4])
def test_members_get_each_step_as_their_leader_has_it(size: int) -> None:
    for config in pool(size, (size,)):
        assert run(scenarios.exchange, calls(config)) == [[]] * size


@needs_sglang
def test_tensors_arrive_in_place(pair: PoolConfig) -> None:
    leader, member = run(scenarios.tensors, calls(pair))
    assert leader == member
    assert leader[0] == [0, 3, 1, 4, 2, 5] and leader[-1] == [0.0]


@needs_sglang
@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        (scenarios.wrong_size, "12 bytes came, 16 were due"),
        (scenarios.wrong_turn, "b't' came, Content.REQUESTS was due"),
    ],
)
def test_ranks_that_are_out_of_step_do_not_go_on(
    pair: PoolConfig, scenario: Any, what: str
) -> None:
    _, member = run(scenario, calls(pair))
    assert isinstance(member, Raised) and member.kind == "BlockBroken"
    assert f"out of step: {what}" in member.text


# -- collectives ----------------------------------------------------------------------------------


@needs_sglang
def test_every_block_of_the_lattice_has_its_group(four: PoolConfig) -> None:
    seen = run(scenarios.collectives, calls(four))
    for rank, blocks in enumerate(seen):
        expected = {
            (block.first, block.degree): (
                [[float(r), 100.0 + r] for r in block.ranks],
                block.leader,
                (rank - block.first, block.degree, rank == block.leader),
            )
            for block in lattice(four.size, four.degrees)
            if block.degree > 1 and rank in block
        }
        assert blocks == expected
        assert list(blocks) == [(rank // 2 * 2, 2), (0, 4)]


# -- deaths ---------------------------------------------------------------------------------------


@needs_sglang
@pytest.mark.parametrize("how", ["exchange", "gather"])
@pytest.mark.parametrize("victim", [0, 1])
def test_siblings_of_a_killed_rank_raise_instead_of_hanging(how: str, victim: int) -> None:
    for config in pool(4, (4,)):
        outcomes = run(scenarios.sibling_of_a_killed_rank, calls(config, victim, how), 30)
        assert outcomes.pop(victim) == Died(-9)
        for outcome in outcomes:
            assert outcome.startswith("BlockBroken:" if how == "exchange" else "RuntimeError:")


def test_a_rank_whose_leader_never_comes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_vertumnus.worker.stream._JOIN_S", 0.1)
    for rank in (0, 1):
        with pytest.raises(BlockBroken, match=f"rank {rank} could not join"):
            BlockStream.join("pool-nobody", Block(0, 2), rank, dist.HashStore())


def test_a_member_does_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader = BlockStream(Block(0, 2), [theirs], None)
        with pytest.raises(ValueError, match="nothing to receive"):
            leader.receive(Content.REQUESTS)
        member = BlockStream(Block(0, 2), [], ours)
        leader.send(Content.REQUESTS, b"abc")
        assert member.receive(Content.REQUESTS) == b"abc"
        leader.close()
        with pytest.raises(BlockBroken, match=r"the leader of .* is gone"):
            member.receive(Content.REQUESTS)


# -- rendezvous -----------------------------------------------------------------------------------


def listeners(port: int) -> list[str]:
    """Local addresses, as the kernel writes them, that listen on ``port``."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(local.rpartition(":")[0])
    return found


def test_the_rendezvous_is_for_this_machine_only(pair: PoolConfig) -> None:
    assert listeners(pair.ports.store) == ["0100007F"]
    connect_store(pair).set("key", "value")
    assert connect_store(pair).get("key") == b"value"


def test_a_taken_rendezvous_port_is_an_error(pair: PoolConfig) -> None:
    with pytest.raises(OSError, match="in use"):
        open_store(pair)


def test_a_pool_of_another_host_keeps_its_rendezvous_on_loopback() -> None:
    config = config_of(2, (1, 2), host="0.0.0.0")
    store = open_store(config)
    connect_store(config).set("key", "value")
    assert store.get("key") == b"value" and listeners(config.ports.store) == ["0100007F"]


@needs_sglang
def test_a_group_that_gathers_nonsense_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    group = CpGroup(
        name="nonsense",
        store=dist.HashStore(),
        size=1,
        rank=0,
        device=torch.device("cpu"),
        timeout=timedelta(seconds=20),
    )
    group.warm_up()
    monkeypatch.setattr(group, "all_gather_into_tensor", lambda out, mine: out.fill_(7))
    with pytest.raises(RuntimeError, match=r"nonsense: gathered \[7\.0\]"):
        group.warm_up()
