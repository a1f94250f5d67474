"""The pool's front: its composition and warm-up, against an HTTP server that answers as SGLang."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from vertumnus_patches.regroup_message import read_regroup
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    Endpoint,
    KvEvents,
    ModelInfo,
    PoolDescription,
    decode_description,
)

from sgl_vertumnus.errors import PoolStartError, RegroupRefused
from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker import front as front_module
from sgl_vertumnus.worker.front import FrontRuntime, PoolFront, add_routes
from sgl_vertumnus.worker.losses import LossWatch
from sgl_vertumnus.worker.sharding import is_worth_sharding
from tests.worker.configs import config_of

CONFIG = config_of(4, (1, 2, 4), composition="2x1,1x2")


class Server:
    """Records what it is asked; answers by path."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        #: by path; the last one again and again
        self.answers: dict[str, list[tuple[int, Any]]] = {
            "/model_info": [(200, {})],
            "/set_internal_state": [(200, [True] * 4)],
            "/generate": [(200, {"text": ""})],
            "/flush_cache": [(200, "Cache flushed.")],
        }

    def bodies(self, path: str) -> list[Any]:
        return [body for _, asked, body in self.requests if asked == path]


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    state, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            with lock:
                body = json.loads(text) if text else None
                state.requests.append((self.command, self.path, body))
                answers = state.answers[self.path]
                status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
            payload = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield state, f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts of the watch for lost ranks, which ``test_losses`` covers."""
    starts: list[str] = []
    monkeypatch.setattr(LossWatch, "start", lambda self: starts.append("started"))
    return starts


# -- start ----------------------------------------------------------------------------------------


def test_start_brings_the_pool_to_its_composition_and_warms_every_worker(
    server: tuple[Server, str], watch: list[str]
) -> None:
    state, url = server
    front = PoolFront(CONFIG, url)
    assert front.blocks == tuple(Block(rank, 1) for rank in range(4)) and not front.is_serving
    front.start()
    assert front.is_serving and front.epoch == 1 and watch == ["started"]
    assert front.blocks == (Block(0, 1), Block(1, 1), Block(2, 2))
    (command,) = state.bodies("/set_internal_state")
    assert read_regroup(command["server_args"]) == (1, ((0, 1), (1, 1), (2, 2)))
    warmed = state.bodies("/generate")
    assert sorted(body["routed_dp_rank"] for body in warmed) == [0, 1, 2]
    assert all(body["sampling_params"]["max_new_tokens"] >= 2 for body in warmed)
    for body in warmed:
        degree = 2 if body["routed_dp_rank"] == 2 else 1
        new = [len(body["input_ids"])]
        assert is_worth_sharding(new, new, degree, hidden=4096) is (degree > 1)
    order = [path for _, path, _ in state.requests]
    assert order[-1] == "/flush_cache", "what the warm-up cached is no client's"
    assert order.index("/set_internal_state") < order.index("/generate")


def test_start_waits_until_the_server_listens(server: tuple[Server, str]) -> None:
    state, url = server
    state.answers["/model_info"] = [(503, "not yet")]
    front = PoolFront(CONFIG, url)
    thread = threading.Thread(target=front.start)
    thread.start()
    while len(state.bodies("/model_info")) < 3:
        assert thread.is_alive()
        time.sleep(0.01)
    assert state.bodies("/set_internal_state") == []
    state.answers["/model_info"] = [(200, {})]
    thread.join(20)
    assert front.is_serving


def test_a_flush_waits_for_leaders_to_come_to_rest(server: tuple[Server, str]) -> None:
    state, url = server
    state.answers["/flush_cache"] = [(400, "busy"), (400, "busy"), (200, "flushed")]
    front = PoolFront(CONFIG, url)
    front.start()
    assert front.is_serving and len(state.bodies("/flush_cache")) == 3


def test_a_server_that_never_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "READY_TIMEOUT_S", 0.3)
    url = f"http://127.0.0.1:{free_range('127.0.0.1', 1)}"
    with pytest.raises(PoolStartError, match=f"the front at {url} did not answer"):
        PoolFront(CONFIG, url).start()


@pytest.mark.parametrize("answers", [[True, True, False, True], [False] * 4, [True] * 3, []])
def test_a_pool_whose_ranks_do_not_all_follow_does_not_serve(
    server: tuple[Server, str], answers: list[bool]
) -> None:
    state, url = server
    state.answers["/set_internal_state"] = [(200, answers)]
    front = PoolFront(CONFIG, url)
    with pytest.raises(PoolStartError, match=f"epoch 1 .* {answers.count(True)} of 4 ranks"):
        front.start()
    assert not front.is_serving and state.bodies("/generate") == []


@pytest.mark.parametrize("path", ["/set_internal_state", "/generate", "/flush_cache"])
def test_a_step_that_fails_is_named_with_the_servers_words(
    server: tuple[Server, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "FLUSH_TIMEOUT_S", 0.2)
    state, url = server
    state.answers[path] = [(500, "out of memory")]
    front = PoolFront(CONFIG, url)
    with pytest.raises(PoolStartError, match=f"{path} failed: 500 out of memory"):
        front.start()
    assert not front.is_serving


def test_a_server_that_goes_away_is_named(server: tuple[Server, str]) -> None:
    state, url = server
    del state.answers["/generate"]  # the handler fails and the connection ends
    with pytest.raises(PoolStartError, match="/generate failed: "):
        PoolFront(CONFIG, url).start()


# -- regroup --------------------------------------------------------------------------------------


def test_a_composition_counts_once_every_rank_has_followed(server: tuple[Server, str]) -> None:
    state, url = server
    front = PoolFront(CONFIG, url)
    front.regroup((Block(0, 4),))
    assert (front.epoch, front.blocks) == (1, (Block(0, 4),))
    state.answers["/set_internal_state"] = [(200, [True, False, True, True])]
    with pytest.raises(RegroupRefused) as refused:
        front.regroup((Block(0, 2), Block(2, 2)))
    assert refused.value.epoch == 2 and "3 of 4 ranks followed" in refused.value.reason
    assert front.blocks == (Block(0, 4),)
    state.answers["/set_internal_state"] = [(200, [True] * 4)]
    front.regroup((Block(0, 2), Block(2, 2)))
    commands = [body["server_args"] for body in state.bodies("/set_internal_state")]
    assert [read_regroup(knobs)[0] for knobs in commands] == [1, 2, 3], "some followed the second"


# -- description ----------------------------------------------------------------------------------


def describe() -> PoolDescription:
    return PoolDescription(
        version=PROTOCOL_VERSION,
        pool_id="p",
        sglang_version="0",
        pool_size=4,
        degrees=(1, 2),
        model=ModelInfo(
            served_name="m",
            model_path="m",
            tokenizer_path="m",
            context_tokens=1,
            kv_capacity_tokens=1,
            chunk_tokens=1,
        ),
        kv_events=KvEvents(
            publish=Endpoint(port_base=1), replay=Endpoint(port_base=2), topic="t", block_tokens=16
        ),
        reports=Endpoint(port_base=3),
        manifest="x",
    )


def test_routers_are_sent_away_until_the_pool_serves(server: tuple[Server, str]) -> None:
    fastapi = pytest.importorskip("fastapi")
    testclient: Callable[..., Any] = pytest.importorskip("fastapi.testclient").TestClient
    _, url = server
    app, front = fastapi.FastAPI(), PoolFront(CONFIG, url)
    add_routes(app, front, describe)
    client = testclient(app)
    assert client.get("/vertumnus/pool").status_code == 503
    front.start()
    answer = client.get("/vertumnus/pool")
    assert answer.status_code == 200
    assert decode_description(answer.content) == describe()


@pytest.mark.parametrize(("device", "method"), [("cpu", "fork"), ("cuda", "spawn")])
def test_children_are_forked_where_no_device_context_forbids_it(device: str, method: str) -> None:
    assert FrontRuntime(config_of(device=device)).process_start_method() == method
