"""A running pool as the profiler uses it: by its front, one thing after the other."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import msgspec
from vertumnus_router.clock import WallClock
from vertumnus_router.core.profile import PoolKind
from vertumnus_router.protocol import (
    MoveCommand,
    MoveReport,
    PoolComposition,
    PoolDescription,
    ProtocolError,
    decode_description,
)

from sgl_vertumnus.errors import ConfigurationError, VertumnusError

_ASK_S = 10.0
_PREFILL_S = 3600.0
_MOVE_S = 180.0
_FLUSH_S = 20.0
POLL_S = 0.1
#: SGLang's own word for KV that is sent to no decode server.
UNPAIRED = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}


class PoolError(VertumnusError):
    """The pool did not do as asked; the message says what it answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt: seconds until its only token, and the prefix that was found, tokens."""

    seconds: float
    cached_tokens: int


class LivePool:
    """``url`` is the front's. Raises ``PoolError`` wherever it does not answer as it should."""

    def __init__(self, url: str, description: PoolDescription, key: str | None) -> None:
        self.url = url
        self.description = description
        self._key = key
        self._clock = WallClock()

    @property
    def headers(self) -> dict[str, str]:
        """Of every request to the front."""
        keyed = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return {"Content-Type": "application/json", **keyed}

    @property
    def kind(self) -> PoolKind:
        return PoolKind(device=self.description.device, model=self.description.model.shape)

    @property
    def most_tokens(self) -> int:
        """Of a prompt, so that it fits with its one answer."""
        model = self.description.model
        return min(model.context_tokens, model.kv_capacity_tokens) - 8

    def body(self, tokens: Sequence[int], rid: str) -> dict[str, Any]:
        """A request for one token from the worker at rank 0."""
        return {
            "rid": rid,
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "routed_dp_rank": 0,
            **(UNPAIRED if self.description.prefill is not None else {}),
        }

    def prefill(self, tokens: Sequence[int], rid: str) -> Answer:
        """Compute the prompt on the worker at rank 0."""
        began = self._clock.now()
        answer = msgspec.json.decode(self._call("/generate", self.body(tokens, rid), _PREFILL_S))
        return Answer(self._clock.now() - began, int(answer["meta_info"]["cached_tokens"]))

    def requests(self) -> int:
        """How many the ranks have, running or waiting."""
        loads = msgspec.json.decode(self._call("/v1/loads?include=core"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def wait_idle(self, limit_s: float) -> None:
        deadline = self._clock.now() + limit_s
        while count := self.requests():
            if self._clock.now() > deadline:
                raise PoolError(
                    f"{count} request(s) run or wait on the pool: profile a pool that nobody uses"
                )
            self._clock.pause(POLL_S)

    def flush(self) -> None:
        """Empty the prefix caches of all ranks, which have nothing to do."""
        deadline = self._clock.now() + _FLUSH_S
        while True:
            # A rank needs a moment after its last answer before it counts as idle. The front
            # answers for the first of them only, so they all get it.
            self._clock.pause(POLL_S)
            try:
                self._call("/flush_cache", {})
                return
            except PoolError:
                if self._clock.now() > deadline:
                    raise

    def abort_all(self) -> None:
        self._call("/abort_request", {"abort_all": True})

    def composition(self) -> PoolComposition:
        return msgspec.json.decode(self._call("/vertumnus/composition"), type=PoolComposition)

    def move(self, composition: str) -> None:
        """Bring the pool there, unless it is. Refused when somebody else moves it."""
        now = self.composition()
        if now.composition == composition and now.moving is None:
            return
        command = MoveCommand(composition=composition, epoch=now.epoch)
        body = self._call("/vertumnus/regroup", msgspec.to_builtins(command), _MOVE_S)
        report = msgspec.json.decode(body, type=MoveReport)
        if report.outcome != "committed":
            raise PoolError(f"the move to {composition} was {report.outcome}: {report.reason}")

    @contextmanager
    def put_back(self) -> Iterator[str]:
        """The composition as it is, to which the pool returns whatever happens meanwhile."""
        before = self.composition()
        if failed := [block for block in before.blocks if block.state != "serving"]:
            raise PoolError(f"{len(failed)} block(s) of the pool have failed: launch it anew")
        try:
            yield before.composition
        finally:
            self._return_to(before.composition)

    def _return_to(self, composition: str) -> None:
        """A move that was under way when its caller was interrupted ends first."""
        deadline = self._clock.now() + _MOVE_S
        while self.composition().moving is not None and self._clock.now() < deadline:
            self._clock.pause(POLL_S)
        self.move(composition)

    def _call(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = _ASK_S
    ) -> bytes:
        return call(self.url + path, body, self.headers, timeout_s)


def find_pool(url: str, key: str | None = None, pool_id: str | None = None) -> LivePool:
    """The pool whose front, or whose router, is at ``url``.

    Raises:
        PoolError: when nothing there describes a pool.
        ConfigurationError: when a router's pool cannot be told, or it moves its pools by itself.
    """
    url = url.rstrip("/")
    try:
        return _at_front(url, key)
    except PoolError:
        status = _at_router(url, key)
        if status is None:
            raise
    if (status.get("controller") or {}).get("mode") == "on":
        raise ConfigurationError(
            f"the router at {url} moves its pools by itself: start it with --controller observe"
        )
    pools = [one for one in status["pools"] if pool_id in (None, one["pool"])]
    if len(pools) != 1:
        names = ", ".join(str(one["pool"] or one["url"]) for one in status["pools"])
        raise ConfigurationError(f"name one pool of the router with --pool: {names}")
    return _at_front(pools[0]["url"].rstrip("/"), key)


def call(
    url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout_s: float
) -> bytes:
    """GET, or POST of a JSON ``body``; the answer. Raises ``PoolError``."""
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url, data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as exc:
        said = exc.read()[:500].decode(errors="replace").strip()
        raise PoolError(f"{url} answers {exc.code}: {said}") from exc
    except (OSError, HTTPException, ValueError) as exc:
        raise PoolError(f"{url} does not answer: {getattr(exc, 'reason', None) or exc}") from exc


def _at_router(url: str, key: str | None) -> dict[str, Any] | None:
    """What the router there says of its pools, None if it is no router."""
    keyed = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        status = msgspec.json.decode(call(f"{url}/vertumnus/composition", None, keyed, _ASK_S))
    except (PoolError, msgspec.DecodeError):
        return None
    return status if isinstance(status, dict) and "pools" in status else None


def _at_front(url: str, key: str | None) -> LivePool:
    try:
        return LivePool(url, decode_description(call(f"{url}/vertumnus/pool", None, {}, 10.0)), key)
    except ProtocolError as exc:
        raise PoolError(f"{url}: {exc}") from exc
