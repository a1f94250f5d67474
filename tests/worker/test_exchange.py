"""The leader's inbox: cut at a regroup command, nothing lost, nothing twice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.regroup_message import Phase, is_regroup, regroup_knobs

from sgl_vertumnus.worker.exchange import Ingress

#: Messages are numbered, so that no two are equal; a command is a negative number.
arrivals = st.lists(st.lists(st.booleans(), max_size=6), max_size=8)


def numbered(batches: list[list[bool]]) -> list[list[int]]:
    number = 0
    result: list[list[int]] = []
    for batch in batches:
        result.append([])
        for is_command in batch:
            number += 1
            result[-1].append(-number if is_command else number)
    return result


def is_command(message: Any) -> bool:
    return bool(message < 0)


@given(arrivals)
def test_order_is_kept_and_nothing_is_lost_or_doubled(batches: list[list[bool]]) -> None:
    received = numbered(batches)
    ingress = Ingress(is_command)
    taken: list[int] = []
    for batch in received:
        taken += ingress.take(batch)
    while not ingress.is_empty:
        step = ingress.take([])
        assert step, "a step that takes nothing would never end"
        taken += step
    assert taken == [message for batch in received for message in batch]
    assert ingress.take([]) == []


@given(arrivals)
def test_a_command_is_the_last_of_its_step(batches: list[list[bool]]) -> None:
    ingress = Ingress(is_command)
    for batch in [*numbered(batches), *([[]] * 50)]:
        step = ingress.take(batch)
        assert not any(is_command(message) for message in step[:-1])
        # Without a command in it, a step holds all there is.
        assert ingress.is_empty or is_command(step[-1])


def test_the_callers_list_is_not_kept() -> None:
    ingress = Ingress(is_command)
    received = [1, -2, 3]
    assert ingress.take(received) == [1, -2]
    received.clear()
    assert not ingress.is_empty
    assert ingress.take([4]) == [3, 4]


def test_sglangs_command_cuts_the_step() -> None:
    io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")
    command = io_struct.SetInternalStateReq(server_args=regroup_knobs(Phase.COMMIT, 1, [(0, 2)]))
    other = io_struct.SetInternalStateReq(server_args={"pp_max_micro_batch_size": 8})
    flush = io_struct.FlushCacheReqInput()
    ingress = Ingress(is_regroup)
    assert ingress.take([other, flush, command, flush]) == [other, flush, command]
    assert ingress.take([]) == [flush]
