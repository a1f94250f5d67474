"""A server of plain SGLang, without this project's plugin: what it says of itself.

To the control plane it is a pool that is never moved: each of its data-parallel ranks is a worker
of the server's own context-parallel degree, on as many rank slots. It reports neither prefills nor
load.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vertumnus_router.core import events
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io.decodes import life_of
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import KvService, ModelInfo, PrefillSide

#: ``max_req_input_len`` is this much less than what a request may have in all
#: (``TpModelWorker.get_worker_info``).
_KEPT_FREE_TOKENS = 6
#: SGLang's default of ``--disaggregation-bootstrap-port``.
_BOOTSTRAP_PORT = 8998


class KvDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """``describe_kv_events_publisher`` of SGLang: one port a data-parallel rank, from the base."""

    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /server_info``, as far as it is read here."""

    model_path: str
    max_total_num_tokens: int
    max_req_input_len: int
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    dp_size: int = 1
    attn_cp_size: int = 1
    chunked_prefill_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int | None = None
    random_seed: int | None = None
    startup_time: Any = None
    kv_events: KvDescriptor | None = None


@dataclass(frozen=True, slots=True)
class PlainServer:
    """The server at a URL. ``bootstrap_port`` is the operator's word, if there is one."""

    url: str
    info: ServerInfo
    bootstrap_port: int | None = None

    @property
    def pool_id(self) -> str:
        """``host:port``: it has no name of its own."""
        return urlsplit(self.url).netloc

    @property
    def pool_size(self) -> int:
        return self.info.dp_size * self.info.attn_cp_size

    @property
    def degree(self) -> int:
        return self.info.attn_cp_size

    @property
    def blocks(self) -> tuple[Block, ...]:
        """By data-parallel rank."""
        return tuple(Block(rank * self.degree, self.degree) for rank in range(self.info.dp_size))

    @property
    def life(self) -> str:
        return life_of(self.info.startup_time, self.info.random_seed)

    @property
    def model(self) -> ModelInfo:
        info = self.info
        chunk = info.chunked_prefill_size
        return ModelInfo(
            served_name=info.served_model_name or info.model_path,
            model_path=info.model_path,
            tokenizer_path=info.tokenizer_path or info.model_path,
            context_tokens=info.max_req_input_len + _KEPT_FREE_TOKENS,
            kv_capacity_tokens=info.max_total_num_tokens,
            chunk_tokens=chunk if chunk is not None and chunk > 0 else info.max_total_num_tokens,
            chat_template=info.chat_template,
        )

    @property
    def kv_events(self) -> KvDescriptor | None:
        """None as well where they cannot be used: EAGLE's blocks are hashed over pairs of tokens,
        which nothing here would match."""
        speculative = self.info.speculative_algorithm or ""
        return None if speculative.upper().startswith("EAGLE") else self.info.kv_events

    @property
    def block_tokens(self) -> int | None:
        return None if self.kv_events is None else self.kv_events.block_size

    @property
    def prefill(self) -> PrefillSide | None:
        info = self.info
        if info.disaggregation_mode != "prefill":
            return None
        port = self.bootstrap_port or info.disaggregation_bootstrap_port or _BOOTSTRAP_PORT
        return PrefillSide(
            bootstrap_port=port, dtype=info.dtype, kv_cache_dtype=info.kv_cache_dtype
        )

    @property
    def device(self) -> str:
        """It does not say."""
        return ""

    @property
    def kv_service(self) -> KvService | None:
        return None

    def dp_rank(self, home: int) -> int | None:
        """The data-parallel rank that a home is part of; None if there is only one."""
        return None if self.info.dp_size == 1 else home // self.degree

    def joined(self, block_tokens: int) -> events.PoolJoined:
        """``block_tokens`` is for a server without KV events, of which nothing is cached that is
        known of."""
        model = self.model
        return events.PoolJoined(
            pool=PoolId(self.pool_id),
            size=self.pool_size,
            degrees=(self.degree,),
            block_tokens=self.block_tokens or block_tokens,
            context_tokens=model.context_tokens,
            kv_capacity_tokens=model.kv_capacity_tokens,
            chunk_tokens=model.chunk_tokens,
            manifest="",
            prefill_only=self.prefill is not None,
            plain=True,
        )

    def reports(self) -> Iterator[events.RankReported]:
        """What its ranks would say."""
        for block in self.blocks:
            for index in block.ranks:
                rank = Rank(PoolId(self.pool_id), index)
                yield events.RankReported(rank, self.life, 0, block, "")

    def on_all_ranks(
        self, dp_rank: int, of_leader: Iterable[events.Event]
    ) -> Iterator[events.Event]:
        """The events of a data-parallel rank, which its leader publishes for all: each of them
        holds every block."""
        for event in of_leader:
            for index in self.blocks[dp_rank].ranks:
                rank = Rank(PoolId(self.pool_id), index)
                match event:
                    case events.BlocksStored(parent=parent, blocks=blocks):
                        yield events.BlocksStored(rank, parent, blocks)
                    case events.BlocksRemoved(blocks=blocks):
                        yield events.BlocksRemoved(rank, blocks)
                    case events.IndexReset(cause=cause):
                        yield events.IndexReset(rank, cause)
                    case _:
                        raise TypeError(f"{event!r} is not of the index")


def read_server_info(url: str, body: bytes, bootstrap_port: int | None) -> PlainServer | str:
    """The server at ``url`` by its answer, or why it cannot be a worker."""
    try:
        info = msgspec.json.decode(body, type=ServerInfo)
    except msgspec.MsgspecError as exc:
        return f"GET /server_info: is this SGLang? {exc}"
    degree = info.attn_cp_size
    if degree < 1 or degree & (degree - 1) or info.dp_size < 1:
        return (
            f"it runs with --attn-cp-size {degree} and --dp-size {info.dp_size}: the router can "
            f"price degrees that are powers of two"
        )
    if info.disaggregation_mode == "decode":
        return "it runs with --disaggregation-mode decode: name it with --decode"
    return PlainServer(url, info, bootstrap_port)
