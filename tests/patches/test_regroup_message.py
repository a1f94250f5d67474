"""The regroup command as numbers by name."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.regroup_message import (
    MalformedRegroup,
    is_regroup,
    read_regroup,
    regroup_knobs,
)


@given(
    epoch=st.integers(1, 2**53 - 1),
    degrees=st.dictionaries(st.integers(0, 1000), st.integers(1, 64), max_size=8),
)
def test_what_was_written_is_read(epoch: int, degrees: dict[int, int]) -> None:
    blocks = tuple(sorted(degrees.items()))
    knobs = regroup_knobs(epoch, blocks)
    assert read_regroup(knobs) == (epoch, blocks)
    # JSON and SGLang's own field may bring integers as floats.
    assert read_regroup({name: float(value) for name, value in knobs.items()}) == (epoch, blocks)
    assert is_regroup(SimpleNamespace(server_args=knobs))


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"vertumnus.leader.0": 1},
        {"vertumnus.epoch": 0},
        {"vertumnus.epoch": -1},
        {"vertumnus.epoch": 2**53},
        {"vertumnus.epoch": 1.5},
        {"vertumnus.epoch": math.nan},
        {"vertumnus.epoch": math.inf},
        {"vertumnus.epoch": 1, "vertumnus.leader.0": 1.5},
        {"vertumnus.epoch": 1, "vertumnus.leader.": 1},
        {"vertumnus.epoch": 1, "vertumnus.leader.-1": 1},
        {"vertumnus.epoch": 1, "vertumnus.leader.one": 1},
        {"vertumnus.epoch": 1, "vertumnus.leader.1_0": 1},
        {"vertumnus.epoch": 1, "0": 1},
        {"vertumnus.epoch": 1, "pp_max_micro_batch_size": 8},
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
