"""Servers are found in EndpointSlices, and an API server that fails takes none away."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vertumnus_router.clock import WallClock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.discovery.config import ApiServer, KubernetesDiscovery
from vertumnus_router.io.discovery.kubernetes import KubernetesSource
from vertumnus_router.io.discovery.slices import EndpointSlice, urls
from vertumnus_router.io.fleet import Role

from tests.router.io.fake_fleet import FakeFleet
from tests.router.io.fake_kubernetes import FakeKubernetes, Slice, endpoints, pod, status
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running, until

SELECTOR = (("app", "pool"), ("tier", "gpu"))
A, B, C = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000"

# -- from slices to URLs ---------------------------------------------------------------------------


def found(*slices: Slice, port: int | None = None) -> set[str]:
    return urls([msgspec.convert(one, EndpointSlice) for one in slices], port)


def test_endpoints_that_take_requests() -> None:
    pods = (
        pod("10.0.0.1"),
        pod("10.0.0.2", ready=False),
        pod("10.0.0.3", ready=True, terminating=True),  # publishNotReadyAddresses
        {"addresses": ["10.0.0.4"]},  # unknown is ready
        {"addresses": ["10.0.0.5"], "conditions": {}},
    )
    one = endpoints("a", *pods)
    assert found(one) == {f"http://10.0.0.{n}:30000" for n in (1, 4, 5)}
    assert found(one, endpoints("b", pod("10.0.0.1"))) == found(one), "in two slices at once"
    assert found(endpoints("none")) == set()


def test_the_port() -> None:
    two = [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}]
    assert found(endpoints("a", pod("10.0.0.1"), ports=two)) == {"http://10.0.0.1:8000"}
    assert found(endpoints("a", pod("10.0.0.1"), ports=two), port=7) == {"http://10.0.0.1:7"}
    for ports in (two[:1] * 2, [], None, [{"name": "x"}]):
        assert found(endpoints("a", pod("10.0.0.1"), ports=ports)) == set()


def test_a_pod_with_two_addresses_is_one_server() -> None:
    four = endpoints("a", pod("10.0.0.1", "p1"))
    six = endpoints("b", pod("fd00::1", "p1"), pod("fd00::2", "p2"), addressType="IPv6")
    expected = {A, "http://[fd00::2]:30000"}
    assert found(four, six) == found(six, four) == expected


# -- lists and watches -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def following(
    api: FakeKubernetes, **more: Any
) -> AsyncIterator[tuple[KubernetesSource, FakeFleet]]:
    fleet = FakeFleet()
    config = KubernetesDiscovery(ApiServer(api.url, **more), SELECTOR, namespace="serving")
    source = KubernetesSource(config, SELECTOR, Role.WORKER, fleet, WallClock(), random.Random(0))
    task = asyncio.create_task(source.run())
    try:
        yield source, fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has(fleet: FakeFleet, *expected: str) -> None:
    await until(lambda: set(fleet.members) == set(expected), f"{expected}, not {fleet.log}")


def test_lists_watches_and_what_it_asks(tmp_path: Path) -> None:
    async def scenario() -> None:
        token = tmp_path / "token"
        token.write_text("first\n")
        async with (
            FakeKubernetes(endpoints("a", pod("10.0.0.1"))) as api,
            following(api, token=token) as (source, fleet),
        ):
            await has(fleet, A)
            await until(lambda: api.watches, "watched")
            assert source.trouble is None
            token.write_text("second\n")  # as Kubernetes does every hour
            api.send("BOOKMARK", {"metadata": {"resourceVersion": "1001"}})
            api.send("ADDED", endpoints("b", pod("10.0.0.2")))
            await has(fleet, A, B)
            assert api.lists == 1
            api.slices = [endpoints("b", pod("10.0.0.2"))]
            api.send("DELETED", endpoints("a", pod("10.0.0.1")))
            await has(fleet, B)
            await until(lambda: api.watches == 2, "watched again")
        listed, watched, again, *_ = api.queries
        assert set(api.paths) == {"/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"}
        assert listed["labelSelector"] == watched["labelSelector"] == "app=pool,tier=gpu"
        assert watched["resourceVersion"] == "1000"
        assert "watch" not in again
        assert api.tokens[0] == "Bearer first" and api.tokens[2] == "Bearer second"

    run(scenario())


def test_long_lists_come_in_pages() -> None:
    async def scenario() -> None:
        slices = [endpoints(str(n), pod(f"10.0.0.{n}")) for n in range(1, 8)]
        async with FakeKubernetes(*slices) as api:
            api.page_size = 3
            async with following(api) as (_, fleet):
                await until(lambda: api.watches, "watched")
                assert set(fleet.members) == {f"http://10.0.0.{n}:30000" for n in range(1, 8)}

    run(scenario())


def test_what_an_event_takes_away_is_listed_first() -> None:
    """An endpoint that moves from one slice to another does not leave."""

    async def scenario() -> None:
        a, b = pod("10.0.0.1"), pod("10.0.0.2")
        async with (
            FakeKubernetes(endpoints("a", a, b)) as api,
            following(api) as (_, fleet),
        ):
            await until(lambda: api.watches, "watched")
            api.slices = [endpoints("a", a), endpoints("b", b)]
            api.send("MODIFIED", endpoints("a", a))
            await until(lambda: api.watches == 2, "listed again")
            assert fleet.log == [f"+{A}", f"+{B}"]
            # One that ends or is not ready does, once the list has it so.
            api.slices = [endpoints("a", a), endpoints("b", pod("10.0.0.2", ready=False))]
            api.send("MODIFIED", api.slices[1])
            await has(fleet, A)

    run(scenario())


@pytest.mark.parametrize("how", ["status", "event", "broken line", "cut line", "disconnect", "end"])
def test_a_watch_that_ends_is_followed_by_a_list(how: str) -> None:
    async def scenario() -> None:
        async with FakeKubernetes(endpoints("a", pod("10.0.0.1"))) as api:
            if how == "status":
                api.refuse_watch = 410
            async with following(api) as (_, fleet):
                await has(fleet, A)
                if how == "status":
                    await until(lambda: api.lists > 1, "listed again")
                    api.refuse_watch = None
                await until(lambda: api.watches, "watched")
                lists = api.lists
                # What happens meanwhile is not told by any event.
                api.slices = [endpoints("a", pod("10.0.0.2"))]
                match how:
                    case "event":
                        api.send("ERROR", status(410))
                    case "broken line":
                        api.send_bytes(b"<html>\n")
                    case "cut line":
                        api.send_bytes(b'{"type": "ADDED", "obj')
                        api.disconnect()
                    case "disconnect" | "status":
                        api.disconnect()
                    case "end":
                        api.send("DELETED", endpoints("a", pod("10.0.0.1")))
                await has(fleet, B)
                assert api.lists > lists

    run(scenario())


def test_an_api_server_that_is_away_takes_nobody_away() -> None:
    async def scenario() -> None:
        async with (
            FakeKubernetes(endpoints("a", pod("10.0.0.1"))) as api,
            following(api) as (source, fleet),
        ):
            await until(lambda: api.watches, "watched")
            await api.stop()
            await until(lambda: source.trouble, "it is missed")
            api.refuse = 500
            await api.start()
            await until(lambda: "500" in str(source.trouble), "it refuses")
            assert fleet.log == [f"+{A}"]
            api.slices.append(endpoints("b", pod("10.0.0.2")))
            api.refuse = None
            await has(fleet, A, B)
            assert source.trouble is None

    run(scenario())


def test_no_endpoints_at_all_are_not_believed_at_once() -> None:
    async def scenario() -> None:
        async with (
            FakeKubernetes(endpoints("a", pod("10.0.0.1"))) as api,
            following(api) as (source, fleet),
        ):
            await until(lambda: api.watches, "watched")
            api.slices = []
            api.send("DELETED", endpoints("a", pod("10.0.0.1")))
            await until(lambda: api.watches == 2, "listed again")
            assert fleet.members and source.following[0].holds
            api.slices = [endpoints("a", pod("10.0.0.2"))]
            api.send("ADDED", api.slices[0])
            await has(fleet, B)
            assert not source.following[0].holds

    run(scenario())


def test_without_permission_it_says_what_to_allow() -> None:
    async def scenario() -> None:
        async with FakeKubernetes() as api:
            api.refuse = 403
            async with following(api) as (source, _):
                await until(lambda: "rbac.yaml" in str(source.trouble), "says so")
                assert "list and watch endpointslices" in str(source.trouble)

    run(scenario())


def test_an_ambiguous_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        ports = [{"name": "a", "port": 1}, {"name": "b", "port": 2}]
        async with (
            FakeKubernetes(endpoints("a", pod("10.0.0.1"), ports=ports)) as api,
            following(api) as (_, fleet),
        ):
            await until(lambda: api.watches, "watched")
            assert not fleet.members
        assert "serving/a" in caplog.text and "--service-discovery-port" in caplog.text

    run(scenario())


def test_the_api_server_is_known_by_its_certificate(tmp_path: Path) -> None:
    files = tmp_path / "c.pem", tmp_path / "k.pem"
    for path, content in zip(files, (CERTIFICATE, KEY), strict=True):
        path.write_text(content)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*files)

    async def scenario() -> None:
        async with FakeKubernetes(endpoints("a", pod("10.0.0.1")), tls=tls) as api:
            async with following(api, ca=files[0]) as (_, fleet):
                await has(fleet, A)
            async with following(api) as (source, fleet):
                await until(lambda: "ertificate" in str(source.trouble), "refused")
                assert not fleet.members

    run(scenario())


# -- in the router ---------------------------------------------------------------------------------


def test_a_router_serves_with_the_pools_that_a_service_has() -> None:
    async def scenario() -> None:
        old, new = FakePool(1, pool_id="old"), FakePool(1, pool_id="new")

        def service(pool: FakePool, uid: str) -> Slice:
            ports = [{"name": "http", "port": int(pool.url.rpartition(":")[2])}]
            return endpoints("a", pod("127.0.0.1", uid), ports=ports)

        async with old, new, FakeKubernetes(service(old, "1")) as api:
            config = KubernetesDiscovery(ApiServer(api.url), SELECTOR)
            async with running(discovery=(config,)) as it:
                await it.ready()
                assert api.paths[0] == "/apis/discovery.k8s.io/v1/endpointslices"

                async def served_by() -> str:
                    async with await it.chat(max_tokens=2) as answer:
                        assert answer.status == 200
                        return answer.headers["x-vertumnus-worker"].partition("/")[0]

                assert await served_by() == "old"
                await until(lambda: api.watches, "watched")
                api.slices = [service(new, "2")]
                api.send("MODIFIED", api.slices[0])
                await until(
                    lambda: [one.url for one in it.router.pools] == [new.url], "the new one is in"
                )
                await it.ready()
                assert await served_by() == "new"
                samples = await it.samples()
                where = '{source="services with app=pool,tier=gpu"}'
                assert samples[f"vertumnus_discovery_up{where}"] == 1
                assert samples[f"vertumnus_discovery_servers{where}"] == 1

    run(scenario())


def test_readiness_says_why_nothing_is_found() -> None:
    async def scenario() -> None:
        async with FakeKubernetes() as api:
            api.refuse = 403
            config = KubernetesDiscovery(ApiServer(api.url), SELECTOR)
            async with running(discovery=(config,)) as it:
                await until(lambda: "403" in str(it.router.not_ready()), "says so")

    run(scenario())


def test_a_configuration_without_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="--selector"):
        KubernetesDiscovery(ApiServer("http://a"), ())
    with pytest.raises(ConfigError, match="--service-discovery-port 0"):
        KubernetesDiscovery(ApiServer("http://a"), SELECTOR, port=0)


#: Of nobody, for 127.0.0.1.
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgw6T6vBPMwYpb24Nl
OT0y+XZ9oqhulGirUqgBskBHpA2hRANCAAQnks6a206xRq+sdGwKQPMlp6u9IiOB
jr2kQFiMlHBntrEsL0DAJySGAHSSjIAkp/nQIXhR0NmlJrxaATUwONqO
-----END PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBcTCCARegAwIBAgIBATAKBggqhkjOPQQDAjAOMQwwCgYDVQQDDANhcGkwIBcN
MjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMA4xDDAKBgNVBAMMA2FwaTBZ
MBMGByqGSM49AgEGCCqGSM49AwEHA0IABCeSzprbTrFGr6x0bApA8yWnq70iI4GO
vaRAWIyUcGe2sSwvQMAnJIYAdJKMgCSn+dAheFHQ2aUmvFoBNTA42o6jZDBiMA8G
A1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFPW7vArNAtYnkxpTHXMbX0VD4YhpMB8G
A1UdIwQYMBaAFPW7vArNAtYnkxpTHXMbX0VD4YhpMA8GA1UdEQQIMAaHBH8AAAEw
CgYIKoZIzj0EAwIDSAAwRQIgMVDMNQp2qRdshpiPuVb6hLyl4HcWTZ1t2pLCdOA7
+fYCIQCS2Jt19zZcDx99Vp+Reu/pvSf2RaSDFCa6Xn85dXgp1A==
-----END CERTIFICATE-----
"""
