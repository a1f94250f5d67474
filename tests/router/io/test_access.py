"""Who may ask for what: API keys, the control key, and what fronts get to see of either."""

import base64
from pathlib import Path

import pytest
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.access import Asker, Gate, Level, level
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.forwarding import Credentials, to_front
from vertumnus_router.io.keys import ApiKey, read_api_keys

from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running

ALICE, BOB = ApiKey("alice", "sk-alice-1"), ApiKey("bob", "sk-bob-22")
CONTROL = "sk-control"


def scope(
    method: str, path: str, authorization: bytes | None = None, client: str | None = "127.0.0.1"
) -> dict[str, object]:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    where = None if client is None else (client, 4000)
    return {"method": method, "path": path, "headers": headers, "client": where}


def verdict(gate: Gate, *args: object, **more: object) -> Asker | int:
    """Who is let in, or the status of the refusal."""
    try:
        return gate.admit(scope(*args, **more))  # type: ignore[arg-type]
    except ApiError as error:
        return error.status


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/health", Level.OPEN),
        ("GET", "/readiness", Level.OPEN),
        ("GET", "/metrics", Level.OPEN),
        ("HEAD", "/metrics", Level.OPEN),
        ("POST", "/metrics", Level.OPERATOR),
        ("POST", "/generate", Level.DATA),
        ("PUT", "/generate", Level.DATA),
        ("POST", "/v1/chat/completions", Level.DATA),
        ("GET", "/v1/models", Level.DATA),
        ("POST", "/explain", Level.DATA),
        ("GET", "/workers", Level.DATA),
        ("GET", "/workers/abc", Level.DATA),
        ("POST", "/workers", Level.OPERATOR),
        ("DELETE", "/workers/abc", Level.OPERATOR),
        ("GET", "/vertumnus/composition", Level.DATA),
        ("POST", "/vertumnus/reconfigure", Level.OPERATOR),
        ("POST", "/vertumnus/anything", Level.OPERATOR),
        ("GET", "/flush_cache", Level.OPERATOR),
        ("POST", "/flush_cache", Level.OPERATOR),
        ("POST", "/update_weights_from_disk", Level.OPERATOR),
        ("GET", "/abort_request", Level.OPERATOR),
        ("GET", "/healthy", Level.OPERATOR),
        ("GET", "/", Level.OPERATOR),
    ],
)
def test_what_each_path_needs(method: str, path: str, expected: Level) -> None:
    assert level(method, path) is expected


def test_keys_say_who_asks() -> None:
    gate = Gate((ALICE, BOB), CONTROL, "0.0.0.0")
    alice = verdict(gate, "POST", "/generate", b"Bearer sk-alice-1")
    assert alice == Asker("alice", operator=False, max_priority=0)
    bob = verdict(gate, "POST", "/generate", b"bearer  sk-bob-22 ")
    assert isinstance(bob, Asker) and bob.name == "bob"
    operator = Asker("operator", operator=True, limited=False)
    for method, path in (("POST", "/generate"), ("POST", "/flush_cache"), ("GET", "/health")):
        assert verdict(gate, method, path, b"Bearer sk-control") == operator
    assert verdict(gate, "POST", "/flush_cache", b"Bearer sk-alice-1") == 403
    assert isinstance(verdict(gate, "GET", "/health"), Asker)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-alice-",
        b"Bearer sk-alice-11",
        b"Bearer SK-ALICE-1",
        b"Bearer sk-alice-1 sk-bob-22",
        b"Bearer \xff\xfe",
        b"sk-alice-1",
        b"Digest sk-alice-1",
        b"Basic " + base64.b64encode(b"alice:sk-alice-1"),  # only to look at something
    ],
)
def test_without_a_key_nobody_is_served(authorization: bytes | None) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        gate = Gate((ALICE,), CONTROL, host)
        assert verdict(gate, "POST", "/generate", authorization) == 401
        assert verdict(gate, "POST", "/flush_cache", authorization) == 403


def test_a_browser_may_look_but_not_command() -> None:
    gate = Gate((ALICE,), CONTROL, "0.0.0.0")
    for key in (b"sk-alice-1", CONTROL.encode()):
        basic = b"Basic " + base64.b64encode(b"anyone:" + key)
        assert isinstance(verdict(gate, "GET", "/workers", basic), Asker)
        for method in ("GET", "POST"):
            assert verdict(gate, method, "/flush_cache", basic) == 403
        assert verdict(gate, "GET", "/release_memory_occupation", basic) == 403
    assert verdict(gate, "GET", "/workers", b"Basic !!!") == 401


@pytest.mark.parametrize(
    ("host", "client", "key", "operator"),
    [
        ("127.0.0.1", "127.0.0.1", None, True),
        ("localhost", "127.0.0.1", None, True),
        ("::1", "::1", None, True),
        ("127.0.0.1", "127.0.0.1", CONTROL, True),
        ("127.0.0.1", "10.0.0.7", None, False),
        ("127.0.0.1", None, None, False),
        # Behind a proxy on this host everybody seems to be here.
        ("0.0.0.0", "127.0.0.1", None, False),
        ("0.0.0.0", "127.0.0.1", CONTROL, False),
        ("::", "::1", None, False),
        ("10.0.0.1", "10.0.0.1", None, False),
        ("router.example", "127.0.0.1", None, False),
    ],
)
def test_without_any_keys_operators_are_local_to_a_router_that_is(
    host: str, client: str | None, key: str | None, operator: bool
) -> None:
    gate = Gate((), key, host)
    asker = verdict(gate, "POST", "/generate", client=client)
    assert asker == Asker("anonymous", operator=operator)
    status = verdict(gate, "POST", "/flush_cache", client=client)
    assert status == (asker if operator else 403)


def test_a_page_in_a_browser_on_the_host_is_no_operator() -> None:
    gate = Gate((), None, "127.0.0.1")
    page = scope("POST", "/flush_cache")
    page["headers"] = [(b"sec-fetch-site", b"cross-site")]
    with pytest.raises(ApiError, match="is for operators"):
        gate.admit(page)


@pytest.mark.parametrize(
    ("host", "operator"),
    [
        (b"127.0.0.1:30080", True),
        (b"LOCALHOST", True),
        (b"a.localhost:30080", True),
        (b"[::1]:30080", True),
        (b"evil.example:30080", False),
        (b"127.0.0.1.evil.example", False),
        (b"localhost@evil.example", False),
        (b"evil.example@localhost", False),
        (b"[::1", False),
        (b"", False),
        (b"10.0.0.7", False),
    ],
)
def test_a_page_whose_name_leads_here_is_no_operator(host: bytes, operator: bool) -> None:
    """Of a page at http://evil.example browsers say nothing but its host."""
    gate = Gate((), None, "127.0.0.1")
    page = scope("POST", "/flush_cache")
    page["headers"] = [(b"host", host)]
    if operator:
        assert gate.admit(page).operator
        return
    with pytest.raises(ApiError, match="is for operators"):
        gate.admit(page)


def test_keys_are_never_shown() -> None:
    config = RouterConfig(
        pool_urls=("http://a",),
        control_key=CONTROL,
        api_keys=(ALICE, BOB),
        upstream_api_key="sk-upstream",
    )
    for text in (config.describe(), repr(config), str(Credentials(False, "sk-upstream"))):
        assert "sk-" not in text
    assert "api_keys = alice, bob" in config.describe()
    assert "api_keys = (none)" in RouterConfig(pool_urls=("http://a",)).describe()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("alice:sk-alice-1\n\n# comment\n bob : sk-bob-22 \n", None),
        ("sk-alice-1-without-a-name", 1),
        ("alice:short", 1),
        ("alice:sk-alice-1\nanonymous:sk-bob-22", 2),
        ("sk!secret:sk-alice-1", 1),
        ("sk-secret-1:alice", 1),
        ("alice:sk alice 1", 1),
    ],
    ids=range(7),
)
def test_keys_in_a_file(text: str, line: int | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    if line is None:
        assert read_api_keys(path) == [ALICE, BOB]
        return
    with pytest.raises(ConfigError) as refused:
        read_api_keys(path)
    assert f"line {line}: a line has the form name:key" in str(refused.value)
    for secret in ("sk-", "secret", "short"):
        assert secret not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(tmp_path / "none")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((ALICE, ApiKey("eve", ALICE.key)), "alice and eve are the same"),
        ((ALICE, ApiKey("alice", "sk-other-1")), "two API keys have the name alice"),
        ((ApiKey("eve", CONTROL),), "eve is the control key"),
        (tuple(ApiKey(f"k{n}", f"sk-{n:06}") for n in range(1001)), "at most 1000"),
    ],
)
def test_keys_that_cannot_be_told_apart_are_refused(keys: tuple[ApiKey, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterConfig(pool_urls=("http://a",), control_key=CONTROL, api_keys=keys)


def test_who_listens_for_others_without_keys_is_warned() -> None:
    for host, keys, warns in (
        ("0.0.0.0", (), True),
        ("0.0.0.0", (ALICE,), False),
        ("127.0.0.1", (), False),
    ):
        config = RouterConfig(pool_urls=("http://a",), host=host, api_keys=keys)
        assert (config.warning is not None) == warns


def test_keys_over_http_and_what_a_front_sees_of_them() -> None:
    async def scenario() -> None:
        keys = {"api_keys": (ALICE, BOB), "control_key": CONTROL, "upstream_api_key": "sk-up-1234"}
        async with FakePool(1) as pool, running(pool.url, **keys) as it:
            await it.ready()
            async with await it.chat() as response:
                assert response.status == 401
                assert response.headers["www-authenticate"].startswith("Bearer")
                assert (await it.error(response))["code"] == "invalid_api_key"
            for path, status in (("/workers", 401), ("/metrics", 200), ("/health", 200)):
                async with it.client.get(path) as response:
                    assert response.status == status, path
            assert pool.seen == []
            it.client.headers["authorization"] = f"Bearer {ALICE.key}"
            async with await it.chat() as response:
                assert response.status == 200
            assert pool.seen[0].headers["authorization"] == "Bearer sk-up-1234"
            async with it.client.get("/workers") as response:
                assert response.status == 200
            async with it.client.post("/flush_cache") as response:
                assert response.status == 403
            assert pool.commands == []
            it.client.headers["authorization"] = f"Bearer {CONTROL}"
            async with it.client.post("/flush_cache") as response:
                assert response.status == 200
            assert pool.commands == ["/flush_cache"]
            samples = await it.samples()
            assert samples['vertumnus_client_requests_total{client="alice"}'] == 1
            assert samples['vertumnus_refused_total{client="",reason="invalid_api_key"}'] == 2
            assert not any("sk-" in name for name in samples)

    run(scenario())


def test_without_keys_of_its_own_the_router_passes_the_clients_on() -> None:
    given = [(b"authorization", b"Bearer mine"), (b"x-a", b"1")]
    assert to_front(given) == [(b"x-a", b"1"), (b"authorization", b"Bearer mine")]
    with_key = Credentials(passes_on=True, key="sk-up")
    assert to_front(given, with_key)[-1] == (b"authorization", b"Bearer mine")
    assert to_front(given[1:], with_key)[-1] == (b"authorization", b"Bearer sk-up")
    assert to_front(given, Credentials(passes_on=False)) == [(b"x-a", b"1")]


ROUTING = {
    "routed_dp_rank": 0,
    "data_parallel_rank": 0,
    "disagg_prefill_dp_rank": 0,
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "bootstrap_pair_key": "k",
    "decode_tp_size": 1,
}


def test_a_client_cannot_say_where_its_request_runs() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for path, prompt, fields in (
                ("/generate", {"text": "x"}, ROUTING),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ROUTING),
                ("/v1/completions", {"prompt": "x"}, {**ROUTING, "rid": "another's"}),
            ):
                for name, value in fields.items():
                    async with it.client.post(path, json={**prompt, name: value}) as response:
                        assert response.status == 400, (path, name)
                        error = await it.error(response)
                    assert (error["code"], error["param"]) == ("routing_field", name)
                nothing = dict.fromkeys(ROUTING)
                async with it.client.post(path, json={**prompt, **nothing}) as response:
                    assert response.status == 200, path
            assert len(pool.seen) == 3

    run(scenario())
