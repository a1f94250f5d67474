"""The one model that this router serves, as its pools describe it."""

from typing import Any, Protocol

from vertumnus_router.core.profile import Profile
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.client_request import ClientRequest
from vertumnus_router.protocol import ModelInfo, PrefillSide

#: What SGLang takes a request without a model for.
_ANY = (None, "", "default")


class Served(Protocol):
    """What a pool, or a server of plain SGLang, says of itself that concerns the model. Without
    KV events there are no blocks, ``block_tokens`` is None."""

    @property
    def pool_id(self) -> str: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def block_tokens(self) -> int | None: ...

    @property
    def prefill(self) -> PrefillSide | None: ...

    @property
    def device(self) -> str: ...


class ServedModel:
    """Set by the first pool that joins; pools with another model do not fit until all of this
    one's have left. ``paired``: the router was given decode servers, so its pools must leave the
    decoding to them. ``profile``: what prices the pools, which must not be of another kind."""

    def __init__(self, *, paired: bool = False, profile: Profile | None = None) -> None:
        self.paired = paired
        self._profile = profile
        self._pools: dict[str, Served] = {}
        #: of the pool that has been here longest
        self.description: Served | None = None
        self._kv_tokens = 0

    @property
    def prefill_only(self) -> bool:
        """Whether the pools that are here leave the decoding to others."""
        return self.description is not None and self.description.prefill is not None

    @property
    def block_tokens(self) -> int | None:
        """The size of the blocks that KV events tell of; None while nobody publishes any."""
        sizes = (pool.block_tokens for pool in self._pools.values())
        return next((size for size in sizes if size is not None), None)

    def misfit(self, pool: Served) -> str | None:
        """Why ``pool`` cannot join the pools that are here, or None."""
        if self.paired and pool.prefill is None:
            return (
                f"pool {pool.pool_id} decodes itself: launch it with --disaggregation-mode "
                f"prefill, or this router without --decode"
            )
        stranger = self._profile and self._profile.misfit(pool.device, pool.model.shape)
        if stranger:
            return (
                f"pool {pool.pool_id}: {stranger}; measure it with sgl-vertumnus profile, and "
                f"give the result to --profile"
            )
        mine = self.description
        if mine is None:
            return None
        if pool.pool_id in self._pools:
            return f"a pool named {pool.pool_id} is here already; give each its --pool-id"
        if (pool.prefill is None) != (mine.prefill is None):
            return (
                f"of the pools of this router either all decode themselves or none; "
                f"pool {pool.pool_id} is of the other kind"
            )
        pairs = (
            ("model", mine.model.served_name, pool.model.served_name),
            ("block size", self.block_tokens, pool.block_tokens),
            ("tokenizer", mine.model.tokenizer_path, pool.model.tokenizer_path),
        )
        for what, ours, theirs in pairs:
            if ours != theirs and None not in (ours, theirs):
                return (
                    f"pool {pool.pool_id} has {what} {theirs!r}, the pools of this router have "
                    f"{ours!r}: one router serves one model"
                )
        return None

    def joined(self, pool: Served) -> None:
        self._pools[pool.pool_id] = pool
        self._look()

    def left(self, pool_id: str) -> None:
        self._pools.pop(pool_id, None)
        self._look()

    def _look(self) -> None:
        """Work out what every request asks for."""
        self.description = next(iter(self._pools.values()), None)
        kv_tokens = (pool.model.kv_capacity_tokens for pool in self._pools.values())
        self._kv_tokens = max(kv_tokens, default=0)

    def check(self, asked: str | None) -> None:
        """``ApiError`` 404 for a model that is not this one. LoRA adapters are asked for as
        ``model:adapter``."""
        if self.description is None or asked in _ANY:
            return
        model = self.description.model
        assert asked is not None
        for name in (model.served_name, model.model_path):
            if asked == name or asked.startswith(f"{name}:"):
                return
        raise ApiError(
            404,
            "model_not_found",
            f"The model `{asked}` does not exist; this router serves `{model.served_name}`",
            param="model",
        )

    def output_tokens(self, asked: ClientRequest, input_tokens: int) -> int:
        """The most tokens that the engine will generate for one answer.

        SGLang shortens an answer to the memory of a rank, but refuses what exceeds the context.
        """
        wanted = asked.output_tokens
        if self.description is None:
            return wanted or 0
        context_tokens = self.description.model.context_tokens
        if wanted is not None and input_tokens + wanted > context_tokens:
            return wanted
        room = max(min(context_tokens, self._kv_tokens) - input_tokens, 0)
        return min(wanted or asked.default_output_tokens or room, room)

    def cards(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``."""
        if self.description is None:
            return []
        model = self.description.model
        return [
            {
                "id": model.served_name,
                "object": "model",
                "created": 0,
                "owned_by": "sglang",
                "root": model.served_name,
                "parent": None,
                "max_model_len": model.context_tokens,
            }
        ]
