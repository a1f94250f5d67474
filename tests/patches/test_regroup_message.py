"""The regroup command as numbers by name."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.regroup_message import (
    MalformedRegroup,
    Phase,
    is_regroup,
    read_regroup,
    regroup_knobs,
    regroup_message,
)


@given(
    phase=st.sampled_from(Phase),
    epoch=st.integers(1, 2**53 - 1),
    degrees=st.dictionaries(st.integers(0, 1000), st.integers(1, 64), max_size=8),
)
def test_what_was_written_is_read(phase: Phase, epoch: int, degrees: dict[int, int]) -> None:
    blocks = tuple(sorted(degrees.items()))
    knobs = regroup_knobs(phase, epoch, blocks)
    written = (phase, epoch, blocks)
    assert read_regroup(knobs) == written
    # JSON and SGLang's own field may bring integers as floats.
    assert read_regroup({name: float(value) for name, value in knobs.items()}) == written
    assert is_regroup(SimpleNamespace(server_args=knobs))


def test_a_command_is_a_message_of_sglang() -> None:
    pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")
    message = regroup_message(Phase.PREPARE, 3, [(0, 2), (2, 1)])
    assert is_regroup(message)
    assert read_regroup(message.server_args) == (Phase.PREPARE, 3, ((0, 2), (2, 1)))


PREPARE = {"vertumnus.phase": 1}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"vertumnus.leader.0": 1},
        PREPARE | {"vertumnus.epoch": 0},
        PREPARE | {"vertumnus.epoch": -1},
        PREPARE | {"vertumnus.epoch": 2**53},
        PREPARE | {"vertumnus.epoch": 1.5},
        PREPARE | {"vertumnus.epoch": math.nan},
        PREPARE | {"vertumnus.epoch": math.inf},
        PREPARE | {"vertumnus.epoch": 1, "vertumnus.leader.0": 1.5},
        PREPARE | {"vertumnus.epoch": 1, "vertumnus.leader.": 1},
        PREPARE | {"vertumnus.epoch": 1, "vertumnus.leader.-1": 1},
        PREPARE | {"vertumnus.epoch": 1, "vertumnus.leader.one": 1},
        PREPARE | {"vertumnus.epoch": 1, "vertumnus.leader.1_0": 1},
        PREPARE | {"vertumnus.epoch": 1, "0": 1},
        PREPARE | {"vertumnus.epoch": 1, "pp_max_micro_batch_size": 8},
        {"vertumnus.epoch": 1, "vertumnus.leader.0": 1},
        {"vertumnus.phase": 0, "vertumnus.epoch": 1},
        {"vertumnus.phase": 4, "vertumnus.epoch": 1},
        {"vertumnus.phase": 1.5, "vertumnus.epoch": 1},
        {"vertumnus.phase": math.nan, "vertumnus.epoch": 1},
    ],
)
def test_what_is_no_command_is_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(MalformedRegroup):
        read_regroup(knobs)


@pytest.mark.parametrize("message", [None, object(), SimpleNamespace(server_args=None)])
def test_other_messages_are_no_commands(message: Any) -> None:
    assert not is_regroup(message)


def test_other_knobs_are_no_command() -> None:
    assert not is_regroup(SimpleNamespace(server_args={"pp_max_micro_batch_size": 8}))
