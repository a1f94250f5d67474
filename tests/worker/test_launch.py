"""The launching process: what it starts besides SGLang, and that nothing outlives it."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="needs torch")
from vertumnus_patches import engine
from vertumnus_patches.engine import FrontState, ModelFacts
from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_router.protocol import PROTOCOL_VERSION, Endpoint, KvService, decode_description

from sgl_vertumnus.errors import ConfigurationError, PoolStartError, UnsupportedFeature
from sgl_vertumnus.worker import launch
from tests.worker.configs import config_of

SERVICE = KvService(endpoint=Endpoint(port_base=1234), token_bytes=512)
STOP = """
import subprocess, sys
from sgl_vertumnus.worker import launch

launch.ROUTER_STOP_S = 0.5
grandchild = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", grandchild])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
stubborn += "print('up', flush=True); time.sleep(600)"
router = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
assert router.stdout.readline() == b"up\\n"
import psutil
while len(family := psutil.Process().children(recursive=True)) < 3:
    pass
launch._stop_children(router)
psutil.wait_procs(family, 10)
print(len(family), [p.pid for p in family if p.is_running() and p.status() != "zombie"])
"""


def test_no_child_outlives_the_launch() -> None:
    done = subprocess.run([sys.executable, "-c", STOP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split(maxsplit=1) == ["3", "[]\n"]


class Front:
    def __init__(self) -> None:
        self.started = False

    def start(self, warmed_up: Any) -> None:
        warmed_up()
        self.started = True


def test_a_router_that_did_not_start_stops_the_pool() -> None:
    router = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    router.wait()
    front: Any = Front()
    with pytest.raises(PoolStartError, match=r"exited with status 3.*--router-port.*--no-router"):
        launch._start(front, router, lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("router", [None, SimpleNamespace(poll=lambda: None)])
def test_a_router_that_runs_or_is_not_wanted_is_fine(router: Any) -> None:
    front: Any = Front()
    asked: list[str] = []
    launch._start(front, router, lambda: asked.append("kv"))
    assert front.started and asked == ["kv"]


def test_the_router_runs_in_a_process_of_its_own_until_the_pool_ends(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    flags = ["--port", "0", "--host", "127.0.0.1", "--ready-file", str(ready)]
    router = launch._start_router("http://127.0.0.1:9", flags)
    assert router is not None
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert router.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        router.terminate()
        assert router.wait(30) == 0


def test_without_flags_there_is_no_router() -> None:
    assert launch._start_router("http://127.0.0.1:9", None) is None


def test_the_pool_describes_itself_as_routers_read_it() -> None:
    config = config_of(4, (1, 2), composition="2x1,1x2")
    facts = ModelFacts(
        name="LlamaForCausalLM",
        attention="MHA",
        sliding_window_tokens=None,
        is_hybrid=False,
        is_multimodal=False,
        is_encoder_decoder=False,
        is_generation=True,
        has_attention_sinks=False,
        context_tokens=8192,
        kv_elements_per_token=1024,
        shape="LlamaForCausalLM of 2 layers",
    )
    state = FrontState(
        served_model_name="served",
        model_path="model",
        tokenizer_path="tokenizer",
        kv_capacity_tokens=4096,
        chunk_tokens=512,
        page_tokens=16,
        chat_template=None,
        dtype="float32",
        kv_cache_dtype="auto",
    )
    told = decode_description(msgspec.json.encode(launch._describe(config, facts, state, SERVICE)))
    assert told.kv_service == SERVICE
    assert (told.version, told.pool_id, told.pool_size) == (PROTOCOL_VERSION, "pool-test", 4)
    assert told.degrees == (1, 2) and told.manifest == manifest(ALL_PATCHES)
    assert (told.model.served_name, told.model.context_tokens) == ("served", 8192)
    assert (told.model.kv_capacity_tokens, told.model.chunk_tokens) == (4096, 512)
    assert told.kv_events.block_tokens == 16
    assert told.kv_events.publish.port_base == config.ports.kv_events
    assert told.kv_events.replay.port_base == config.ports.kv_replay
    assert told.reports.port_base == config.ports.reports
    assert told.prefill is None
    assert told.model.shape == "LlamaForCausalLM of 2 layers, float32"
    assert told.device.endswith(" thread a rank") or " threads a rank" in told.device
    prefills = msgspec.structs.replace(config, bootstrap_port=8998)
    told = decode_description(msgspec.json.encode(launch._describe(prefills, facts, state, None)))
    assert told.prefill is not None and told.prefill.bootstrap_port == 8998
    assert (told.prefill.dtype, told.prefill.kv_cache_dtype) == ("float32", "auto")


@pytest.mark.parametrize(("mode", "port"), [("prefill", None), ("null", 8998)])
def test_a_mode_that_only_a_file_names_is_refused(mode: str, port: int | None) -> None:
    config = msgspec.structs.replace(config_of(2, (1, 2)), bootstrap_port=port)
    asked = SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend="mooncake")
    with pytest.raises(ConfigurationError, match="on the command line"):
        launch._transfer_flags(config, asked)


# -- what it reads of a live scheduler ------------------------------------------------------------


def request(rid: str, output_ids: list[int], finished: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * 10,
        cached_tokens=4,
        output_ids=output_ids,
        finished=lambda: finished,
    )


def test_a_prefill_is_over_with_the_first_token_or_the_end() -> None:
    batch = SimpleNamespace(
        reqs=[request("chunk", []), request("token", [7]), request("aborted", [], finished=True)]
    )
    assert [(p.rid, p.input_tokens, p.cached_tokens) for p in engine.prefilled(batch)] == [
        ("token", 10, 4),
        ("aborted", 10, 4),
    ]


class Reached(Exception):
    """The launch went on to what starts processes."""


@pytest.mark.parametrize(
    ("allowed", "outcome", "looked_at"),
    [
        (False, UnsupportedFeature, []),
        (True, Reached, ["gpus", "flashinfer"]),
    ],
)
def test_a_gpu_pool_is_looked_at_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, outcome: type[Exception], looked_at: list[str]
) -> None:
    seen: list[str] = []
    server = SimpleNamespace(resolve_once=lambda: None)
    facts = SimpleNamespace(
        name="Qwen3ForCausalLM",
        attention="MHA",
        kv_elements_per_token=1024,
        sliding_window_tokens=None,
        is_hybrid=False,
        is_multimodal=False,
        is_encoder_decoder=False,
        is_generation=True,
        has_attention_sinks=False,
    )

    def reached(config: Any) -> None:
        raise Reached

    for name, value in {
        "load_plugins": lambda: None,
        "parse_flags": lambda flags: server,
        "model_facts": lambda asked: facts,
        "chosen_fields": lambda asked: set(),
        "resolved_attention_backends": lambda asked: ("flashinfer", "flashinfer"),
    }.items():
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(type(launch.seams), "are_bound", True)
    monkeypatch.setattr(launch, "check_flags", lambda asked: None)
    monkeypatch.setattr(launch, "_transfer_flags", lambda config, asked: [])
    monkeypatch.setattr(launch, "check_gpus", lambda config: seen.append("gpus"))
    monkeypatch.setattr(
        launch.flashinfer_attention, "check_installed", lambda: seen.append("flashinfer")
    )
    monkeypatch.setattr(launch, "open_store", reached)
    config = config_of(4, (1, 2), device="cuda")
    config = msgspec.structs.replace(config, allow_unproven_gpu=allowed)
    with pytest.raises(outcome):
        launch.serve(config, [], router_flags=None)
    assert seen == looked_at
