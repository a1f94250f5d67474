"""``sgl-vertumnus status``, as its own process in front of a router."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from vertumnus_router.clock import WallClock
from vertumnus_router.io.config import DEFAULT_PORT
from vertumnus_router.io.keys import ApiKey

from sgl_vertumnus import cli, status
from sgl_vertumnus.errors import VertumnusError
from sgl_vertumnus.status import render
from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until

ROOT = Path(__file__).parents[3]
STATUS = (sys.executable, "-m", "sgl_vertumnus.cli", "status")


async def ask(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *STATUS, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def reconfigure(it: Running, composition: str) -> int:
    body = {"composition": composition}
    async with it.client.post("/vertumnus/reconfigure", json=body) as response:
        return response.status


async def serving(it: Running, count: int) -> None:
    await it.ready()
    await until(lambda: len(it.router.core.workers(it.router.clock.now())) == count, "all")


def test_the_table_shows_pools_workers_and_moves() -> None:
    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2") as pool, running(pool.url) as it:
            await serving(it, 3)
            assert await reconfigure(it, "2x2") == 200
            pool.regroup = fake_pool.abandon
            assert await reconfigure(it, "1x4") == 409
            code, out, err = await ask("--url", it.url)
            assert (code, err) == (0, "")
            lines = [line.split() for line in out.splitlines()]
            assert out.startswith(f"pool fake at {pool.url}: 2x2, epoch 2\n")
            assert ["fake/0x2", "2", "serving", "0.00", "0"] in lines
            assert ["fake/2x2", "2", "serving", "0.00", "0"] in lines
            move = "2 2x1,1x2 to 2x2 committed 20.0 2.0 3.0 1.0 26.0"
            assert move.split() in lines
            why = "2 2x2 to 1x4 abandoned - - - - - rank 1 was not ready within 10 s"
            assert why.split() in lines
            assert "\n\ncontroller " in out

    run(scenario())


def test_a_move_in_progress_is_shown() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await serving(it, 2)
            pool.regroup = fake_pool.answer_late
            moving = asyncio.create_task(reconfigure(it, "1x2"))
            await until(lambda: pool.regroups, "commanded")
            _, out, _ = await ask("--url", it.url)
            assert ": 2x1, epoch 1, moving to 1x2\n" in out
            assert out.count("draining") == 2
            assert "the pool is moving from 2x1 to 1x2" in out
            pool.may_regroup.set()
            assert await moving == 200

    run(scenario())


def test_json_is_the_routers_own_answer() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await serving(it, 1)
            code, out, _ = await ask("--json", "--url", f"{it.url}/")
            assert code == 0
            async with it.client.get("/vertumnus/composition") as response:
                assert json.loads(out) == await response.json()

    run(scenario())


def test_watch_follows_moves_and_restarts_until_it_is_interrupted() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await serving(it, 2)
            process = await asyncio.create_subprocess_exec(
                *STATUS, "--url", it.url, "--watch", "0.1", stdout=subprocess.PIPE
            )
            assert process.stdout is not None

            async def shows(text: str) -> None:
                assert process.stdout is not None
                while text not in (await process.stdout.readline()).decode():
                    pass

            await shows(": 2x1, epoch 1")
            assert await reconfigure(it, "1x2") == 200
            await shows(": 1x2, epoch 2")
            it.stop.set()
            await shows("no router answers at")
            process.send_signal(signal.SIGINT)
            await process.communicate()
            assert process.returncode == 0

    run(scenario())


def test_no_router_is_said_in_one_line() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        result = subprocess.run([*STATUS, "--url", url], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert f"no router answers at {url}" in result.stderr
    assert "--url" in result.stderr


def test_something_else_than_a_router() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await serving(it, 1)
            for url, what in (
                (f"{it.url}/nowhere", "answers 404: is this a vertumnus router?"),
                (pool.url, "does not describe pools"),
                (f"http://127.0.0.1:{pool.description.reports.port_base}", "no router answers at"),
                ("nonsense", "no router answers at nonsense"),
            ):
                code, _, err = await ask("--url", url)
                assert code == 1
                assert what in err, url

    run(scenario())


def test_a_router_with_keys_is_asked_with_one() -> None:
    async def scenario() -> None:
        keys = (ApiKey("team", "s3cret-of-the-team"),)
        async with FakePool(1) as pool, running(pool.url, api_keys=keys) as it:
            await until(lambda: it.router.core.is_ready(), "ready")
            code, _, err = await ask("--url", it.url)
            assert code == 1 and "answers 401: give it one of the router's keys" in err
            code, out, _ = await ask("--url", it.url, "--api-key", "s3cret-of-the-team")
            assert code == 0 and pool.url in out

    run(scenario())


@pytest.mark.parametrize("pools", [3, [{}], [{"pool": "p", "url": "u", "composition": 7}]])
def test_a_router_of_another_version_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, pools: Any
) -> None:
    monkeypatch.setattr(status, "fetch", lambda url, key: {"pools": pools})
    with pytest.raises(VertumnusError, match="in another way than this version knows"):
        status.show("http://router")
    assert "pools" in status.show("http://router", as_json=True)


def test_a_pool_that_was_not_reached_says_why() -> None:
    pool: dict[str, Any] = {
        "pool": None,
        "url": "http://node-a:30000",
        "epoch": None,
        "composition": None,
        "workers": [],
        "moving": None,
        "moves": [],
        "trouble": "cannot connect",
    }
    assert render({"pools": [pool]}) == "pool at http://node-a:30000: cannot connect"
    text = render({"pools": [pool | {"pool": "a", "trouble": "no answer"}]})
    assert text.splitlines()[:2] == [
        "pool a at http://node-a:30000: nothing serves",
        "  its moves are not known: no answer",
    ]


def test_decisions_of_the_controller() -> None:
    keep = {"age_s": 41.2, "action": "keep", "reason": "in_band", "detail": "fine", "chosen": None}
    move = {"pool": "p", "from": "1x2", "to": "2x1"}
    split = {"age_s": 21.2, "action": "split", "reason": "overload", "detail": "much"}
    controller = {"mode": "on", "last_decisions": [keep] * 9 + [split | {"chosen": move}]}
    lines = render({"pools": [], "controller": controller}).splitlines()
    assert lines[0] == "controller on"
    assert len(lines) == 2 + 5
    assert lines[-2].split() == ["41", "keep", "in_band", "fine"]
    assert lines[-1].split() == ["21", "split", "overload", "p:", "1x2", "to", "2x1", "much"]


def test_columns_line_up() -> None:
    worker = {"degree": 1, "state": "serving", "queue_s": 0.5, "requests": 3, "reason": None}
    workers = [worker | {"id": "p/0x1"}, worker | {"id": "p/10x1", "queue_s": 123.456}]
    pool = {"pool": "p", "url": "u", "epoch": 1, "composition": "2x1", "moving": None}
    text = render({"pools": [pool | {"workers": workers, "moves": [], "trouble": None}]})
    assert text.splitlines()[1:] == [
        "  worker  degree  state    queue s  requests  reason",
        "  p/0x1        1  serving     0.50         3",
        "  p/10x1       1  serving   123.46         3",
    ]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_watch_needs_a_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["status", f"--watch={seconds}"])
    assert stopped.value.code == 2
    assert "--watch" in capsys.readouterr().err


def test_the_default_is_a_router_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def watch(url: str, seconds: float, clock: WallClock, out: Any, **how: Any) -> None:
        asked.append((url, seconds, how))

    monkeypatch.setattr(cli, "watch", watch)
    cli.main(["status", "--watch"])
    assert asked == [(f"http://127.0.0.1:{DEFAULT_PORT}", 1.0, {"key": None, "as_json": False})]


def test_it_is_installed_as_a_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["sgl-vertumnus"] == f"{cli.__name__}:{cli.main.__name__}"


def test_it_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys, sgl_vertumnus.cli; print([n for n in ('torch', 'sglang') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
