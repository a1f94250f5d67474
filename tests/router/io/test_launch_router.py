"""``launch_router`` as a process: what it imports, prints, refuses, and how it stops."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_router.core.admission import AdmissionConfig
from vertumnus_router.core.config import BackoffConfig, BreakerConfig, PolicyConfig, PrefixConfig
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.observe.settings import ObserveConfig, TtftTargets
from vertumnus_router.io.tls import TlsConfig

from sgl_vertumnus import launch_router, launch_server
from tests.router.io.fake_pool import FakePool, stream_slowly
from tests.router.io.harness import run, until

COMMAND = [sys.executable, "-m", "sgl_vertumnus.launch_router"]
HEAVY = ("torch", "sglang", "transformers", "numpy")


def test_it_imports_nothing_of_the_engine() -> None:
    code = f"""
import sys
from sgl_vertumnus import launch_router
from vertumnus_router.clock import WallClock
from vertumnus_router.io.admin import build_app
from vertumnus_router.io.router import Router
import vertumnus_router.io.server
options = launch_router._parser().parse_args(["--pool-urls", "http://127.0.0.1:1"])
build_app(Router(launch_router.router_config(options), WallClock()))
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ([], 2, "--pool-urls"),
        (["--pool-urls", "localhost:30000"], 2, "not an http:// or https:// URL"),
        (["--pool-urls", "http://me:secret@a"], 2, "with a user name or a password"),
        (["--pool-urls", ","], 2, "name at least one pool"),
        (["--pool-urls", "http://a,http://a/"], 2, "named twice"),
        (["--pool-urls", "http://a", "--decode", "b:1"], 2, "decode_urls: 'b:1' is not an http"),
        (
            ["--pool-urls", "http://a", "--decode", "http://b", "--decode", "http://b/"],
            2,
            "a decode server is named twice",
        ),
        (["--pool-urls", "http://a", "--beta", "0"], 2, "beta 0.0: must be above 0"),
        (["--pool-urls", "http://a", "--port", "70000"], 2, "port 70000"),
        (["--pool-urls", "http://a", "--policy", "random"], 2, "paper"),
        (["--pool-urls", "http://a", "--policy", "cache_aware"], 2, "leave --policy out"),
        (["--worker-urls", "http://a", "--pd-disaggregation"], 2, "with --decode URL"),
        (["--prefill", "http://a", "9x"], 2, "a URL and its bootstrap port, or none"),
        (["--worker-urls", "http://a", "--pool-urls", "http://a"], 2, "a server is named twice"),
        (["--pool-urls", "http://a", "--controller", "auto"], 2, "observe"),
        (["--pool-urls", "http://a", "--controller-window-s", "0"], 2, "controller.window_s 0.0"),
        (["--pool-urls", "http://a", "--max-body-bytes", "0"], 2, "body_bytes"),
        (["--pool-urls", "http://a", "--api-key", "short"], 2, "API key key-1: a key has 8"),
        (["--pool-urls", "http://a", "--upstream-ca-file", "/no/such"], 1, "no CA certificates"),
        (["--pool-urls", "http://a", "--profile", "/no/such.json"], 1, "no profile"),
        (["--pool-urls", "http://a", "--request-log", "/no/such"], 1, "'/no/such'"),
        (["--pool-urls", "http://a", "--host", "192.0.2.1", "--port", "0"], 1, "cannot listen"),
    ],
)
def test_it_refuses_what_cannot_work(flags: list[str], status: int, says: str) -> None:
    result = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_its_defaults_are_those_of_the_configuration() -> None:
    options = launch_router._parser().parse_args(["--pool-urls", "http://a"])
    policy = PolicyConfig(expected_manifest=manifest(ALL_PATCHES))
    expected = RouterConfig(pool_urls=("http://a",), policy=policy)
    assert launch_router.router_config(options) == expected


def test_servers_are_named_as_for_sglang_router() -> None:
    flags = "--worker-urls http://a:1 http://b:1 --pd-disaggregation --prefill http://c:1 9000"
    flags += " --prefill http://d:1 none --prefill http://e:1 --decode http://f:1"
    flags += " --prometheus-port 29000 --max-payload-size 1000"
    config = launch_router.router_config(launch_router._parser().parse_args(flags.split()))
    assert config.worker_urls == ("http://a:1", "http://b:1")
    assert config.prefill_urls == (
        ("http://c:1", 9000),
        ("http://d:1", None),
        ("http://e:1", None),
    )
    assert config.decode_urls == ("http://f:1",)
    assert config.prometheus == ("127.0.0.1", 29000)
    assert config.limits.body_bytes == 1000


@pytest.mark.parametrize("flags", [["--worker-urls"], ["--discovery-file", "servers"]])
def test_it_may_start_without_a_server(flags: list[str]) -> None:
    options = launch_router._parser().parse_args(flags)
    assert launch_router.router_config(options).worker_urls == ()


def test_a_pool_passes_its_decode_servers_on_to_its_router() -> None:
    decodes = ["--decode", "http://a:1", "--decode", "http://b:2"]
    flags = ["--model-path", "m", "--pool-size", "2", *decodes]
    options, passed = launch_server._parse(flags)
    assert passed == []
    router_flags = launch_server._router_flags(options, passed)
    assert router_flags is not None
    there = launch_router._parser().parse_args(["--pool-urls", "http://p", *router_flags])
    assert launch_router.router_config(there).decode_urls == ("http://a:1", "http://b:2")


def test_a_pool_passes_the_prefix_managers_flags_on_to_its_router() -> None:
    prefix = ["--prefix-manager", "on", "--pull", "--index-mib", "64", "--prefix-scan-s", "5"]
    prefix += ["--theta-inter-s", "2", "--theta-intra", "9", "--theta-reclaim", "0.25"]
    prefix += ["--prefix-decay", "0.75", "--prefix-per-scan", "3", "--copy-timeout-s", "12"]
    options, passed = launch_server._parse(["--model-path", "m", "--pool-size", "2", *prefix])
    assert passed == []
    router_flags = launch_server._router_flags(options, passed)
    assert router_flags is not None
    there = launch_router._parser().parse_args(["--pool-urls", "http://p", *router_flags])
    policy = launch_router.router_config(there).policy
    assert policy.index_mib == 64
    assert policy.prefix == PrefixConfig(
        mode="on",
        pull=True,
        scan_s=5,
        theta_inter_s=2,
        theta_intra=9,
        theta_reclaim=0.25,
        decay=0.75,
        per_scan=3,
        timeout_s=12,
    )


def test_a_pool_passes_the_guards_flags_on_to_its_router(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("alice:sk-alice-1\n")
    guard = [
        "--api-key",
        "sk-first-key",
        "--api-key",
        "sk-second-key",
        "--api-keys-file",
        str(keys),
    ]
    guard += ["--api-keys-file", str(keys), "--upstream-api-key", "sk-up"]
    guard += ["--ssl-certfile", "c", "--ssl-keyfile", "k", "--upstream-keyfile", "uk"]
    guard += [
        "--ssl-keyfile-password",
        "p",
        "--upstream-ca-file",
        "ca",
        "--upstream-certfile",
        "uc",
    ]
    guard += ["--upstream-certfile", "uc", "--rate-limit-requests", "60", "--reject-late"]
    guard += ["--rate-limit-tokens", "1000", "--max-waiting-per-key", "5"]
    options, passed = launch_server._parse(["--model-path", "m", "--pool-size", "2", *guard])
    assert passed == []
    router_flags = launch_server._router_flags(options, passed)
    assert router_flags is not None
    there = launch_router._parser().parse_args(["--pool-urls", "http://p", *router_flags])
    config = launch_router.router_config(there)
    assert [key.name for key in config.api_keys] == ["key-1", "key-2", "alice"]
    assert [key.key for key in config.api_keys] == ["sk-first-key", "sk-second-key", "sk-alice-1"]
    assert config.upstream_api_key == "sk-up"
    assert config.tls == TlsConfig(
        *(Path(name) for name in ("c", "k")), "p", *(Path(name) for name in ("ca", "uc", "uk"))
    )
    assert config.admission == AdmissionConfig(60, 1000, 5, reject_late=True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--api-key", "sk-first-key", "--no-router"], "--api-key is for the router"),
        (["--api-key", "short"], "API key key-1: a key has 8"),
        (["--api-keys-file", "/no/such"], "cannot be read"),
        (["--ssl-certfile", "/no/such"], "--ssl-certfile and --ssl-keyfile go together"),
        (["--ssl-certfile", "/no/such", "--ssl-keyfile", "/no/such"], "are no certificate"),
        (["--upstream-ca-file", "/no/such"], "holds no CA certificates"),
        (["--rate-limit-requests", "0"], "requests_per_minute 0.0: must be 1 or more"),
    ],
)
def test_a_pool_refuses_what_its_router_would(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ["--model-path", "m", "--pool-size", "2", "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        launch_server.main([*pool, *flags])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["http://b:1", "b", "b:x", ":4317", "b:1/v1/traces", ""])
def test_a_collector_is_a_host_and_a_port(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        launch_router.main(["--pool-urls", "http://a", "--otlp-traces-endpoint", endpoint])
    assert stop.value.code == 2
    assert "give HOST:PORT, such as localhost:4317" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("traces", "endpoint"),
    [
        ([], None),
        (["--otlp-traces-endpoint", "c:1"], None),
        (["--enable-trace"], "localhost:4317"),
        (["--enable-trace", "--otlp-traces-endpoint", "c:1"], "c:1"),
    ],
)
def test_the_router_of_a_pool_observes_as_the_pool_was_told(
    traces: list[str], endpoint: str | None
) -> None:
    observe = ["--slo-ttft-s", "0.5,2,5", "--request-log", "-"]
    flags = ["--model-path", "m", "--pool-size", "2", *observe, *traces]
    options, passed = launch_server._parse(flags)
    assert passed == traces, "SGLang gets them too"
    router_flags = launch_server._router_flags(options, passed)
    assert router_flags is not None
    there = launch_router._parser().parse_args(["--pool-urls", "http://p", *router_flags])
    expected = ObserveConfig("-", endpoint, TtftTargets(0.5, 2, 5))
    assert launch_router.router_config(there).observe == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--slo-ttft-s", "1,2"], "give three times such as 1,5,10"),
        (["--slo-ttft-s", "5,1,9"], "that do not fall"),
        (["--prefix-manager", "auto"], "invalid choice: 'auto'"),
        (["--index-mib", "0"], "index_mib 0.0: must be"),
        (["--theta-reclaim", "9"], "theta_reclaim 9.0: must be below theta_intra 8.0"),
        (["--prefix-decay", "1"], "prefix.decay 1.0: must lie between 0 and 1"),
        (["--prefix-scan-s", "nan"], "prefix.scan_s nan: must be above 0"),
    ],
)
def test_both_launchers_refuse_settings_of_the_router_that_cannot_work(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ["--model-path", "m", "--pool-size", "2", "--device", "cpu"]
    for main, others in (
        (launch_router.main, ["--pool-urls", "http://a"]),
        (launch_server.main, pool),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*others, *flags])
        assert stop.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--decode", "http://a", "--no-router"], "--no-router starts none"),
        (["--decode", "a:1"], "not an http:// or https:// URL"),
    ],
)
def test_a_pool_refuses_decode_servers_that_its_router_could_not_use(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        launch_server.main(["--model-path", "m", "--pool-size", "2", "--device", "cpu", *flags])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_help_names_every_group() -> None:
    result = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for word in (
        "--pool-urls",
        "--policy",
        "--beta",
        "--lam",
        "--profile",
        "--port",
        "--pull",
        "limits:",
    ):
        assert word in result.stdout


def in_front_of(pool: FakePool) -> tuple[str, ...]:
    return "--pool-urls", pool.url, "--expected-manifest", pool.description.manifest


class Launched:
    """The command as a child process; killed at the end if it still runs."""

    def __init__(self, *flags: str, ready_file: Path) -> None:
        self.ready_file = ready_file
        self._flags = flags

    async def __aenter__(self) -> "Launched":
        self.process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *self._flags,
            "--port",
            "0",
            "--ready-file",
            str(self.ready_file),
            stdout=asyncio.subprocess.PIPE,
        )
        await until(self.ready_file.exists, "the router listens", limit_s=15)
        await until(self.ready_file.read_text, "the file is written")
        self.url: str = json.loads(self.ready_file.read_text())["url"]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def output(self) -> str:
        out, _ = await self.process.communicate()
        return out.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_announces_serves_and_stops_with_0(number: signal.Signals, tmp_path: Path) -> None:
    import aiohttp

    async def scenario() -> None:
        async with FakePool(1) as pool:
            flags = (*in_front_of(pool), "--control-key", "secret", "--stop-timeout-s", "5")
            async with (
                Launched(*flags, ready_file=tmp_path / "ready") as it,
                aiohttp.ClientSession(it.url) as client,
            ):

                async def ready() -> bool:
                    async with client.get("/readiness") as response:
                        return response.status == 200

                while not await ready():
                    await asyncio.sleep(0.02)
                pool.answer = stream_slowly(tokens=20, gap_s=0.02)
                body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
                async with client.post(
                    "/v1/chat/completions", json={**body, "stream": True}
                ) as response:
                    await response.content.readany()
                    it.process.send_signal(number)
                    assert (await response.read()).endswith(b"[DONE]\n\n"), "the stream may end"
                output = await it.output()
                assert it.process.returncode == 0
        assert f"router listening on {it.url}" in output
        assert "policy.beta = 3.0" in output
        assert "secret" not in output

    run(scenario())


def test_a_second_signal_cuts_what_still_runs(tmp_path: Path) -> None:
    import aiohttp

    async def scenario() -> None:
        async with FakePool(1) as pool:
            flags = (*in_front_of(pool), "--stop-timeout-s", "600")
            async with (
                Launched(*flags, ready_file=tmp_path / "ready") as it,
                aiohttp.ClientSession(it.url) as client,
            ):

                async def answers(path: str) -> int | None:
                    try:
                        async with client.get(path) as response:
                            return response.status
                    except aiohttp.ClientConnectorError:
                        return None

                while await answers("/readiness") != 200:
                    await asyncio.sleep(0.02)
                pool.answer = stream_slowly(tokens=100_000, gap_s=0.05)
                body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                async with client.post("/v1/chat/completions", json=body) as response:
                    await response.content.readany()
                    it.process.send_signal(signal.SIGTERM)
                    while await answers("/readiness") is not None:  # 503 first, then refused
                        await asyncio.sleep(0.02)
                    assert await response.content.readany(), "the stream goes on"
                    it.process.send_signal(signal.SIGTERM)
                    assert await it.process.wait() == 0
                    with pytest.raises(aiohttp.ClientError):
                        await response.read()
            await until(lambda: not pool.running, "the engine has nothing to do any more")

    run(scenario())


def test_the_flags_of_sglang_router_mean_what_they_mean_there() -> None:
    given = {
        "--retry-max-retries": "7",
        "--retry-initial-backoff-ms": "20",
        "--retry-max-backoff-ms": "4000",
        "--retry-backoff-multiplier": "3",
        "--retry-jitter-factor": "0.5",
        "--cb-failure-threshold": "4",
        "--cb-success-threshold": "2",
        "--cb-timeout-duration-secs": "9",
        "--cb-window-duration-secs": "8",
        "--health-check-interval-secs": "11",
        "--health-check-timeout-secs": "12",
        "--health-failure-threshold": "13",
        "--request-timeout-secs": "14",
        "--stream-idle-timeout-secs": "inf",
        "--client-idle-timeout-secs": "15",
        "--retry-budget": "0.5",
    }
    flags = [word for pair in given.items() for word in pair]
    options = launch_router._parser().parse_args(["--pool-urls", "http://a", *flags])
    config = launch_router.router_config(options)
    assert (config.policy.attempts, config.policy.retry_budget) == (7, 0.5)
    assert config.policy.backoff == BackoffConfig(0.02, 4.0, 3.0, 0.5)
    assert config.policy.breaker == BreakerConfig(True, 4, 2, 9.0, 8.0)
    limits = config.limits
    assert (limits.probe_s, limits.probe_timeout_s, limits.missed_probes) == (11, 12, 13)
    waits = (limits.answer_s, limits.stream_idle_s, limits.client_idle_s)
    assert waits == (14, float("inf"), 15)
    off = ["--pool-urls", "http://a", "--disable-retries", "--disable-circuit-breaker"]
    config = launch_router.router_config(launch_router._parser().parse_args(off))
    assert config.policy.attempts == 1
    assert not config.policy.breaker.enabled


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--disable-health-check"], "has no meaning here, leave it out: a server that is not"),
        (["--health-check-endpoint", "/health"], "pools are asked for /vertumnus/pool"),
        (["--health-success-threshold", "2"], "see --cb-success-threshold"),
        (["--retry-max-retries", "0"], "attempts 0: must be 1 or more"),
        (["--retry-backoff-multiplier", "0.5"], "backoff.multiplier 0.5: must be 1 or more"),
        (["--retry-jitter-factor", "2"], "backoff.jitter 2.0: must lie between 0 and 1"),
        (["--cb-failure-threshold", "0"], "breaker.failure_threshold 0: must be 1 or more"),
        (["--health-check-interval-secs", "0"], "limits.probe_s 0.0: must be above 0"),
        (["--stream-idle-timeout-secs", "nan"], "limits.stream_idle_s nan: must be above 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        launch_router.main(["--pool-urls", "http://a", *flags])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_an_idle_router_costs_next_to_nothing(tmp_path: Path) -> None:
    """CPU of the whole process over three idle seconds with a pool of four reporting ranks."""

    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def scenario() -> None:
        async with FakePool(4, beat_s=1.0) as pool:
            flags = in_front_of(pool)
            async with Launched(*flags, ready_file=tmp_path / "ready") as it:
                await asyncio.sleep(1.5)
                before = cpu_s(it.process.pid)
                await asyncio.sleep(3.0)
                share = (cpu_s(it.process.pid) - before) / 3.0
                assert share <= 0.02, f"{share:.1%} of a core"

    run(scenario())
