"""The front's endpoints for copies, deletions and snapshots."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="needs torch")
from vertumnus_router.protocol import (
    CopyCommand,
    CopyReport,
    ReclaimCommand,
    ReclaimReport,
    SnapshotCommand,
    SnapshotReport,
)

from sgl_vertumnus.errors import PoolStartError
from sgl_vertumnus.worker import kv_front, launch
from sgl_vertumnus.worker.kv_front import KvFront, add_kv_routes
from sgl_vertumnus.worker.kv_service.messages import (
    Copy,
    Describe,
    Facts,
    Reclaim,
    Snapshot,
    decode_question,
    encode_answer,
)
from sgl_vertumnus.worker.kv_service.sockets import Server, keys_of
from tests.worker.configs import config_of

CONFIG = config_of(2, (1, 2))
COPY = CopyCommand(
    rank=1,
    incarnation="a",
    source="h:1",
    source_incarnation="b",
    blocks=(-(2**63), 2**63 - 1),
    timeout_s=5,
)
RECLAIM = ReclaimCommand(rank=0, incarnation="a", blocks=(1, 2), keep=1, as_of=7)
SNAPSHOT = SnapshotCommand(rank=1, incarnation="a")
REPORTS: dict[Any, Any] = {
    Describe: Facts(640),
    Copy: CopyReport(outcome="done", blocks=2, bytes=20480, seconds=0.5, transfer_s=0.25),
    Reclaim: ReclaimReport(outcome="refused", reason="it is in use"),
    Snapshot: SnapshotReport(outcome="done", blocks=3),
}


class Ranks:
    """Their services; what each was asked."""

    def __init__(self, secret: str = "secret") -> None:
        self.asked: list[tuple[int, Any]] = []
        self.servers = [
            Server(
                f"127.0.0.1:{CONFIG.ports.kv_service + rank}",
                keys_of(secret),
                lambda frames, rank=rank: self.answer(rank, frames),
                1,
            )
            for rank in range(CONFIG.size)
        ]

    def answer(self, rank: int, frames: list[bytes]) -> list[bytes]:
        question = decode_question(frames)
        self.asked.append((rank, question))
        return encode_answer(REPORTS[type(question)])


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for server in made.servers:
        server.close()


@pytest.fixture
def front() -> KvFront:
    return KvFront(CONFIG, "secret")


@pytest.fixture
def client(front: KvFront) -> Any:
    testclient = pytest.importorskip("fastapi.testclient").TestClient
    from fastapi import FastAPI

    app = FastAPI()
    add_kv_routes(app, front)
    return testclient(app)


def post(client: Any, what: str, command: Any) -> tuple[int, Any]:
    answer = client.post(f"/vertumnus/kv/{what}", content=msgspec.json.encode(command))
    return answer.status_code, answer.json()


def test_what_is_asked_goes_to_the_rank_it_names(ranks: Ranks, front: KvFront, client: Any) -> None:
    front.start()
    assert front.service is not None
    assert front.service.endpoint.port_base == CONFIG.ports.kv_service
    assert (front.service.endpoint.host, front.service.token_bytes) == (None, 640)
    ranks.asked.clear()
    for what, command, question in (
        ("copy", COPY, Copy(command=COPY)),
        ("reclaim", RECLAIM, Reclaim(command=RECLAIM)),
        ("snapshot", SNAPSHOT, Snapshot(command=SNAPSHOT)),
    ):
        status, told = post(client, what, command)
        report = REPORTS[type(question)]
        assert status == 200 and msgspec.convert(told, type(report)) == report
        assert ranks.asked.pop() == (command.rank, question)


@pytest.mark.parametrize(
    ("what", "command", "reason"),
    [
        ("copy", {"rank": 1}, "missing required field"),
        ("copy", "x", "Expected `object`"),
        ("copy", msgspec.structs.replace(COPY, rank=2), "rank 2 is not in a pool of 2"),
        ("copy", msgspec.structs.replace(COPY, timeout_s=0), "timeout_s 0"),
        ("copy", msgspec.structs.replace(COPY, timeout_s=1e9), "timeout_s"),
        ("reclaim", msgspec.structs.replace(RECLAIM, rank=-1), "rank -1"),
        ("copy", msgspec.structs.replace(COPY, blocks=(2**64,)), "serialize ints"),
    ],
)
def test_what_cannot_be_meant_is_a_bad_request(
    ranks: Ranks, front: KvFront, client: Any, what: str, command: Any, reason: str
) -> None:
    front.start()
    status, told = post(client, what, command)
    assert status == 400 and reason in told["error"]


def test_before_the_pool_serves_nothing_is_passed_on(ranks: Ranks, client: Any) -> None:
    for what, command in (("copy", COPY), ("reclaim", RECLAIM), ("snapshot", SNAPSHOT)):
        assert post(client, what, command)[0] == 503
    assert not ranks.asked


def test_a_rank_that_does_not_answer_is_said_so(
    ranks: Ranks, front: KvFront, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.start()
    monkeypatch.setattr(kv_front, "ANSWER_S", 0.02)
    go_on = threading.Event()
    monkeypatch.setattr(ranks, "answer", lambda *_: go_on.wait(10) and [])
    status, told = post(client, "snapshot", SNAPSHOT)
    assert status == 503 and "did not answer" in told["error"]
    go_on.set()


def test_a_pool_whose_services_do_not_work_does_not_start() -> None:
    with pytest.raises(PoolStartError, match="no rank listens"):
        KvFront(config_of(1, (1,)), "secret").start()


def test_what_is_not_proven_is_not_offered(ranks: Ranks) -> None:
    front = KvFront(msgspec.structs.replace(CONFIG, device="cuda"), "secret")
    front.start()
    assert front.service is None and not ranks.asked


def test_only_who_may_administer_the_pool_may_ask(client: Any) -> None:
    from sglang.srt.utils.auth import AuthLevel

    levels = {
        route.path: route.endpoint._auth_level
        for route in client.app.routes
        if route.path.startswith("/vertumnus/kv/")
    }
    assert len(levels) == 3 and set(levels.values()) == {AuthLevel.ADMIN_OPTIONAL}


def test_pools_of_one_key_share_a_secret_and_others_none() -> None:
    def secret(admin: str | None = None) -> str:
        return launch._secret_of(SimpleNamespace(admin_api_key=admin))

    assert secret("a") == secret("a") != secret("b")
    assert secret() != secret()
    assert "a-key" not in secret("a-key")
