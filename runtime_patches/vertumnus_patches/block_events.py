"""What enters and leaves a rank's tree, by block hash."""

from array import array
from dataclasses import dataclass
from typing import Any

#: What tells equal tokens apart in the cache: a request's ``extra_key`` and ``cache_salt``.
Namespace = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks behind ``parent``, in order; None is the root. ``pages`` are the tokens of each, as
    64-bit integers."""

    hashes: tuple[int, ...]
    parent: int | None
    pages: tuple[bytes, ...]
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The tree is empty."""


BlockEvent = Stored | Removed | Cleared


def block_event(made: Any, tagged: tuple[Any, ...]) -> BlockEvent:
    """Of the event that SGLang made of its tree's tuple, which alone has the extra key."""
    match tagged[0]:
        case "block_stored":
            tokens = array("q", made.token_ids).tobytes()
            page = len(tokens) // len(made.block_hashes)
            return Stored(
                hashes=tuple(made.block_hashes),
                parent=made.parent_block_hash,
                pages=tuple(tokens[at : at + page] for at in range(0, len(tokens), page)),
                namespace=(tagged[8], tagged[6]),
            )
        case "block_removed":
            return Removed(tuple(made.block_hashes))
        case _:
            return Cleared()


def stored_event(stored: Stored) -> Any:
    """As SGLang publishes it."""
    from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium

    tokens = array("q", b"".join(stored.pages)).tolist()
    return BlockStored(
        block_hashes=list(stored.hashes),
        parent_block_hash=stored.parent,
        token_ids=tokens,
        block_size=len(tokens) // len(stored.hashes),
        lora_id=None,
        medium=StorageMedium.GPU,
        cache_salt=stored.namespace[1],
    )
