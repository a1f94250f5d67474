"""Servers named in a file, and what is made of what a source names."""

import asyncio
from pathlib import Path

import orjson
import pytest
from vertumnus_router.clock import VirtualClock, WallClock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.discovery.config import FileDiscovery, KubernetesDiscovery
from vertumnus_router.io.discovery.file import FileError, FileSource, parse
from vertumnus_router.io.discovery.following import Following
from vertumnus_router.io.fleet import Role

from sgl_vertumnus import launch_router
from tests.router.io.fake_fleet import FakeFleet
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import run, running, until

A, B, C = "http://a:1", "http://b:1", "http://c:1"

# -- following -------------------------------------------------------------------------------------


def test_it_takes_away_only_what_it_has_brought() -> None:
    fleet = FakeFleet({A: Role.WORKER})
    one = Following(fleet, Role.WORKER, VirtualClock(), what="it")
    one.replace([A, B])
    one.replace([C])
    assert fleet.log == [f"+{B}", f"+{C}", f"-{B}"]
    assert set(fleet.members) == {A, C}


def test_joins_come_before_leaves() -> None:
    fleet = FakeFleet()
    one = Following(fleet, Role.WORKER, VirtualClock(), what="it")
    one.replace([A])
    one.replace([B])
    assert fleet.log == [f"+{A}", f"+{B}", f"-{A}"]


def test_nobody_is_believed_after_a_while() -> None:
    fleet, clock = FakeFleet(), VirtualClock()
    one = Following(fleet, Role.WORKER, clock, what="it", grace_s=60)
    one.replace([])
    assert not one.holds, "there was nobody to hold"
    one.replace([A, B])
    for _ in range(2):
        one.replace([])
        clock.advance(59)
        one.replace([])
        assert one.holds and set(fleet.members) == {A, B}
        one.replace([A, B])
        assert not one.holds
        clock.advance(59)
    one.replace([])
    clock.advance(60)
    one.replace([])
    assert not fleet.members


def test_a_server_in_another_role_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = FakeFleet({A: Role.DECODE})
    one = Following(fleet, Role.WORKER, VirtualClock(), what="it")
    for _ in range(3):
        one.replace([A, B])
    assert set(fleet.members) == {A, B}
    assert len(caplog.records) == 1
    fleet.leave(A)
    one.replace([A, B])
    assert fleet.members == {A: Role.WORKER, B: Role.WORKER}


# -- a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "workers", "decodes"),
    [
        (b"", [], []),
        (b"# nobody\n\n", [], []),
        (b"http://a:1\n  http://b:1/  # the new one\r\n", [A, B], []),
        (b'["http://a:1", "http://b:1/"]', [A, B], []),
        (b' {"workers": ["http://a:1"], "decode": ["http://c:1"]}', [A], [C]),
        (b'{"decode": ["http://c:1"]}', [], [C]),
    ],
)
def test_what_a_file_names(content: bytes, workers: list[str], decodes: list[str]) -> None:
    expected = {Role.WORKER: workers, Role.PREFILL: [], Role.DECODE: decodes}
    assert parse(content) == {role: frozenset(urls) for role, urls in expected.items()}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a:1", "'a:1' is not an http"),
        (b"http://a:1 http://b:1", "not an http"),
        (b"http://a http://b", "not an http"),
        (b"http://a:one", "not an http"),
        (b"http://[::1", "not an http"),
        (b"http://a:1\nhttp://a:1/\n", "named twice"),
        (b'["http://a:1"', "truncated"),
        (b'[{"url": "http://a:1"}]', "Expected `str`"),
        (b'{"worker": []}', "worker"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_a_file_that_is_not_understood(content: bytes, says: str) -> None:
    with pytest.raises(FileError, match=says):
        parse(content)


def test_a_file_that_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, fleet, clock = tmp_path / "servers", FakeFleet(), VirtualClock()
        source = FileSource(path, fleet, clock, grace_s=10)
        await source.look()
        assert "No such file" in str(source.trouble)
        path.write_text(f"{A}\n{B}\n")
        await source.look()
        assert set(fleet.members) == {A, B} and source.trouble is None

        path.write_text(A)  # half of what is being written
        await source.look()
        assert set(fleet.members) == {A, B}
        path.write_text(f"{A}\n{C}\n")
        await source.look()
        assert set(fleet.members) == {A, B}
        await source.look()
        assert set(fleet.members) == {A, C}

        for broken in ("nonsense", None):
            if broken is None:
                path.unlink()
            else:
                path.write_text(broken)
            for _ in range(30):
                await source.look()
                clock.advance(1)
            assert set(fleet.members) == {A, C} and source.trouble is not None

        path.write_bytes(orjson.dumps({"workers": [A], "prefill": [C], "decode": [B]}))
        await source.look()
        await source.look()
        assert (
            fleet.members == {A: Role.WORKER, B: Role.DECODE, C: Role.PREFILL}
            and source.trouble is None
        )

        path.write_text("")
        for _ in range(9):
            await source.look()
            clock.advance(1)
        assert fleet.members
        for _ in range(9):
            await source.look()
            clock.advance(1)
        assert not fleet.members

    run(scenario())


def test_a_router_follows_its_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = FakePool(1, pool_id="old"), FakePool(1, pool_id="new")
        path = tmp_path / "servers"
        async with pools(old, new), running(discovery=(FileDiscovery(path),)) as it:
            await until(lambda: "No such file" in str(it.router.not_ready()), "says so")
            path.write_text("")
            await until(lambda: "names no server" in str(it.router.not_ready()), "says so")
            path.write_text(old.url)
            await it.ready()
            path.write_text(new.url)
            await until(lambda: [one.url for one in it.router.pools] == [new.url], "changed")
            await it.ready()
            async with await it.chat(max_tokens=2) as answer:
                assert answer.headers["x-vertumnus-worker"].startswith("new/")

    run(scenario())


def test_a_file_is_looked_at_without_being_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, fleet = tmp_path / "servers", FakeFleet()
        path.write_text(A)
        task = asyncio.create_task(FileSource(path, fleet, WallClock()).run())
        await until(lambda: fleet.members, "read")
        path.write_text(B)
        await until(lambda: set(fleet.members) == {B}, "read again")
        task.cancel()

    run(scenario())


# -- flags -----------------------------------------------------------------------------------------


def config(*flags: str) -> tuple[object, ...]:
    return launch_router.router_config(launch_router._parser().parse_args(flags)).discovery


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config("--discovery-file", "f") == (FileDiscovery(Path("f")),)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", "6443")
    (found,) = config(
        *("--service-discovery", "--prefill-selector", "app=pool", "tier=gpu"),
        *("--decode-selector", "app=decode", "--service-discovery-port", "30000"),
        *("--service-discovery-namespace", "serving"),
    )
    assert isinstance(found, KubernetesDiscovery)
    assert (found.workers, found.prefills) == ((), (("app", "pool"), ("tier", "gpu")))
    assert found.decodes == (("app", "decode"),)
    assert (found.namespace, found.port) == ("serving", 30000)
    assert found.api.url == "https://[fd00::1]:6443"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--service-discovery"], "--selector"),
        (["--selector", "a=b"], "need --service-discovery"),
        (["--service-discovery", "--selector", "a=b", "a=c"], "twice"),
        (["--service-discovery", "--selector", "a=b"], "in a pod of Kubernetes only"),
    ],
)
def test_flags_without_sense(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "only" not in says:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    else:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=says):
        config(*flags)


@pytest.mark.parametrize("label", ["app", "=b", "a=", "app in (a,b)", "a!=b", "a=b,c=d"])
def test_a_selector_is_of_equal_labels(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config("--service-discovery", "--selector", label)
    assert "key=value" in capsys.readouterr().err
