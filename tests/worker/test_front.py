"""The pool's front: its start, and what it makes of its supervisor's answers; against an HTTP
server that answers as SGLang and a supervisor that says what it is told to."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import zmq
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    BlockState,
    Endpoint,
    KvEvents,
    ModelInfo,
    MoveReport,
    PoolComposition,
    PoolDescription,
    Stages,
    decode_description,
)

from sgl_vertumnus.errors import PoolStartError, RegroupRefused, SupervisorSilent
from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker import front as front_module
from sgl_vertumnus.worker.control import (
    Describe,
    Described,
    FrontMessage,
    Move,
    Moved,
    Rejected,
    SupervisorAnswer,
)
from sgl_vertumnus.worker.control_sockets import front_url
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
            "/generate": [(200, {"text": ""})],
            "/flush_cache": [(200, "Cache flushed.")],
        }

        self.keys: set[str | None] = set()

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
                state.keys.add(self.headers["Authorization"])
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


def report(outcome: str = "committed", **fields: Any) -> MoveReport:
    return MoveReport(epoch=1, before="4x1", after="2x1,1x2", outcome=outcome, **fields)


COMPOSITION = PoolComposition(
    epoch=1,
    composition="2x1,1x2",
    blocks=(
        BlockState(first=0, degree=1, state="serving"),
        BlockState(first=1, degree=1, state="failed"),
        BlockState(first=2, degree=2, state="serving"),
    ),
    moving="4x1",
    moves=(report(stages=Stages(drain=1, vote=2, switch=3, publish=4)),),
)


class FakeSupervisor:
    """Answers what ``answers`` holds, the same again and again; None is silence."""

    def __init__(self) -> None:
        self.move_answer: SupervisorAnswer | None = Moved(report())
        self.unanswered: list[bytes] = []
        self.questions: queue.SimpleQueue[FrontMessage] = queue.SimpleQueue()
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.thread = threading.Thread(target=self.run)

    def start(self) -> None:
        self.socket.bind(front_url(CONFIG))
        self.thread.start()

    def run(self) -> None:
        while True:
            asker, question, *orders = self.socket.recv_multipart()
            if orders == [b"stop"]:
                return
            if orders == [b"answer"]:
                for asker in self.unanswered:
                    self.socket.send_multipart([asker, question])
                continue
            asked = msgspec.msgpack.decode(question, type=FrontMessage)
            self.questions.put(asked)
            told: SupervisorAnswer | None = Described(COMPOSITION)
            if isinstance(asked, Move):
                told = self.move_answer
            if told is None:
                self.unanswered.append(asker)
            else:
                self.socket.send_multipart([asker, msgspec.msgpack.encode(told)])

    def answer_all(self, answer: SupervisorAnswer) -> None:
        """Those who were met with silence."""
        self.order(msgspec.msgpack.encode(answer), b"answer")

    def stop(self) -> None:
        if self.thread.is_alive():
            self.order(b"", b"stop")
            self.thread.join()
        self.context.destroy(linger=0)

    def order(self, *frames: bytes) -> None:
        """To its thread, which alone may use its socket."""
        with self.context.socket(zmq.DEALER) as socket:
            socket.connect(front_url(CONFIG))
            socket.send_multipart(frames)

    def asked(self) -> list[FrontMessage]:
        return [self.questions.get_nowait() for _ in range(self.questions.qsize())]


@pytest.fixture
def silent_supervisor() -> Iterator[FakeSupervisor]:
    """One that does not listen yet."""
    fake = FakeSupervisor()
    yield fake
    fake.stop()


@pytest.fixture
def supervisor(silent_supervisor: FakeSupervisor) -> FakeSupervisor:
    silent_supervisor.start()
    return silent_supervisor


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts of the watch for lost ranks, which ``test_losses`` covers."""
    starts: list[str] = []
    monkeypatch.setattr(LossWatch, "start", lambda self: starts.append("started"))
    return starts


# -- start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "shown"), [(None, None), ("s3cret", "Bearer s3cret")])
def test_a_front_shows_its_own_server_the_key(
    server: tuple[Server, str],
    supervisor: FakeSupervisor,
    watch: list[str],
    key: str | None,
    shown: str | None,
) -> None:
    state, url = server
    PoolFront(CONFIG, url, key).start()
    assert state.keys == {shown}


def test_a_pool_serves_once_what_else_it_needs_has_started(
    server: tuple[Server, str], supervisor: FakeSupervisor, watch: list[str]
) -> None:
    front = PoolFront(CONFIG, server[1])
    seen: list[bool] = []
    front.start(lambda: seen.append(front.is_serving))
    assert seen == [False] and front.is_serving


def test_start_brings_the_pool_to_its_composition_and_warms_every_worker(
    server: tuple[Server, str], supervisor: FakeSupervisor, watch: list[str]
) -> None:
    state, url = server
    front = PoolFront(CONFIG, url)
    assert not front.is_serving
    front.start()
    assert front.is_serving and watch == ["started"]
    assert supervisor.asked() == [Move("2x1,1x2")]
    warmed = state.bodies("/generate")
    assert sorted(body["routed_dp_rank"] for body in warmed) == [0, 1, 2]
    assert all(body["sampling_params"]["max_new_tokens"] >= 2 for body in warmed)
    for body in warmed:
        degree = 2 if body["routed_dp_rank"] == 2 else 1
        new = [len(body["input_ids"])]
        assert is_worth_sharding(new, new, degree, hidden=4096) is (degree > 1)
    order = [path for _, path, _ in state.requests]
    assert order[-1] == "/flush_cache", "what the warm-up cached is no client's"


def test_start_waits_until_the_server_listens(
    server: tuple[Server, str], supervisor: FakeSupervisor
) -> None:
    state, url = server
    state.answers["/model_info"] = [(503, "not yet")]
    front = PoolFront(CONFIG, url)
    thread = threading.Thread(target=front.start)
    thread.start()
    while len(state.bodies("/model_info")) < 3:
        assert thread.is_alive()
        time.sleep(0.01)
    assert supervisor.asked() == []
    state.answers["/model_info"] = [(200, {})]
    thread.join(20)
    assert front.is_serving


def test_start_waits_until_the_supervisor_listens(
    server: tuple[Server, str], silent_supervisor: FakeSupervisor
) -> None:
    state, url = server
    front = PoolFront(CONFIG, url)
    thread = threading.Thread(target=front.start)
    thread.start()
    while not state.bodies("/model_info"):
        assert thread.is_alive()
        time.sleep(0.01)
    silent_supervisor.start()
    thread.join(20)
    assert front.is_serving and silent_supervisor.asked() == [Move("2x1,1x2")]


def test_a_flush_waits_for_leaders_to_come_to_rest(
    server: tuple[Server, str], supervisor: FakeSupervisor
) -> None:
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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Rejected("the pool is moving"), "the pool is moving"),
        (Moved(report("abandoned", reason="rank 1: no")), "rank 1: no"),
        (Moved(report("failed", reason="rank 2: its process exited")), "its process exited"),
        (None, "did not answer in 0.3 s"),
    ],
)
def test_a_pool_that_does_not_take_its_composition_does_not_serve(
    server: tuple[Server, str],
    supervisor: FakeSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    answer: SupervisorAnswer | None,
    reason: str,
) -> None:
    monkeypatch.setattr(front_module, "READY_TIMEOUT_S", 0.3)
    state, url = server
    supervisor.move_answer = answer
    front = PoolFront(CONFIG, url)
    with pytest.raises(PoolStartError, match=f"has not taken its composition: .*{reason}"):
        front.start()
    assert not front.is_serving and state.bodies("/generate") == []


@pytest.mark.parametrize("path", ["/generate", "/flush_cache"])
def test_a_step_that_fails_is_named_with_the_servers_words(
    server: tuple[Server, str],
    supervisor: FakeSupervisor,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_module, "FLUSH_TIMEOUT_S", 0.2)
    state, url = server
    state.answers[path] = [(500, "out of memory")]
    front = PoolFront(CONFIG, url)
    with pytest.raises(PoolStartError, match=f"{path} failed: 500 out of memory"):
        front.start()
    assert not front.is_serving


def test_a_server_that_goes_away_is_named(
    server: tuple[Server, str], supervisor: FakeSupervisor
) -> None:
    state, url = server
    del state.answers["/generate"]  # the handler fails and the connection ends
    with pytest.raises(PoolStartError, match="/generate failed: "):
        PoolFront(CONFIG, url).start()


# -- moves ----------------------------------------------------------------------------------------


def test_a_move_ends_as_the_supervisor_says(supervisor: FakeSupervisor) -> None:
    front = PoolFront(CONFIG, "http://127.0.0.1:9")
    supervisor.move_answer = Moved(report("failed", reason="r", failed=((0, 1),)))
    assert front.move("2x2", 3) == report("failed", reason="r", failed=((0, 1),))
    supervisor.move_answer = Rejected("the pool is at epoch 4, not 3")
    with pytest.raises(RegroupRefused, match="at epoch 4, not 3"):
        front.move("2x2", 3)
    assert front.composition() == COMPOSITION
    assert supervisor.asked() == [Move("2x2", 3), Move("2x2", 3), Describe()]


def test_a_supervisor_that_does_not_answer_is_named(
    silent_supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "DESCRIBE_TIMEOUT_S", 0.1)
    front = PoolFront(CONFIG, "http://127.0.0.1:9")
    with pytest.raises(SupervisorSilent, match=r"did not answer in 0.2 s"):
        front.move("2x2", timeout_s=0.2)
    with pytest.raises(SupervisorSilent):
        front.composition()
    silent_supervisor.start()
    monkeypatch.setattr(front_module, "DESCRIBE_TIMEOUT_S", 5)
    assert front.composition() == COMPOSITION
    assert silent_supervisor.asked() == [Describe()], "what was given up is not carried out"


def test_threads_get_the_answers_to_their_own_questions(supervisor: FakeSupervisor) -> None:
    front = PoolFront(CONFIG, "http://127.0.0.1:9")
    with ThreadPoolExecutor(8) as threads:
        moves = [threads.submit(front.move, "2x2") for _ in range(50)]
        compositions = [threads.submit(front.composition) for _ in range(50)]
    assert all(move.result() == report() for move in moves)
    assert all(composition.result() == COMPOSITION for composition in compositions)


# -- HTTP -----------------------------------------------------------------------------------------


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


@dataclass
class Site:
    front: PoolFront
    app: Any
    client: Any

    def regroup(self, body: Any) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post("/vertumnus/regroup", content=content)


@pytest.fixture
def site() -> Iterator[Site]:
    """The front's routes; it serves."""
    pytest.importorskip("sglang.srt.utils.auth", reason="needs sglang")
    fastapi = pytest.importorskip("fastapi")
    testclient: Callable[..., Any] = pytest.importorskip("fastapi.testclient").TestClient
    app, front = fastapi.FastAPI(), PoolFront(CONFIG, "http://127.0.0.1:9")
    add_routes(app, front, describe)
    front.is_serving = True
    with testclient(app) as client:
        yield Site(front, app, client)


def test_everybody_is_sent_away_until_the_pool_serves(
    site: Site, supervisor: FakeSupervisor
) -> None:
    site.front.is_serving = False
    assert site.client.get("/vertumnus/pool").status_code == 503
    assert site.client.get("/vertumnus/composition").status_code == 503
    assert site.regroup({"composition": "2x2"}).status_code == 503
    assert supervisor.asked() == []
    site.front.is_serving = True
    answer = site.client.get("/vertumnus/pool")
    assert answer.status_code == 200
    assert decode_description(answer.content) == describe()


def test_the_composition_is_told(site: Site, supervisor: FakeSupervisor) -> None:
    answer = site.client.get("/vertumnus/composition")
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=PoolComposition) == COMPOSITION


@pytest.mark.parametrize("outcome", ["committed", "abandoned", "failed"])
def test_a_move_that_was_begun_is_reported(
    site: Site, supervisor: FakeSupervisor, outcome: str
) -> None:
    supervisor.move_answer = Moved(report(outcome, reason="because"))
    answer = site.regroup({"composition": "1x4", "epoch": 7})
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=MoveReport) == report(outcome, reason="because")
    assert site.regroup({"composition": "1x4", "epoch": None}).status_code == 200
    assert site.regroup({"composition": "1x4"}).status_code == 200
    assert supervisor.asked() == [Move("1x4", 7), Move("1x4"), Move("1x4")]


def test_a_move_that_was_not_begun_is_a_conflict(site: Site, supervisor: FakeSupervisor) -> None:
    supervisor.move_answer = Rejected("the pool is at epoch 8, not 7")
    answer = site.regroup({"composition": "1x4", "epoch": 7})
    assert answer.status_code == 409
    assert answer.json() == {"error": "the pool is at epoch 8, not 7"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"{",
        [],
        {},
        {"composition": None},
        {"composition": 4},
        {"composition": "4"},
        {"composition": "5x1"},
        {"composition": "1x8"},
        {"composition": "1x1,1x2,1x1"},
        {"composition": "9999999999999999x1"},
        {"composition": "4x1", "epoch": "1"},
        {"composition": "4x1", "epoch": 1.5},
    ],
    ids=repr,
)
def test_what_is_no_command_is_the_callers_mistake(
    site: Site, supervisor: FakeSupervisor, body: Any
) -> None:
    answer = site.regroup(body)
    assert answer.status_code == 400 and answer.json()["error"]
    assert supervisor.asked() == []


def test_a_supervisor_that_is_silent_makes_the_pool_unavailable(
    site: Site, silent_supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "DESCRIBE_TIMEOUT_S", 0.1)
    answer = site.client.get("/vertumnus/composition")
    assert answer.status_code == 503 and "did not answer in 0.1 s" in answer.json()["error"]


def test_a_move_under_way_holds_nothing_else_up(site: Site, supervisor: FakeSupervisor) -> None:
    """Not even more of them than threads wait for: those are answered when it is their turn."""
    supervisor.move_answer = None
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(site.regroup, {"composition": "2x2"}) for _ in range(2)]
        assert [supervisor.questions.get(timeout=20) for _ in waiting] == [Move("2x2")] * 2
        assert site.client.get("/vertumnus/pool").status_code == 200
        assert site.client.get("/vertumnus/composition").status_code == 200
        assert not any(call.done() for call in waiting)
        supervisor.answer_all(Moved(report()))
        assert [call.result(20).status_code for call in waiting] == [200, 200]


def test_moving_the_pool_is_for_whom_sglang_lets_administer_it(site: Site) -> None:
    from sglang.srt.utils import auth

    (route,) = [r for r in site.app.routes if r.path == "/vertumnus/regroup"]
    level = route.endpoint._auth_level

    def allowed(key: str | None, **configured: Any) -> bool:
        keys = {"api_key": None, "admin_api_key": None} | configured
        header = None if key is None else f"Bearer {key}"
        decision = auth.decide_request_auth(
            method="POST",
            path=route.path,
            authorization_header=header,
            auth_level=level,
            **keys,
        )
        return bool(decision.allowed)

    assert allowed(None)
    assert not allowed(None, admin_api_key="a") and allowed("a", admin_api_key="a")


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "method"), [("cpu", "fork"), ("cuda", "spawn")])
def test_children_are_forked_where_no_device_context_forbids_it(device: str, method: str) -> None:
    assert FrontRuntime(config_of(device=device)).process_start_method() == method
