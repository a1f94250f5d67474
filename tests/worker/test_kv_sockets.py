"""The sockets of a KV service: who gets in, what is answered, what is not worth dying for."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker.kv_service import messages, sockets
from sgl_vertumnus.worker.kv_service.messages import (
    VERSION,
    Describe,
    Facts,
    Malformed,
    Release,
    Released,
    ServiceError,
    decode_question,
    encode_answer,
    encode_error,
    encode_question,
)
from sgl_vertumnus.worker.kv_service.sockets import Keys, Peer, Server, keys_of

KEYS = keys_of("secret")


@contextmanager
def served(handle: Any, keys: Keys = KEYS, threads: int = 2) -> Iterator[str]:
    address = f"127.0.0.1:{free_range('127.0.0.1', 1)}"
    server = Server(address, keys, handle, threads)
    try:
        yield address
    finally:
        server.close()


def answer(frames: list[bytes]) -> list[bytes]:
    try:
        question = decode_question(frames)
    except Malformed as exc:
        return encode_error(str(exc))
    if isinstance(question, Release):
        return encode_answer(Released(question.lease == 1))
    return encode_answer(Facts(12))


def test_questions_are_answered_in_turn() -> None:
    with served(answer) as address, Peer(address, KEYS) as peer:
        assert peer.ask(Describe(), 5) == Facts(12)
        assert peer.ask(Release(lease=1), 5) == Released(True)
        assert peer.ask(Release(lease=2), 5) == Released(False)


@pytest.mark.parametrize("role", ["service", "asker"])
def test_who_lacks_either_key_stays_out(role: str) -> None:
    other = keys_of("another")
    keys = Keys(
        other.service if role == "service" else KEYS.service,
        other.asker if role == "asker" else KEYS.asker,
    )
    heard: list[Any] = []
    with served(lambda frames: heard.append(frames) or answer(frames)) as address:
        with Peer(address, keys) as peer, pytest.raises(ServiceError, match="--admin-api-key"):
            peer.ask(Describe(), 5)
        with Peer(address, KEYS) as peer:
            assert peer.ask(Describe(), 5) == Facts(12)
    assert len(heard) == 1


def test_who_does_not_encrypt_stays_out() -> None:
    with served(answer) as address:
        plain = zmq.Context.instance().socket(zmq.DEALER)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://{address}")
        plain.send_multipart(encode_question(Describe()))
        assert not plain.poll(100)
        plain.close()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([VERSION], "not a question of this version"),
        ([b"vertumnus-kv-0", b""], "run the same sgl-vertumnus"),
        ([VERSION, b"\xc1"], "not a question"),
        ([VERSION, b"\x81\xa4type\xa3odd"], "not a question"),
        ([VERSION, b"\x82\xa4type\xa7release\xa5lease\xa1x"], "not a question"),
        ([b""] * 9, "not a question"),
        ([VERSION, b"x" * 3000], "more than 2000 bytes"),
    ],
)
def test_what_is_no_question_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, frames: list[bytes], reason: str
) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 2000)
    with served(answer) as address, Peer(address, KEYS) as peer:
        peer._socket.send_multipart(frames)
        with pytest.raises(ServiceError, match=reason):
            messages.decode_answer(peer._socket.recv_multipart(), Facts)
        assert peer.ask(Describe(), 5) == Facts(12)


@pytest.mark.parametrize(
    "frames", [[], [b"ok"], [b"odd", b""], [b"ok", b"\xc1"], [b"ok", b"\xa1x"]]
)
def test_what_is_no_answer_is_an_error(frames: list[bytes]) -> None:
    with pytest.raises(ServiceError, match="not an answer"):
        messages.decode_answer(frames, Facts)


def test_one_that_is_slow_does_not_hold_up_the_others() -> None:
    go_on = threading.Event()

    def handle(frames: list[bytes]) -> list[bytes]:
        if isinstance(decode_question(frames), Describe):
            go_on.wait(10)
        return answer(frames)

    with served(handle) as address, Peer(address, KEYS) as slow, Peer(address, KEYS) as quick:
        slow._socket.send_multipart(encode_question(Describe()))
        assert quick.ask(Release(lease=1), 5) == Released(True)
        with pytest.raises(ServiceError, match=r"did not answer in 0.0 s"):
            slow.ask(Describe(), 0.02)
        go_on.set()


def test_more_questions_than_fit_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_IN_HAND", 1)
    go_on = threading.Event()

    def handle(frames: list[bytes]) -> list[bytes]:
        go_on.wait(10)
        return answer(frames)

    with served(handle, threads=1) as address, Peer(address, KEYS) as one:
        one._socket.send_multipart(encode_question(Describe()))
        with pytest.raises(ServiceError, match="busy"):
            one.ask(Describe(), 5)
        go_on.set()
        assert messages.decode_answer(one._socket.recv_multipart(), Facts) == Facts(12)
        assert one.ask(Describe(), 5) == Facts(12)


def test_a_service_that_ends_while_it_is_asked() -> None:
    address = f"127.0.0.1:{free_range('127.0.0.1', 1)}"
    server = Server(address, KEYS, answer, 1)
    with Peer(address, KEYS) as peer:
        assert peer.ask(Describe(), 5) == Facts(12)
        server.close()
        with pytest.raises(ServiceError, match="is gone"):
            peer.ask(Describe(), 5)


def end_while_asked() -> None:
    """As a rank whose scheduler fails in the middle of a copy that waits for it."""
    asked = threading.Event()

    def wait(frames: list[bytes]) -> list[bytes]:
        asked.set()
        threading.Event().wait()
        return []

    address = f"127.0.0.1:{free_range('127.0.0.1', 1)}"
    Server(address, KEYS, wait, 2)
    peer = Peer(address, KEYS)
    peer._socket.send_multipart(encode_question(Describe()))
    assert asked.wait(10)
    print("asked", flush=True)


def test_a_process_that_ends_does_not_wait_for_what_is_asked() -> None:
    code = f"from {__name__} import end_while_asked; end_while_asked()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        timeout=20,
    )
    assert (ended.returncode, ended.stdout) == (0, b"asked\n")


def test_a_port_that_is_taken() -> None:
    with served(answer) as address, pytest.raises(OSError, match="cannot answer ranks on"):
        Server(address, KEYS, answer, 1)
