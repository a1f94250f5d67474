"""The commands of a move as they travel through SGLang's control channel.

``SetInternalStateReq`` carries numbers by name, in order with the requests around it. A command
names its phase, the new epoch and the degree of every leader:
``{"vertumnus.phase": 2, "vertumnus.epoch": 3, "vertumnus.leader.0": 1, ...}``.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

_PHASE = "vertumnus.phase"
_EPOCH = "vertumnus.epoch"
_LEADER = "vertumnus.leader."
#: Numbers travel as floats, which are exact up to here.
_LARGEST_EPOCH = 2**53


class Phase(IntEnum):
    """What the ranks are to do about the epoch that the command names."""

    PREPARE = 1  # begin no further prefill and say so
    COMMIT = 2  # serve in its blocks
    ABANDON = 3  # go on as before


class MalformedRegroup(ValueError):
    """A command that does not describe a phase, one epoch and its leaders."""


def regroup_knobs(phase: Phase, epoch: int, blocks: Sequence[tuple[int, int]]) -> dict[str, int]:
    """The command for ``blocks``, pairs of (lowest rank, degree)."""
    leaders = {f"{_LEADER}{first}": degree for first, degree in blocks}
    return {_PHASE: int(phase), _EPOCH: epoch} | leaders


def regroup_message(phase: Phase, epoch: int, blocks: Sequence[tuple[int, int]]) -> Any:
    """SGLang's message of the command."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    return SetInternalStateReq(server_args=regroup_knobs(phase, epoch, blocks))


def read_regroup(
    knobs: Mapping[str, float],
) -> tuple[Phase, int, tuple[tuple[int, int], ...]]:
    """``(phase, epoch, ((lowest rank, degree), ...))`` of a command.

    Raises:
        MalformedRegroup: when a name or value is none of a command.
    """
    try:
        phase, epoch = Phase(_whole(knobs[_PHASE])), _whole(knobs[_EPOCH])
        if not 0 < epoch < _LARGEST_EPOCH:
            raise ValueError(epoch)
        leaders = {name: value for name, value in knobs.items() if name not in (_PHASE, _EPOCH)}
        blocks = [(_rank(name), _whole(degree)) for name, degree in leaders.items()]
    except (KeyError, ValueError, OverflowError) as exc:
        raise MalformedRegroup(f"not a regroup command: {dict(knobs)}") from exc
    return phase, epoch, tuple(sorted(blocks))


def _rank(name: str) -> int:
    digits = name.removeprefix(_LEADER)
    if digits == name or not (digits.isascii() and digits.isdigit()):
        raise ValueError(name)
    return int(digits)


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def is_regroup(message: Any) -> bool:
    """Whether a control message of SGLang is a regroup command."""
    knobs = getattr(message, "server_args", None)
    return isinstance(knobs, Mapping) and _EPOCH in knobs
