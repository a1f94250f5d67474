"""What the ranks of a pool report of their prefills, for a caller that waits for one of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import zmq
from vertumnus_router.clock import WallClock
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    REPORT_TOPIC,
    PoolDescription,
    PrefillDone,
    PrefillFinished,
    ProtocolError,
    RankState,
    decode_report,
)

#: A rank that can be heard is, in this time.
HEARD_S = 2.5 * HEARTBEAT_S
_POLL_MS = 100
_WILDCARDS = ("", "*", "0.0.0.0")


class PrefillReports:
    """Finished prefills by request id, and how many were not this profiler's."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._done: dict[str, PrefillDone] = {}
        self._foreign = 0
        self._heard = False
        self._news = threading.Condition()

    @property
    def foreign(self) -> int:
        """Prefills of somebody else so far."""
        with self._news:
            return self._foreign

    def heard(self, timeout_s: float) -> bool:
        """Whether the leader at rank 0 is heard, now or within ``timeout_s``."""
        with self._news:
            return self._news.wait_for(lambda: self._heard, timeout_s)

    def take(self, rid: str, timeout_s: float) -> PrefillDone | None:
        """The report of one prefill, None if it does not come."""
        with self._news:
            self._news.wait_for(lambda: rid in self._done, timeout_s)
            return self._done.pop(rid, None)

    def on_report(self, report: object) -> None:
        with self._news:
            if isinstance(report, RankState) and report.rank == 0:
                self._heard = True
            elif isinstance(report, PrefillFinished):
                for done in report.done:
                    if done.rid.startswith(self._prefix):
                        self._done[done.rid] = done
                    else:
                        self._foreign += 1
            self._news.notify_all()


@contextmanager
def prefill_reports(
    description: PoolDescription, front_url: str, prefix: str
) -> Iterator[PrefillReports | None]:
    """Those of the pool, read on a thread; None when rank 0 cannot be heard. Request ids that
    begin with ``prefix`` are the caller's own."""
    host = description.reports.host
    if host is None or host in _WILDCARDS:
        host = urlsplit(front_url).hostname or "127.0.0.1"
    found = PrefillReports(prefix)
    stop = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    base = description.reports.port_base
    urls = [f"tcp://{host}:{base + rank}" for rank in range(description.pool_size)]
    thread = threading.Thread(target=_read, args=(context, urls, found, stop), daemon=True)
    thread.start()
    try:
        yield found if found.heard(HEARD_S) else None
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


def own_prefix(clock: WallClock) -> str:
    """For the request ids of one run; another one for every run."""
    return f"profile-{int(clock.now() * 1e6):x}-"


def _read(
    context: "zmq.Context[zmq.Socket[bytes]]",
    urls: list[str],
    found: PrefillReports,
    stop: threading.Event,
) -> None:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.subscribe(REPORT_TOPIC)
    for url in urls:
        socket.connect(url)
    while not stop.is_set():
        if socket.poll(_POLL_MS):
            try:
                found.on_report(decode_report(socket.recv_multipart()))
            except ProtocolError:
                continue  # a router would say so; here the prefill is missing, and that is said
    socket.close(linger=0)
