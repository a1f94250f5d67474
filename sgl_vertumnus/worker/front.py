"""The pool's front: starts the pool, describes it, passes on the commands that move it."""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from vertumnus_patches import engine
from vertumnus_router.clock import WallClock
from vertumnus_router.lattice import Block, CompositionError, parse_composition
from vertumnus_router.protocol import (
    MoveCommand,
    MoveReport,
    PoolComposition,
    PoolDescription,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import PoolStartError, RegroupRefused, SupervisorSilent
from sgl_vertumnus.worker.control import Move, Rejected
from sgl_vertumnus.worker.control_sockets import ask_composition, ask_move
from sgl_vertumnus.worker.losses import LossWatch
from sgl_vertumnus.worker.moves import DRAIN_S, SWITCH_S
from sgl_vertumnus.worker.sharding import MIN_TOKENS_PER_RANK

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
POLL_S = 0.05
#: A leader needs a moment after its last answer before it counts as idle.
FLUSH_TIMEOUT_S = 20.0
#: The supervisor keeps its deadlines, and then some for what else it does.
MOVE_TIMEOUT_S = DRAIN_S + SWITCH_S + 4.0
DESCRIBE_TIMEOUT_S = 5.0
#: Threads that wait for the supervisor; one move is under way at most, the others are refused.
WAITING_THREADS = 4


class FrontRuntime:
    """Implements ``vertumnus_patches.seams.FrontSeam``."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config

    def process_start_method(self) -> str:
        """CUDA contexts do not survive a fork; on CPUs children share what was imported."""
        return "fork" if self._config.device == "cpu" else "spawn"


class PoolFront:
    """Starts the pool, and passes on what is asked about its composition.

    Warms the workers through its own HTTP server, on the path that any request takes; ``key`` is
    what that wants of administrators.
    """

    def __init__(self, config: PoolConfig, url: str, key: str | None = None) -> None:
        self._config = config
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.is_serving = False
        self._losses = LossWatch(config)

    def start(self, warmed_up: Callable[[], None] = lambda: None) -> None:
        """Bring the pool from the launch topology to its composition, then warm it; it serves
        once ``warmed_up`` has returned.

        Raises:
            PoolStartError: when the server or the supervisor does not answer, or a rank fails.
        """
        self._wait_until_listening()
        self._losses.start()
        try:
            # As long as a start may take: the supervisor may not listen yet.
            report = self.move(self._config.composition, timeout_s=READY_TIMEOUT_S)
        except (RegroupRefused, SupervisorSilent) as exc:
            raise PoolStartError(f"the pool has not taken its composition: {exc}") from exc
        if report.outcome != "committed":
            raise PoolStartError(f"the pool has not taken its composition: {report.reason}")
        logger.info("epoch %d: the pool serves as %s", report.epoch, report.after)
        self._warm_up()
        warmed_up()
        self.is_serving = True

    def move(
        self, composition: str, epoch: int | None = None, *, timeout_s: float = MOVE_TIMEOUT_S
    ) -> MoveReport:
        """Move the pool, which is at ``epoch`` unless that is None; blocks until it has ended.

        Raises:
            RegroupRefused: when the move was not begun.
            SupervisorSilent: when nothing is known of it.
        """
        answer = ask_move(self._config, Move(composition, epoch), timeout_s)
        if isinstance(answer, Rejected):
            raise RegroupRefused(answer.reason)
        return answer.report

    def composition(self) -> PoolComposition:
        """What the pool serves as. Blocks; raises ``SupervisorSilent``."""
        return ask_composition(self._config, DESCRIBE_TIMEOUT_S)

    def read_command(self, body: bytes) -> MoveCommand:
        """The command in a request's body.

        Raises:
            msgspec.MsgspecError: when it is none.
            CompositionError: when the pool cannot be laid out so.
        """
        command = msgspec.json.decode(body, type=MoveCommand)
        parse_composition(command.composition, self._config.size, self._config.degrees)
        return command

    def _warm_up(self) -> None:
        unpaired = engine.unpaired_fields()

        def warm(block: Block) -> None:
            tokens = MIN_TOKENS_PER_RANK * block.degree  # just enough to be sharded
            self._post(
                "/generate",
                {
                    "input_ids": [(block.first + i) % 97 + 3 for i in range(tokens)],
                    "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
                    "routed_dp_rank": block.leader,
                    **(unpaired if self._config.bootstrap_port is not None else {}),
                },
            )

        blocks = self._config.blocks
        with ThreadPoolExecutor(len(blocks)) as pool:
            list(pool.map(warm, blocks))
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
    """Serve ``/vertumnus/pool``, ``/vertumnus/composition`` and ``/vertumnus/regroup`` on the
    front; 503 until the pool serves."""
    from fastapi import Request, Response

    waiting = ThreadPoolExecutor(WAITING_THREADS, "vertumnus-moves")

    def answer(status: int, content: Any) -> Response:
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    async def asked(question: Callable[[], Any]) -> Response:
        if not front.is_serving:
            return answer(503, {"error": "the pool is starting"})
        try:
            # On a thread of its own: SGLang's event loop carries every stream of the pool.
            return answer(200, await asyncio.get_running_loop().run_in_executor(waiting, question))
        except RegroupRefused as exc:
            return answer(409, {"error": str(exc)})
        except SupervisorSilent as exc:
            return answer(503, {"error": str(exc)})

    @app.get("/vertumnus/pool")  # type: ignore[untyped-decorator]
    async def pool() -> Response:
        if not front.is_serving:
            # A router that joined now would have its first requests flushed by the warm-up.
            return Response(b"the pool is starting", status_code=503, media_type="text/plain")
        return answer(200, describe())

    @app.get("/vertumnus/composition")  # type: ignore[untyped-decorator]
    async def composition() -> Response:
        return await asked(front.composition)

    @app.post("/vertumnus/regroup")  # type: ignore[untyped-decorator]
    @engine.admin_endpoint
    async def regroup(request: Request) -> Response:
        try:
            command = front.read_command(await request.body())
        except (msgspec.MsgspecError, CompositionError) as exc:
            return answer(400, {"error": str(exc)})
        return await asked(lambda: front.move(command.composition, command.epoch))
