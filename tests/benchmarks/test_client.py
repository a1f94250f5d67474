"""The load's client against a server that misbehaves on purpose."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from vertumnus_bench.client import closed_loop, conversations, flat, open_loop, running
from vertumnus_bench.stream import Stream, tally
from vertumnus_bench.workload import Arrival, Ask, Leave, Mix

CUT, REFUSED, SILENT = 11, 12, 13


class Engine(BaseHTTPRequestHandler):
    """Answers like ``/generate``; the first token of the prompt says how."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how, wanted = body["input_ids"][0], body["sampling_params"]["max_new_tokens"]
        self.send_response(503 if how == REFUSED else 200)
        self.end_headers()
        if how == REFUSED:
            return
        if how == SILENT:
            self.server.released.wait(30)  # type: ignore[attr-defined]
            return
        for count in range(1, wanted + 1):
            if how == CUT and count == wanted:
                return
            self._event(
                {
                    "output_ids": list(range(count)),
                    "meta_info": {
                        "prompt_tokens": len(body["input_ids"]),
                        "cached_tokens": 0,
                        "completion_tokens": count,
                        "finish_reason": {"type": "length"} if count == wanted else None,
                    },
                }
            )
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def ask_once(url: str, ask: Ask) -> Stream:
    (stream,) = asyncio.run(open_loop(lambda: url, [Arrival(0.0, ask)], threading.Event()))
    return stream


def test_a_whole_answer(url: str) -> None:
    stream = ask_once(url, Ask((50, 51), 4))
    assert (stream.output, stream.faults) == ([0, 1, 2, 3], [])
    assert stream.prompt_tokens == 2
    assert stream.first_s is not None and 0 < stream.first_s <= stream.total_s


@pytest.mark.parametrize(
    ("how", "cause"), [(CUT, "stopped after 3 tokens"), (REFUSED, "503"), (None, "Connect")]
)
def test_what_fails_is_lost_and_says_why(url: str, how: int | None, cause: str) -> None:
    stream = ask_once("http://127.0.0.1:9" if how is None else url, Ask((how or 50,), 4))
    assert tally([stream])["lost"] == 1
    assert cause in stream.faults[0][1]


@pytest.mark.parametrize(
    "ask", [Ask((50,), 8, Leave(after_events=2)), Ask((SILENT,), 8, Leave(after_s=0.1))]
)
def test_leaving_is_not_a_fault(url: str, ask: Ask) -> None:
    stream = ask_once(url, ask)
    assert stream.left and stream.faults == []
    assert len(stream.output) == (2 if ask.leave and ask.leave.after_events else 0)


def test_what_is_open_when_nothing_comes_any_more_hangs(url: str) -> None:
    schedule = [Arrival(0.0, Ask((how,), 4)) for how in (50, SILENT, CUT)]
    with running(lambda stop: open_loop(lambda: url, schedule, stop, quiet_s=0.3)) as load:
        time.sleep(0.6)  # not quiet yet: there may be more to come
    whole, silent, cut = load.result
    assert [tally([one])["hung"] for one in (whole, silent, cut)] == [0, 1, 0]
    assert 0.8 < silent.total_s < 5
    assert whole.faults == [] and tally([cut])["lost"] == 1


def test_a_closed_loop_asks_each_client_as_often_as_told(url: str) -> None:
    mix = Mix(clients=3, documents=1, disconnects=0.0)
    asked = [4, 0, 2]
    found = asyncio.run(closed_loop(url, conversations(mix, 1), lambda n, done: done < asked[n]))
    assert [len(streams) for streams in found] == asked
    assert tally(flat(found)) == dict.fromkeys(("lost", "hung", "duplicated", "wrong"), 0)


def test_a_running_load_stops_when_told_and_hands_over_what_it_saw(url: str) -> None:
    schedule = [Arrival(0.0, Ask((50,), 2)), Arrival(3600.0, Ask((50,), 2))]
    with running(lambda stop: open_loop(lambda: url, schedule, stop)) as load:
        pass
    assert len(load.result) <= 1
