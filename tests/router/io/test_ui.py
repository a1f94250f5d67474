"""The live page: what it is served with, what it is told, and what a person sees in Chromium."""

import asyncio
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vertumnus_router.core.config import BreakerConfig, PolicyConfig
from vertumnus_router.core.types import BreakerState
from vertumnus_router.io.ui import pages

from tests.router.io import chromium, fake_pool, ui_scene
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until

STATIC = Path(pages.__file__).parent / "static"
BROWSER_LIMIT_S = 120.0
HOSTILE = "<img src=x onerror=document.title='taken'>\"'&amp;"


@pytest.fixture(scope="module")
def devtools() -> Iterator[int]:
    if chromium.PATH is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with chromium.browser() as port:
        yield port


async def state(it: Running) -> dict[str, Any]:
    async with it.client.get("/ui/state") as response:
        assert response.status == 200
        return dict(await response.json())


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script_but_its_own() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            async with it.client.get("/ui") as response:
                assert response.status == 200
                assert response.content_type == "text/html"
                page = await response.text()
                policy = response.headers["content-security-policy"]
                assert response.headers["x-content-type-options"] == "nosniff"
            rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
            assert rules["default-src"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", page)
            for name in re.findall(r'(?:src|href)="([^"]+)"', page):
                if name != "data:,":
                    assert name.startswith("ui/")
                    async with it.client.get(f"/{name}") as response:
                        assert response.status == 200, name
            for path, status in (
                *(("/ui/nothing.js", 404), ("/ui/pages.py", 404)),
                ("/ui/..%2Fpages.py", 400),
            ):
                async with it.client.get(path) as response:
                    assert response.status == status, path

    run(scenario())


def test_no_file_names_another_host_or_writes_markup() -> None:
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|eval\(|@import", text), path


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    build = pytest.importorskip("hatchling.build", reason="needs hatchling to build a wheel")
    root = Path(__file__).parents[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        wheel = build.build_wheel(str(tmp_path))
    inside = zipfile.ZipFile(tmp_path / wheel).namelist()
    for path in STATIC.iterdir():
        assert f"vertumnus_router/io/ui/static/{path.name}" in inside


def test_the_state_tells_of_requests_by_the_time_they_took() -> None:
    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url) as it:
            await it.ready()
            before = (await state(it))["timeline"]["now"]
            assert (before["ttft_p50_s"], before["slo"], before["finished"]) == (None, None, 0)
            async with await it.chat(stream=True) as response:
                await response.read()
            pool.answer = fake_pool.refuse(500, {"error": "broken"})
            async with await it.chat(stream=True) as response:
                assert response.status == 502
            told = (await state(it))["timeline"]
            now = told["now"]
            assert now["finished"] == 1
            assert now["failures"] == {"worker_error": 1}
            assert 0 < now["ttft_p50_s"] <= now["ttft_p90_s"] < 60
            assert now["slo"] == 0.5, "two prompts of one length, one of which got no token"
            assert sum(told["finished"]) == sum(told["failed"]) == 1

    run(scenario())


def test_the_state_tells_of_moves_while_they_happen_and_after() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(ui_scene.workers(it)) == 2, "both")
            pool.regroup = fake_pool.answer_late
            moving = asyncio.create_task(ui_scene.reconfigure(it, "fake", "1x2"))
            await until(lambda: pool.regroups, "commanded")
            told = await state(it)
            (move,) = told["moves"]
            assert (move["pool"], move["kind"], move["from"], move["to"]) == (
                *("fake", "merge"),
                *("2x1", "1x2"),
            )
            assert move["outcome"] is None
            assert told["pools"][0]["moving"] == "1x2"
            pool.may_regroup.set()
            await moving
            (move,) = (await state(it))["moves"]
            assert move["outcome"] == "committed"
            assert move["stages_ms"]["switch"] == 3
            assert move["took_s"] > 0

    run(scenario())


def test_an_operator_sees_a_busy_cluster_and_what_is_wrong(devtools: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ui_scene.busy(tmp_path) as (it, _), chromium.page(devtools, f"{it.url}/ui") as p:
            await p.until("document.querySelectorAll('.hot tbody tr').length >= 3", 60)
            assert await p.js("document.title") == "fake-model · vertumnus"
            assert await p.text("#ready") == "● ready"
            alerts = await p.text("#alerts")
            assert f"Pool {ui_scene.NEVER} is away: cannot connect" in alerts
            assert "Worker c/2x2 is lost: rank 2: its process ended with status -9" in alerts

            # Every rank of the five pools is in exactly one box, in order.
            for pool in "abcde":
                ranks = f"[...document.querySelectorAll('[data-rank^=\"{pool}/\"]')]"
                found = await p.js(f"{ranks}.map((one) => one.dataset.rank)")
                assert found == [f"{pool}/{rank}" for rank in range(8)]
            boxes = await p.js(
                "Object.fromEntries([...document.querySelectorAll('[data-worker]')]"
                ".map((box) => [box.dataset.worker, box.innerText.replace(/\\s+/g, ' ')]))"
            )
            assert boxes["d/0x8"].startswith("CP 8")
            assert boxes["e/4x4"].startswith("CP 4")
            assert "⇄ draining" in boxes["a/6x1"] and "⇄ draining" in boxes["a/7x1"]
            assert "✕ lost" in boxes["c/2x2"]
            assert "queued" in " ".join(boxes.values())
            moving = await p.text(".moving")
            assert moving == "⇄ moving to 6x1,1x2"

            moves = await p.text("#moves")
            assert re.search(r"merge a 8x1 → 6x1,1x2 for \d", moves)
            assert re.search(r"merge b 4x1,2x2 → 2x1,3x2 ", moves)
            # Document 3 is at the ranks 4 to 7 of pool c.
            held = await p.js("document.querySelector('[data-ranks~=\"c/5\"]').dataset.ranks")
            assert held == "c/4 c/5 c/6 c/7"
            await p.js("document.querySelector('[data-ranks~=\"c/5\"]').focus()")
            pointed = "[...document.querySelectorAll('.pointed-at')].map((one) => one.dataset.rank)"
            assert await p.js(pointed) == ["c/4", "c/5", "c/6", "c/7"]
            for line in ("#ttft .p50", "#ttft .p90", "#slo .slo"):
                assert len(await p.js(f"document.querySelector('{line}').getAttribute('d')")) > 500
            figures = await p.text("#figures")
            assert re.search(r"in flight 3[0-9]", figures), figures
            assert re.search(r"found in cache \d+ % predicted \d+ %", figures)

            # Nothing is cut off or laid over something else, however wide the window is.
            for width in (1440, 1000, 700, 400):
                await p.size(width, 900)
                assert await p.js("document.documentElement.scrollWidth") <= width
            assert p.complaints == []

    run(scenario(), BROWSER_LIMIT_S)


def test_an_empty_router_and_one_that_is_gone_say_so(devtools: int) -> None:
    async def scenario() -> None:
        async with running(ui_scene.NEVER) as it, chromium.page(devtools, f"{it.url}/ui") as p:
            await p.until("document.querySelector('.pool')")
            assert await p.text("#ready") == "▲ not ready"
            alerts = await p.text("#alerts")
            assert "Not ready: pool at http://127.0.0.1:1: cannot connect" in alerts
            assert "is away" not in alerts, "said once"
            assert f"{ui_scene.NEVER} ✕ cannot connect" in await p.text("#pools")
            assert "No streamed request" in await p.text("#ttft")
            assert "None yet" in await p.text("#moves")
            assert "None yet" in await p.text("#hot")
            assert p.complaints == []
            it.stop.set()
            await p.until("document.body.classList.contains('stale')")
            assert "No answer from the router" in await p.text("#alerts")
            assert "What you see is of" in await p.text("#alerts")

    run(scenario(), BROWSER_LIMIT_S)


def test_names_stay_text(devtools: int) -> None:
    async def scenario() -> None:
        pool = FakePool(2, "1x2")
        model = msgspec.structs.replace(pool.description.model, served_name=HOSTILE)
        pool.description = msgspec.structs.replace(pool.description, model=model)
        async with (
            pool,
            running(pool.url) as it,
            chromium.page(devtools, f"{it.url}/ui") as p,
        ):
            await it.ready()
            pool.lose_rank(1, HOSTILE)
            await p.until("document.querySelector('.worker.is-lost')")
            assert await p.js("document.title") == f"{HOSTILE} · vertumnus"
            assert await p.js("document.querySelectorAll('img, script:not([src])').length") == 0
            assert await p.js("document.querySelector('#what b').textContent") == HOSTILE
            assert HOSTILE in await p.js("document.querySelector('#alerts').textContent")
            assert p.complaints == []

    run(scenario(), BROWSER_LIMIT_S)


def test_a_worker_that_is_left_alone_says_so(devtools: int) -> None:
    async def scenario() -> None:
        breaker = BreakerConfig(failure_threshold=1)
        policy = PolicyConfig(queue_timeout_s=2.0, breaker=breaker)
        async with (
            FakePool(2) as pool,
            running(pool.url, policy=policy) as it,
            chromium.page(devtools, f"{it.url}/ui") as p,
        ):
            await it.ready()
            await until(lambda: len(ui_scene.workers(it)) == 2, "both")
            pool.answer_by_rank[0] = fake_pool.refuse(500, {"error": "broken"})
            while all(one.breaker is BreakerState.CLOSED for one in ui_scene.workers(it)):
                async with await it.chat() as response:
                    await response.read()
            await p.until("document.querySelector('.held-back')")
            assert "breaker open" in await p.text("[data-worker='fake/0x1']")
            assert "breaker" not in await p.text("[data-worker='fake/1x1']")
            assert p.complaints == []

    run(scenario(), BROWSER_LIMIT_S)
