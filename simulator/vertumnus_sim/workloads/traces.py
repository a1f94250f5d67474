"""Traces of requests as lines of JSON: Mooncake's format, read and written, and flexlb's, read.

A Mooncake row has ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one per block of the prompt, the last one often partial. A flexlb row has ``ts``
(ms), ``il``, ``ol`` and ``bh``, one per whole block. Equal ids are equal prefixes: an id stands
for its block and all before it. Other fields are ignored.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast

import msgspec

MOONCAKE_BLOCK_TOKENS = 512
FLEXLB_BLOCK_TOKENS = 1024

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it comes, how long it is, and what it shares with others.

    ``blocks`` are the ids of the first ``len(blocks)`` blocks of the prompt; tokens behind
    them are the request's own.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int


class TraceError(ValueError):
    """A trace that cannot be read: ``path``, ``line`` (None: the whole file), and what to do."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        place = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {reason}")
        self.path = path
        self.line = line


class _MooncakeRow(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: _Positive
    output_length: _Natural
    hash_ids: tuple[int, ...]


class _FlexlbRow(msgspec.Struct):
    ts: _Milliseconds
    il: _Positive
    ol: _Natural
    # 64-bit hashes as decimal text.
    bh: tuple[str, ...]


def read_mooncake(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRequest]:
    """All requests of a ``.jsonl`` or ``.jsonl.gz`` file. Raises ``TraceError``."""
    return _read(path, partial(_from_mooncake, msgspec.json.Decoder(_MooncakeRow), block_tokens))


def read_flexlb(path: Path, block_tokens: int = FLEXLB_BLOCK_TOKENS) -> list[TraceRequest]:
    """All requests of a ``.jsonl`` or ``.jsonl.gz`` file. Raises ``TraceError``."""
    return _read(path, partial(_from_flexlb, msgspec.json.Decoder(_FlexlbRow), block_tokens))


READERS: dict[str, Callable[[Path, int], list[TraceRequest]]] = {
    "mooncake": read_mooncake,
    "flexlb": read_flexlb,
}
BLOCK_TOKENS = {"mooncake": MOONCAKE_BLOCK_TOKENS, "flexlb": FLEXLB_BLOCK_TOKENS}


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> None:
    """One row per request; with a name that ends in ``.gz``, compressed.

    Arrivals are written in milliseconds, to the microsecond. Tokens without a block id get ids
    that nothing else has, as the format wants one for every block. The block size is not part
    of the format: whoever reads must know it.
    """
    requests = list(requests)
    fresh = 1 + max((max(r.blocks) for r in requests if r.blocks), default=-1)
    encoder = msgspec.json.Encoder()
    with _open(path, "wb") as file:
        for request in requests:
            missing = _blocks_of(request.input_tokens, request.block_tokens) - len(request.blocks)
            own = range(fresh, fresh + missing)
            fresh += missing
            row = _MooncakeRow(
                timestamp=round(request.arrival_s * 1000, 3),
                input_length=request.input_tokens,
                output_length=request.output_tokens,
                hash_ids=(*request.blocks, *own),
            )
            file.write(encoder.encode(row) + b"\n")


def _from_mooncake(
    decoder: msgspec.json.Decoder[_MooncakeRow], block_tokens: int, line: bytes
) -> TraceRequest:
    row = decoder.decode(line)
    expected = _blocks_of(row.input_length, block_tokens)
    if len(row.hash_ids) != expected:
        raise ValueError(
            f"{row.input_length} tokens are {expected} blocks of {block_tokens}, and hash_ids has "
            f"{len(row.hash_ids)}; was the trace made with another block size (--block-tokens)?"
        )
    return TraceRequest(
        row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids, block_tokens
    )


def _from_flexlb(
    decoder: msgspec.json.Decoder[_FlexlbRow], block_tokens: int, line: bytes
) -> TraceRequest:
    row = decoder.decode(line)
    if len(row.bh) * block_tokens > row.il:
        raise ValueError(
            f"bh has {len(row.bh)} blocks of {block_tokens}, more than {row.il} tokens; was the "
            "trace made with another block size (--block-tokens)?"
        )
    return TraceRequest(row.ts / 1000, row.il, row.ol, tuple(map(int, row.bh)), block_tokens)


def _read(path: Path, parse: Callable[[bytes], TraceRequest]) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    for number, line in _lines(path):
        try:
            request = parse(line)
        except msgspec.MsgspecError as exc:
            raise TraceError(path, number, f"{exc}; is the trace in another --format?") from exc
        except ValueError as exc:
            raise TraceError(path, number, str(exc)) from exc
        if found and request.arrival_s < found[-1].arrival_s:
            raise TraceError(
                path,
                number,
                f"arrives at {request.arrival_s:g} s, before the line above; sort by time",
            )
        found.append(request)
    if not found:
        raise TraceError(path, None, "no requests in it")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    try:
        with _open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except FileNotFoundError as exc:
        raise TraceError(
            path, None, "no such file; scripts/fetch_traces gets the public traces"
        ) from exc
    except (OSError, EOFError) as exc:
        raise TraceError(path, None, f"cannot be read: {exc}") from exc


def _open(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    if path.suffix != ".gz":
        return path.open(mode)
    # Without the time of writing, so that equal requests are equal bytes.
    return cast(BinaryIO, gzip.GzipFile(path, mode, mtime=0))


def _blocks_of(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
