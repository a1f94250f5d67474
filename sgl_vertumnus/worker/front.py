"""The pool's front: activates the composition, warms the workers, describes the pool."""

import concurrent.futures
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from vertumnus_patches.regroup_message import regroup_knobs
from vertumnus_router.clock import WallClock
from vertumnus_router.lattice import Block, format_composition
from vertumnus_router.protocol import PoolDescription

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import PoolStartError, RegroupRefused
from sgl_vertumnus.worker.losses import LossWatch
from sgl_vertumnus.worker.sharding import MIN_TOKENS_PER_RANK

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
POLL_S = 0.05
#: A leader needs a moment after its last answer before it counts as idle.
FLUSH_TIMEOUT_S = 20.0


class FrontRuntime:
    """Implements ``vertumnus_patches.seams.FrontSeam``."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config

    def process_start_method(self) -> str:
        """CUDA contexts do not survive a fork; on CPUs children share what was imported."""
        return "fork" if self._config.device == "cpu" else "spawn"


class PoolFront:
    """The committed composition and the way to change it.

    Talks to its own HTTP server, so that a command takes the path that any command takes:
    tokenizer, controller, leaders, members.
    """

    def __init__(self, config: PoolConfig, url: str) -> None:
        self._config = config
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        self.is_serving = False
        self.epoch = 0
        self.blocks: tuple[Block, ...] = tuple(Block(rank, 1) for rank in range(config.size))
        self._losses = LossWatch(config, lambda: self.blocks)

    def start(self) -> None:
        """Bring the pool from the launch topology to its composition, then warm it.

        Raises:
            PoolStartError: when the server does not answer or a rank refuses.
        """
        self._wait_until_listening()
        self._losses.start()
        try:
            self.regroup(self._config.blocks)
        except RegroupRefused as exc:
            raise PoolStartError(str(exc)) from exc
        self._warm_up()
        self.is_serving = True

    def regroup(self, blocks: tuple[Block, ...]) -> None:
        """Command every rank to serve in ``blocks`` and commit when all have followed.

        Raises:
            RegroupRefused: when a rank did not follow.
        """
        # Spent even if refused: some ranks may have followed, and none follows a number twice.
        self.epoch += 1
        epoch = self.epoch
        knobs = regroup_knobs(epoch, [(block.first, block.degree) for block in blocks])
        # One answer a rank, in the order in which they came: it is not known whose each is.
        answers = self._post("/set_internal_state", {"server_args": knobs})
        followed, size = answers.count(True), self._config.size
        if followed != size:
            raise RegroupRefused(epoch, f"{followed} of {size} ranks followed; see their logs")
        self.blocks = blocks
        logger.info("epoch %d: the pool serves as %s", epoch, format_composition(blocks))

    def _warm_up(self) -> None:
        def warm(block: Block) -> None:
            tokens = MIN_TOKENS_PER_RANK * block.degree  # just enough to be sharded
            self._post(
                "/generate",
                {
                    "input_ids": [(block.first + i) % 97 + 3 for i in range(tokens)],
                    "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
                    "routed_dp_rank": block.leader,
                },
            )

        with concurrent.futures.ThreadPoolExecutor(len(self.blocks)) as pool:
            list(pool.map(warm, self.blocks))
        self._flush()

    def _flush(self) -> None:
        clock = WallClock()
        deadline = clock.now() + FLUSH_TIMEOUT_S
        while True:
            try:
                self._post("/flush_cache", None)
                return
            except PoolStartError:
                if clock.now() >= deadline:
                    raise
                clock.pause(POLL_S)

    def _wait_until_listening(self) -> None:
        clock = WallClock()
        deadline = clock.now() + READY_TIMEOUT_S
        while clock.now() < deadline:
            try:
                self._call("GET", "/model_info", None)
                return
            except OSError:
                clock.pause(POLL_S)
        raise PoolStartError(f"the front at {self._url} did not answer in {READY_TIMEOUT_S:.0f} s")

    def _post(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return self._call("POST", path, body)
        except urllib.error.HTTPError as exc:
            raise PoolStartError(f"{path} failed: {exc.code} {exc.read().decode()}") from exc
        except OSError as exc:
            raise PoolStartError(f"{path} failed: {exc}") from exc

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data=data, headers=self._headers, method=method
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            payload = answer.read()
        try:
            return json.loads(payload)
        except ValueError:
            return payload


def add_routes(app: Any, front: PoolFront, describe: Callable[[], PoolDescription]) -> None:
    """Serve ``GET /vertumnus/pool`` on the front; 503 until the pool serves."""
    import msgspec
    from fastapi import Response

    @app.get("/vertumnus/pool")  # type: ignore[untyped-decorator]
    async def pool() -> Response:
        if not front.is_serving:
            # A router that joined now would have its first requests flushed by the warm-up.
            return Response(b"the pool is starting", status_code=503, media_type="text/plain")
        return Response(msgspec.json.encode(describe()), media_type="application/json")
