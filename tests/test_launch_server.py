"""The command line of a pool, up to the moment at which something would start."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.profiles import DEFAULT

from sgl_vertumnus import launch_server
from sgl_vertumnus.environment import POOL_VARIABLE, pool_config
from sgl_vertumnus.errors import ConfigurationError, PoolStartError, UnsupportedFeature
from sgl_vertumnus.ports import FIRST, LAST

BASE = ["--model-path", "model", "--pool-size", "4"]
DECODE = ["--decode", "http://127.0.0.1:31000"]
PREFILL = ["--device", "cpu", "--disaggregation-mode", "prefill", *DECODE]


class Started:
    """What ``serve`` was called with; nothing is started."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[str], Any]] = []
        self.error: Exception | None = None

    def serve(self, config: Any, flags: list[str], *, router_flags: Any) -> None:
        self.calls.append((config, list(flags), router_flags))
        if self.error is not None:
            raise self.error


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    pytest.importorskip("torch", reason="needs torch")
    from sgl_vertumnus.worker import launch

    environment = dict(os.environ)
    fake = Started()
    monkeypatch.setattr(launch, "serve", fake.serve)
    yield fake
    os.environ.clear()
    os.environ.update(environment)


def exit_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as stop:
        launch_server.main(flags)
    return stop.value.code, capsys.readouterr().err


# -- what it says ---------------------------------------------------------------------------------


def test_help_lists_our_flags_and_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        launch_server.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--model-path",
        "--pool-size",
        "--cp-degrees",
        "--composition",
        "--history",
        "--pool-id",
        "--host",
        "--router-port",
        "--no-router",
        "--policy",
        "--profile",
        "--controller",
        "--long-tokens",
    ):
        assert flag in text
    assert "every other flag goes to SGLang unchanged" in text and "sglang serve --help" in text


def test_help_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sgl_vertumnus.launch_server import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'torch', 'sglang'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


# -- usage errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model-path"),
        (["--model-path", "m"], "--pool-size"),
        ([*BASE, "--pool-size", "many"], "--pool-size"),
        ([*BASE, "--pool-size", "0"], "at least two ranks"),
        ([*BASE, "--cp-degrees", "1;2"], "is not a list such as 1,2,4"),
        ([*BASE, "--cp-degrees", "1,3"], "power of two"),
        ([*BASE, "--cp-degrees", "1,8"], "raise --pool-size or drop the degree"),
        ([*BASE, "--composition", "2x3"], "not among --cp-degrees"),
        ([*BASE, "--composition", "1x1,1x2,1x1"], "write larger degrees first"),
        ([*BASE, "--composition", "2x1"], "uses 2 rank(s), the pool has 4"),
        ([*BASE, "--host", "localhost"], "give an IPv4 address"),
        ([*BASE, "--host", "192.0.2.1"], "no address of this machine"),
        ([*BASE, "--policy", "best"], "paper"),
        ([*BASE, "--router-port", "http"], "--router-port"),
        ([*BASE, "--controller", "auto"], "observe"),
        ([*BASE, "--controller-window-s", "0"], "controller.window_s 0.0: must be above 0"),
        ([*BASE, "--controller-lower", "0.7"], "leave no band"),
        ([*BASE, "--profile", "/no/such/profile.json"], "nor one of qwen3-30b-a3b-h20, smollm2"),
        ([*BASE, "--profile", __file__], "not a profile"),
        (["--model-path", "m", "--pool-size", "64", "--cp-degrees", "1,64"], "--profile"),
    ],
)
def test_usage_errors_exit_2_before_anything_starts(
    started: Started, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, text = exit_of(capsys, *flags)
    assert code == 2
    assert message in text and "Traceback" not in text
    assert started.calls == [] and POOL_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UnsupportedFeature(["--tp-size 2: why", "--pp-size 2: why"]), 2, "  - --pp-size 2: why"),
        (ConfigurationError("do this"), 2, "launch_server: do this"),
        (PoolStartError("rank 1 exited"), 1, "the pool stopped: rank 1 exited"),
    ],
)
def test_refusals_and_failures_are_told_apart(
    started: Started,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
) -> None:
    started.error = error
    found, text = exit_of(capsys, *BASE)
    text += found if isinstance(found, str) else ""  # the interpreter prints it and exits 1
    assert (1 if isinstance(found, str) else found) == code
    assert message in text


def test_a_flag_that_cannot_work_is_refused_by_the_command_itself() -> None:
    """All the way through SGLang's parser; no process, port or file is left behind."""
    pytest.importorskip("sglang", reason="needs sglang")
    command = [sys.executable, "-m", "sgl_vertumnus.launch_server", *BASE, "--no-router"]
    done = subprocess.run(
        [*command, "--tp", "2", "--enable-hierarchical-cache", "--device", "cpu"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "--tp-size 2: a rank is one full copy of the model" in done.stderr
    assert "--enable-hierarchical-cache: HiCache" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launch_without_the_plugin_stops() -> None:
    pytest.importorskip("sglang", reason="needs sglang")
    command = [sys.executable, "-m", "sgl_vertumnus.launch_server", *BASE, "--device", "cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "SGLANG_PLUGINS": "other"}
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "did not load the plugin 'vertumnus'" in done.stderr
    assert "SGLANG_PLUGINS" in done.stderr


# -- what is started ------------------------------------------------------------------------------


def test_other_flags_go_to_sglang_unchanged(started: Started) -> None:
    rest = ["--page-size", "32", "--enable-metrics", "--json-model-override-args", '{"a": 1}']
    launch_server.main([*BASE, "--device=cpu", "--no-router", *rest])
    ((config, flags, router_flags),) = started.calls
    given = ["--model-path", "model", "--host", "127.0.0.1", "--device=cpu"]
    assert flags == given + rest
    assert router_flags is None
    assert (config.size, config.degrees, config.composition) == (4, (1, 2), "4x1")
    assert config.device == "cpu"


def test_children_find_the_configuration(started: Started) -> None:
    launch_server.main(
        [
            *BASE,
            *("--device", "cpu", "--pool-id", "mine"),
            *("--cp-degrees", "4,2,1", "--composition", "2x1,1x2"),
        ]
    )
    ((config, _, _),) = started.calls
    assert pool_config() == config
    assert (config.pool_id, config.degrees, config.composition) == ("mine", (1, 2, 4), "2x1,1x2")


def test_the_router_stands_where_it_was_told_to(started: Started, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes((files("vertumnus_router.profiles") / f"{DEFAULT}.json").read_bytes())
    launch_server.main(
        [
            *BASE,
            *("--device", "cpu", "--router-port", "31999", "--policy", "late"),
            *("--profile", str(profile)),
            *("--controller", "on", "--controller-window-s", "2.5", "--controller-upper", "0.8"),
            *("--controller-lower", "0.3", "--long-tokens", "1000"),
        ]
    )
    ((_, _, flags),) = started.calls
    assert flags is not None
    from sgl_vertumnus.launch_router import _parser, router_config

    options = _parser().parse_args(["--pool-urls", "http://127.0.0.1:1", *flags])
    assert (options.host, options.port, options.policy) == ("127.0.0.1", 31999, "late")
    assert options.profile == str(profile)
    assert router_config(options).policy.controller == ControllerConfig(
        mode="on", window_s=2.5, upper=0.8, lower=0.3, long_tokens=1000
    )


def test_without_a_router_its_profile_does_not_matter(started: Started) -> None:
    launch_server.main(
        [
            *("--model-path", "m", "--pool-size", "64", "--cp-degrees", "1,64"),
            *("--device", "cpu", "--no-router"),
        ]
    )
    ((config, _, flags),) = started.calls
    assert config.degrees == (1, 64) and flags is None


def test_ports_of_a_pool_do_not_overlap(started: Started) -> None:
    launch_server.main([*BASE, "--device", "cpu"])
    ((config, _, _),) = started.calls
    size, ports = config.size, config.ports
    used = [
        *range(ports.kv_events, ports.kv_events + size),
        *range(ports.kv_replay, ports.kv_replay + size),
        *range(ports.reports, ports.reports + size + 1),
        ports.store,
        *range(ports.control, ports.control + 2),
        *range(ports.kv_service, ports.kv_service + size),
    ]
    assert len(set(used)) == len(used) == 4 * size + 4


@pytest.mark.parametrize("mode", [[], ["--disaggregation-mode", "null"]])
def test_a_pool_that_decodes_has_no_bootstrap_port(started: Started, mode: list[str]) -> None:
    launch_server.main([*BASE, "--device", "cpu", *mode])
    ((config, flags, _),) = started.calls
    assert config.bootstrap_port is None and "--disaggregation-bootstrap-port" not in flags


def test_a_prefill_pool_takes_a_bootstrap_port_of_its_own(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's default is one port for all pools of a machine."""
    monkeypatch.delenv("SGLANG_HOST_IP", raising=False)
    launch_server.main([*BASE, *PREFILL])
    ((config, flags, _),) = started.calls
    assert config.bootstrap_port == config.ports.kv_events + 3 * config.size + 4
    assert flags[-2:] == ["--disaggregation-bootstrap-port", str(config.bootstrap_port)]
    assert os.environ["SGLANG_HOST_IP"] == "127.0.0.1", "where decode servers reach the ranks"
    assert os.environ["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] == "1"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (DECODE, "add --disaggregation-mode prefill"),
        (["--disaggregation-mode", "prefill"], "needs a --decode URL"),
        ([*PREFILL, "--no-router"], "--no-router starts none"),
        ([*PREFILL, "--decode", "http://10.0.0.7:31000"], "--host 127.0.0.1"),
        ([*PREFILL, "--decode", "http://10.0.0.7:31000", "--host", "0.0.0.0"], "--host 0.0.0.0"),
        ([*PREFILL, "--decode", "10.0.0.7"], "10.0.0.7"),
    ],
)
def test_decode_servers_that_cannot_be_used_are_refused_at_once(
    started: Started, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    status, said = exit_of(capsys, *BASE, "--device", "cpu", *flags)
    assert status == 2 and named in said
    assert not started.calls


def test_the_operators_bootstrap_port_counts(started: Started) -> None:
    port = ["--disaggregation-bootstrap-port", "8998"]
    launch_server.main([*BASE, *PREFILL, *port])
    ((config, flags, _),) = started.calls
    assert config.bootstrap_port == 8998 and flags.count("--disaggregation-bootstrap-port") == 1


def test_pools_that_start_together_look_for_ports_apart(started: Started) -> None:
    for _ in range(4):
        launch_server.main([*BASE, "--device", "cpu"])
    starts = [config.ports.kv_events for config, _, _ in started.calls]
    assert len(set(starts)) > 1, "nothing was taken: the same search would end the same"
    assert all(FIRST <= start < LAST - 16 for start in starts)


def test_a_cpu_pool_gets_its_platform_and_every_rank_its_cores(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SGLANG_PLATFORM", "SGLANG_CPU_OMP_THREADS_BIND", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    launch_server.main([*BASE, "--device", "cpu"])
    ((config, _, _),) = started.calls
    assert os.environ["SGLANG_PLATFORM"] == "vertumnus_cpu"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "SGLang would go other ways with one in sight"
    cores = [group.split(",") for group in os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")]
    available = {str(core) for core in os.sched_getaffinity(0)}
    assert len(cores) == config.size
    assert all(len(group) == len(set(group)) == config.threads for group in cores)
    assert set().union(*cores) <= available
    if len(available) > 1:
        assert cores[0] != cores[1], "the ranks of the smallest blocks compute side by side"


def test_the_operators_environment_counts(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0|0|0")
    launch_server.main([*BASE, "--device", "cpu"])
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0|0|0"


def test_a_gpu_pool_is_left_to_sglangs_own_platform(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    launch_server.main([*BASE, "--device", "cuda"])
    ((config, _, _),) = started.calls
    assert config.device == "cuda" and "SGLANG_PLATFORM" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "the order that topologies are told in"
    assert not config.allow_unproven_gpu


def test_a_gpu_is_tried_when_the_operator_says_so(started: Started) -> None:
    launch_server.main([*BASE, "--device", "cuda", "--allow-unproven-gpu"])
    ((config, passed, _),) = started.calls
    assert config.allow_unproven_gpu and "--allow-unproven-gpu" not in passed


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize(("value", "is_refused"), [("0", True), ("2", True), ("1", False)])
def test_a_rank_must_not_outlive_a_failed_collective(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    is_refused: bool,
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv(name, value)
    if not is_refused:
        launch_server.main([*BASE, "--device", "cuda"])
        return
    code, said = exit_of(capsys, *BASE, "--device", "cuda")
    assert code == 2 and f"{name}={value}" in said and "unset it" in said


@pytest.mark.parametrize("gpu", [True, False])
def test_without_a_device_the_machine_decides(
    started: Started, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    launch_server.main(BASE)
    ((config, _, _),) = started.calls
    assert config.device == ("cuda" if gpu else "cpu")


# -- the initial composition ----------------------------------------------------------------------

#: Prefills of 1 s at degree 1 and 0.6 s at degree 2.
KNOWN = {
    "version": 1,
    "device": "paper",
    "model": "none",
    "sglang_version": "0.5.23",
    "date": "2026-01-01",
    "measured": True,
    "note": "",
    "degrees": {"1": {"d_s": 0, "a_s_per_token": 0}, "2": {"d_s": 0, "a_s_per_token": 0.001}},
    "b_s_per_token": 0,
    "c_s_per_token": 0.01,
    "alpha_s_per_pair": 0,
    "kappa": {"1": 0.7, "2": 0.7},
}


def auto(folder: Path, *, requests: int, **changes: Any) -> list[str]:
    (folder / "known.json").write_text(json.dumps(KNOWN | changes))
    row = {"timestamp": 5, "input_length": 100, "output_length": 1}
    lines = (json.dumps(row | {"hash_ids": [n]}) for n in range(requests))
    (folder / "trace.jsonl").write_text("\n".join(lines))
    files = ["--profile", str(folder / "known.json"), "--history", str(folder / "trace.jsonl")]
    return [*BASE, "--device", "cpu", "--composition", "auto", *files]


@pytest.mark.parametrize(("requests", "expected"), [(17, "2x2"), (18, "1x2,2x1"), (20, "4x1")])
def test_an_automatic_composition_bears_the_history(
    started: Started,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    requests: int,
    expected: str,
) -> None:
    """As worked out in tests/router/core/test_initial.py."""
    flags = auto(tmp_path, requests=requests)
    launch_server.main([*flags, "--controller-window-s", "10"])
    ((config, passed, router_flags),) = started.calls
    assert config.composition == expected and config.degrees == (1, 2)
    assert "--history" not in [*passed, *router_flags]
    said = capsys.readouterr().err
    assert f"{requests}.00 s of prefill" in said and "have the capacity" in said


def test_the_controllers_threshold_leaves_room(started: Started, tmp_path: Path) -> None:
    flags = auto(tmp_path, requests=18)
    launch_server.main([*flags, "--controller-window-s", "10", "--controller-upper", "0.9"])
    assert started.calls[0][0].composition == "2x2"


def test_an_automatic_composition_needs_a_history_and_kappa(
    started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = auto(tmp_path, requests=1, kappa={"1": 0.7})
    code, text = exit_of(capsys, *flags)
    assert code == 2 and "has none for 2: measure it with sgl-vertumnus profile" in text
    code, text = exit_of(capsys, *flags[: flags.index("--history")])
    assert code == 2 and "needs --history" in text
    code, text = exit_of(capsys, *BASE, "--history", str(tmp_path / "trace.jsonl"))
    assert code == 2 and "--history is for --composition auto" in text
    code, text = exit_of(capsys, *BASE, "--composition", "auto", *flags[-2:])
    assert code == 2 and f"{DEFAULT} has none for 1, 2" in text
    code, text = exit_of(capsys, *flags[:-1], str(tmp_path / "nowhere"))
    assert code == 2
    assert started.calls == []


def test_a_fluid_composition_is_a_policy_of_the_router(started: Started) -> None:
    assert launch_server.main([*BASE, *PREFILL, "--composition", "fluid"]) in (0, None)
    config, _, router_flags = started.calls[0]
    assert config.composition == "4x1"
    assert router_flags[router_flags.index("--policy") + 1] == "fluid"


@pytest.mark.parametrize("flags", [["--composition", "fluid"], ["--policy", "fluid"]])
def test_a_pool_that_decodes_cannot_be_fluid(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    code, said = exit_of(capsys, *BASE, "--device", "cpu", *flags)
    assert code == 2
    assert "needs --disaggregation-mode prefill" in said


def test_two_do_not_move_one_pool(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = exit_of(capsys, *BASE, *PREFILL, "--composition", "fluid", "--controller", "on")
    assert code == 2
    assert "moves the pools itself" in said
