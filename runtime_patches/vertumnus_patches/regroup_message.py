"""The regroup command as it travels through SGLang's control channel.

``SetInternalStateReq`` carries numbers by name and is answered by every rank, in order with
the requests around it. A command names the new epoch and the degree of every leader:
``{"vertumnus.epoch": 3, "vertumnus.leader.0": 1, "vertumnus.leader.1": 1, ...}``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_EPOCH = "vertumnus.epoch"
_LEADER = "vertumnus.leader."
#: Numbers travel as floats, which are exact up to here.
_LARGEST_EPOCH = 2**53


class MalformedRegroup(ValueError):
    """A command that does not describe one epoch and its leaders."""


def regroup_knobs(epoch: int, blocks: Sequence[tuple[int, int]]) -> dict[str, int]:
    """The command for ``blocks``, pairs of (lowest rank, degree)."""
    return {_EPOCH: epoch} | {f"{_LEADER}{first}": degree for first, degree in blocks}


def read_regroup(knobs: Mapping[str, float]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """``(epoch, ((lowest rank, degree), ...))`` of a command.

    Raises:
        MalformedRegroup: when a name or value is none of a command.
    """
    try:
        epoch = _whole(knobs[_EPOCH])
        if not 0 < epoch < _LARGEST_EPOCH:
            raise ValueError(epoch)
        blocks = [(_rank(name), _whole(degree)) for name, degree in knobs.items() if name != _EPOCH]
    except (KeyError, ValueError, OverflowError) as exc:
        raise MalformedRegroup(f"not a regroup command: {dict(knobs)}") from exc
    return epoch, tuple(sorted(blocks))


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
