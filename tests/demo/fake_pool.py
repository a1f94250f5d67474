"""Stands in for ``launch_server``: its log lines and endpoints, no model, awkward children.

It starts a child that ignores SIGTERM and one that leaves both its parent and its session,
and writes every process id to the file ``PIDS``: whoever starts this must end them all.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import web

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
LEAVER = (
    "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
    f"{SLEEPER!r}], start_new_session=True, stdout=subprocess.DEVNULL); print(child.pid)"
)


def start_children() -> list[int]:
    stubborn = subprocess.Popen([sys.executable, "-c", SLEEPER])
    left = subprocess.run([sys.executable, "-c", LEAVER], stdout=subprocess.PIPE, check=True)
    return [stubborn.pid, int(left.stdout)]


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["stream"] and body["model"] == "fake"
    headers = {"x-vertumnus-worker": "pool/2x2", "x-vertumnus-cp-degree": "2"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    for delta in ('{"role":"assistant","content":""}', '{"content":"Par"}', '{"content":"is."}'):
        await response.write(f'data: {{"choices":[{{"delta":{delta}}}]}}\n\n'.encode())
        await asyncio.sleep(0.05)
    await response.write(b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n')
    return response


async def serve(arguments: argparse.Namespace) -> None:
    polls = 0

    async def readiness(_: web.Request) -> web.Response:
        nonlocal polls
        polls += 1
        if polls < 3 or arguments.never_ready:
            return web.json_response({"ready": False, "reasons": ["rank 1 is late"]}, status=503)
        return web.json_response({"ready": True, "reasons": []})

    async def workers(_: web.Request) -> web.Response:
        shapes = [("serving", [0], 1), ("lost", [7], 1), ("serving", [1], 1)]
        if polls > 4:  # the last worker joins after the router is ready
            shapes.append(("serving", [2, 3], 2))
        return web.json_response(
            {
                "workers": [
                    {"worker_type": "regular", "state": s, "ranks": r, "degree": d}
                    for s, r, d in shapes
                ]
            }
        )

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    app = web.Application()
    app.router.add_get("/readiness", readiness)
    app.router.add_get("/workers", workers)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", arguments.router_port).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    print("ending in order", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--router-port", type=int)
    parser.add_argument("--pids", type=Path)
    parser.add_argument("--dies", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    arguments, _ = parser.parse_known_args()
    print("[2026-01-01 00:00:00 DP1 TP0] Load weight begin. avail mem=9.00 GB", flush=True)
    print("[2026-01-01 00:00:01 DP1 TP0] Load weight end. elapsed=1.25 s, type=X", flush=True)
    written = arguments.pids.with_suffix(".partial")
    written.write_text(" ".join(map(str, [os.getpid(), *start_children()])))
    written.rename(arguments.pids)
    if arguments.dies:
        sys.exit("ValueError: this model does not fit")
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
