"""A pool of real SGLang ranks with two context-parallel degrees, one question, one answer.

    python -m sgl_vertumnus.demo.quickstart [--once] [--json] [--port P] [--composition 2x1]
        [--pd]

``scripts/quickstart`` installs what this needs and then runs it. Progress goes to standard
error, the answer to standard output.
"""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from vertumnus_router.clock import Clock, WallClock
from vertumnus_router.io.config import DEFAULT_PORT

from sgl_vertumnus import processes
from sgl_vertumnus.config import check_geometry
from sgl_vertumnus.cpu_dtype import faster_dtype
from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.checkpoint_cache import cache_root
from sgl_vertumnus.demo.pool_process import Milestones, PoolProcess
from sgl_vertumnus.demo.progress import Console, Progress
from sgl_vertumnus.demo.router_client import RouterClient
from sgl_vertumnus.demo.servers import DECODE_FLAGS, PLAIN_ENVIRONMENT, plain_command
from sgl_vertumnus.errors import ConfigurationError, PoolStartError, VertumnusError
from sgl_vertumnus.ports import free_range

QUESTION = "What is the capital of France?"
_READY_LIMIT_S = 600.0
_DECODE_PORTS = 31800
_DECODE_TOKENS = 32768
_HOST = "127.0.0.1"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints. Times in seconds, memory in GiB.

    ``ready_s`` counts from the start of the pool's first process to the router's readiness,
    ``pss_gib`` all processes, router included, after the answer.
    """

    answer: str
    worker: str
    cp_degree: int
    ready_s: float
    ttft_s: float
    url: str
    composition: str
    pss_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    once: bool
    json: bool
    port: int
    pool_size: int
    degrees: tuple[int, ...]
    composition: str
    pool_flags: tuple[str, ...]
    #: port of a decode server; None: the pool decodes, too
    decode_port: int | None = None


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The command line; exits with a message when it cannot be meant."""
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description=f"Serve {embedded_model.NAME} from a pool of real SGLang ranks.",
    )
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    parser.add_argument(
        "--port",
        type=int,
        help=f"the router's port (default: {DEFAULT_PORT}, or any when that is taken)",
    )
    parser.add_argument(
        "--composition",
        help="workers as COUNTxDEGREE; their ranks add up to the pool (default: 2x1,1x2, or 2x1 "
        "with --pd)",
    )
    parser.add_argument(
        "--pd",
        action="store_true",
        help="let the pool prefill only, and start a decode server of plain SGLang that fetches "
        "the KV with Mooncake over TCP",
    )
    parser.add_argument(
        "pool_flags", nargs="*", metavar="-- FLAG", help="further flags for launch_server"
    )
    arguments = parser.parse_args(argv)
    asked = arguments.composition or ("2x1" if arguments.pd else "2x1,1x2")
    try:
        size, largest = _extent(asked)
        # The whole ladder up to the largest degree named, so that the pool can be regrouped.
        ladder = tuple(1 << exponent for exponent in range(largest.bit_length()))
        degrees, composition = check_geometry(size, ladder, asked)
        port = _port(arguments.port)
    except ConfigurationError as exc:
        parser.error(str(exc))
    return Options(
        once=arguments.once,
        json=arguments.json,
        port=port,
        pool_size=size,
        degrees=degrees,
        composition=composition,
        pool_flags=tuple(arguments.pool_flags),
        # Far enough from the front's, which is looked for when this one is not bound yet.
        decode_port=free_range(_HOST, 1, start=_DECODE_PORTS) if arguments.pd else None,
    )


def _extent(composition: str) -> tuple[int, int]:
    """Ranks in total, and the largest degree; anything odd is left to ``check_geometry``."""
    counts: list[tuple[int, int]] = []
    for term in composition.lower().split(","):
        count, _, degree = term.strip().partition("x")
        if count.isdigit() and degree.isdigit():
            counts.append((int(count), int(degree)))
    return sum(n * degree for n, degree in counts) or 1, max((d for _, d in counts), default=1)


def _port(wanted: int | None) -> int:
    for port in (wanted,) if wanted is not None else (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except (OSError, OverflowError) as exc:
                refusal = exc
            else:
                return int(probe.getsockname()[1])
    raise ConfigurationError(f"--port {wanted} cannot be used: {refusal}")


def launch_command(options: Options, model: Path) -> list[str]:
    """The command that starts the pool and the router."""
    # From the upper end: launch_server takes its other ports from the lower.
    front = free_range(_HOST, 1, start=31000)
    prefills = (
        ["--disaggregation-mode", "prefill", "--decode", f"http://{_HOST}:{options.decode_port}"]
        if options.decode_port is not None
        else []
    )
    return [
        *(sys.executable, "-m", "sgl_vertumnus.launch_server"),
        *("--model-path", str(model), "--served-model-name", embedded_model.NAME),
        *("--pool-size", str(options.pool_size)),
        *("--cp-degrees", ",".join(map(str, options.degrees))),
        *("--composition", options.composition),
        *("--host", _HOST, "--port", str(front), "--router-port", str(options.port)),
        *prefills,
        *options.pool_flags,
    ]


def decode_command(options: Options, model: Path) -> list[str] | None:
    """The command that starts the decode server, if there is to be one."""
    if options.decode_port is None:
        return None
    flags = [*DECODE_FLAGS, "--served-model-name", embedded_model.NAME]
    # As the pool's ranks have it: KV is not converted on its way.
    flags += ["--dtype", faster_dtype(), "--max-total-tokens", str(_DECODE_TOKENS)]
    return plain_command(model, options.decode_port, flags)


class _Signals:
    """Ctrl-C and its kin: the first ends the work, any later one the shutdown's patience."""

    def __init__(self, work: "asyncio.Task[int]") -> None:
        self._work = work
        self._working = True
        self.first: signal.Signals | None = None
        self.hurried = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on, number)

    def shutting_down(self) -> None:
        """From here on nothing is cancelled any more: what was started has to be stopped."""
        self._working = False

    def _on(self, number: signal.Signals) -> None:
        if self._working and self.first is None:
            self.first = number
            self._work.cancel()
        else:
            self.hurried = True


async def run(
    options: Options,
    command: Sequence[str],
    progress: Progress,
    clock: Clock,
    decode: Sequence[str] | None = None,
) -> int:
    """Start the pool with ``command``, and a server with ``decode`` if given, ask, print the
    answer, serve unless ``--once``.

    Returns the exit status. However this ends, no process of the pool is left.
    """
    signals = _Signals(_current_task())
    processes.adopt_orphans()
    logs = cache_root() / "logs"
    log = logs / f"quickstart-{options.port}.log"
    pool: PoolProcess | None = None
    decoder: PoolProcess | None = None
    reporting: asyncio.Task[None] | None = None
    result: Result | None = None
    try:
        progress.step(f"starting {options.pool_size} ranks as {options.composition}, log: {log}")
        started = clock.now()
        pool = await PoolProcess.start(command, log, clock)
        if decode is not None:
            log = logs / f"quickstart-{options.port}-decode.log"
            progress.step(f"starting a decode server, log: {log}")
            decoder = await PoolProcess.start(
                decode, log, clock, name="the decode server", environment=PLAIN_ENVIRONMENT
            )
        reporting = asyncio.create_task(_report(pool, progress))
        asking = pool.during(_first_answer(options, pool, started, progress, clock))
        result = await (asking if decoder is None else decoder.during(asking))
        if not options.once:
            _publish(result, options)
            progress.step("serving until Ctrl-C")
            await pool.during(asyncio.Event().wait())
    except asyncio.CancelledError:
        if signals.first is None:
            raise
    finally:
        signals.shutting_down()
        progress.step("stopping the pool")
        for process in (pool, decoder):
            if process is not None:
                await process.stop(hurry=lambda: signals.hurried)
        if reporting is not None:
            reporting.cancel()
        await processes.kill_descendants(clock)
    if result is None:
        return 128 + (signals.first or signal.SIGTERM)
    if options.once:
        _publish(result, options)  # last, so that it is the last line
    return 0


def _current_task() -> "asyncio.Task[int]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task is running")
    return task


async def _report(pool: PoolProcess, progress: Progress) -> None:
    milestones = Milestones()
    async for line in pool.lines():
        for milestone in milestones.read(line):
            progress.step(milestone)


async def _first_answer(
    options: Options, pool: PoolProcess, started: float, progress: Progress, clock: Clock
) -> Result:
    async with RouterClient(f"http://{_HOST}:{options.port}", clock) as router:
        try:
            await router.wait_ready(options.composition, _READY_LIMIT_S, progress.update)
        except PoolStartError as exc:
            raise pool.failure(str(exc)) from exc
        ready_s = clock.now() - started
        progress.step(f"ready after {ready_s:.1f} s; asking: {QUESTION}")
        answer = await router.ask(QUESTION, await router.model())
        return Result(
            answer=answer.text,
            worker=answer.worker,
            cp_degree=answer.cp_degree,
            ready_s=round(ready_s, 2),
            ttft_s=round(answer.ttft_s, 3),
            url=router.url,
            composition=await router.composition(),
            pss_gib=round(pool.pss_bytes() / 2**30, 2),
        )


def _publish(result: Result, options: Options) -> None:
    text = msgspec.json.encode(result).decode() if options.json else describe(result)
    print(text, flush=True)


def describe(result: Result) -> str:
    """The result for people, with the request that gave it."""
    request = {"messages": [{"role": "user", "content": QUESTION}]}
    return f"""
  {QUESTION}
  {result.answer}

  served by  {result.worker} at context-parallel degree {result.cp_degree}, \
first token after {result.ttft_s:.2f} s
  pool       {result.composition}, ready in {result.ready_s:.1f} s, {result.pss_gib:.2f} GiB
  address    {result.url}

  curl -s {result.url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{msgspec.json.encode(request).decode()}'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = parse_options(argv)
    progress = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Until the pool runs: unwind, so that a download is stopped and its files removed.
        signal.signal(number, _exit)
    try:
        model = embedded_model.prepare(progress=progress)
        command = launch_command(options, model)
        decode = decode_command(options, model)
        return asyncio.run(run(options, command, progress, WallClock(), decode))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (VertumnusError, aiohttp.ClientError, OSError) as exc:
        progress.step(f"error: {str(exc) or type(exc).__name__}")
        return 1


def _exit(number: int, frame: object) -> None:
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
