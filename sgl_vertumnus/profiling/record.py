"""The file that every measurement is appended to as it is made, so that a run can be resumed.

JSON lines. The first says of which pool, model and plan the others are.
"""

from pathlib import Path
from typing import TextIO

import msgspec
from vertumnus_router.core.profile import PoolKind

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.plan import Cell, Plan

RECORD_VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """What a second run must have in common with the first."""

    version: int
    pool_size: int
    kind: PoolKind
    sglang_version: str
    manifest: str
    #: where the seconds come from: ``leader`` or ``ttft``
    time: str
    plan: Plan
    #: how κ is looked for, None if it is not
    search: dict[str, str] | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """One prefill of a worker that had nothing else to do. ``fault`` is why it does not count."""

    cell: Cell
    repetition: int
    seconds: float
    fault: str | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True, tag="trial"):
    """One load on one worker: ``load`` is seconds of work Ê_C a second; ``attainment`` the part of
    the tokens that were in time."""

    degree: int
    load: float
    attainment: float
    requests: int


Entry = Header | Sample | Trial


class Record:
    """What was measured so far. ``add`` writes through to the file."""

    def __init__(self, out: TextIO, header: Header) -> None:
        self.header = header
        self._out = out
        self._samples: dict[tuple[Cell, int], Sample] = {}
        self._trials: dict[tuple[int, float], Trial] = {}
        self.dropped: list[Sample] = []

    @property
    def samples(self) -> list[Sample]:
        """Those that count."""
        return list(self._samples.values())

    def has(self, cell: Cell, repetition: int) -> bool:
        return (cell, repetition) in self._samples

    def trial(self, degree: int, load: float) -> Trial | None:
        return self._trials.get((degree, load))

    def add(self, entry: Sample | Trial) -> None:
        self.take(entry)
        self.write(entry)

    def take(self, entry: Sample | Trial) -> None:
        """Count it, without writing."""
        match entry:
            case Trial():
                self._trials[entry.degree, entry.load] = entry
            case Sample(fault=None):
                self._samples[entry.cell, entry.repetition] = entry
            case Sample():
                self.dropped.append(entry)

    def write(self, entry: Entry) -> None:
        self._out.write(msgspec.json.encode(entry).decode() + "\n")
        self._out.flush()

    def close(self) -> None:
        self._out.close()


def open_record(path: Path, header: Header, *, resume: bool) -> Record:
    """A new file, or with ``resume`` the one that is there, if there is one.

    Raises:
        ConfigurationError: when a file is in the way, or is of another pool, model or plan.
    """
    old = _lines(path) if resume and path.exists() else []
    if old:
        _check_same(path, _decode(path, 1, old[0]), header)
    try:
        record = Record(path.open("a" if old else "w" if resume else "x"), header)
    except FileExistsError as exc:
        raise ConfigurationError(
            f"{path} is there already: --resume goes on with it, another --out begins anew"
        ) from exc
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
    if not old:
        record.write(header)
    for number, line in enumerate(old[1:], 2):
        entry = _decode(path, number, line)
        if not isinstance(entry, Header):
            record.take(entry)
    return record


def _lines(path: Path) -> list[bytes]:
    """Complete ones; of a run that was killed the last may be cut short, and is cut off."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.splitlines()


def _decode(path: Path, number: int, line: bytes) -> Entry:
    try:
        return msgspec.json.decode(line, type=Entry)
    except msgspec.MsgspecError as exc:
        raise ConfigurationError(f"{path}, line {number}: not of a profile: {exc}") from exc


def _check_same(path: Path, before: Entry, now: Header) -> None:
    if not isinstance(before, Header):
        raise ConfigurationError(f"{path}: it does not begin with what was measured")
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(now)
    differences = [
        f"{name} was {old[name]}, is {new[name]}" for name in new if old[name] != new[name]
    ]
    if differences:
        raise ConfigurationError(
            f"{path} is of another run: {'; '.join(differences)}. Give the same pool and flags, or "
            f"another --out"
        )
