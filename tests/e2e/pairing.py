"""Both legs of a request without a router: to a prefill pool and to a decode server."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import urlencode

from sgl_vertumnus.demo.servers import Server, fetch
from tests.e2e.moving import body

FLAGS = ("--disaggregation-mode", "prefill")
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Legs:
    rid: str
    prefill: Future[dict[str, Any]]
    decode: Future[dict[str, Any]]

    def answer(self) -> dict[str, Any]:
        """The decode server's; both legs must have ended well."""
        answers = [leg.result(TIMEOUT_S) for leg in (self.prefill, self.decode)]
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["length", "length"], reasons
        return answers[1]


class Pair:
    """A pool and a decode server."""

    def __init__(self, pool: Server, decode: Server) -> None:
        self.pool, self.decode = pool, decode
        self._port = pool.get("/vertumnus/pool")["prefill"]["bootstrap_port"]
        self._bootstrap = f"http://127.0.0.1:{self._port}"
        self._size = pool.get("/vertumnus/pool")["pool_size"]
        self._numbers = count(1)  # SGLang takes room 0 for none
        self._clients = ThreadPoolExecutor(64)

    def begin(self, prompt: Sequence[int], home: int, **more: Any) -> Legs:
        """Send both legs."""
        request = self.request(prompt, home, **more)
        return Legs(
            request["rid"],
            self._clients.submit(self.send, self.pool, request),
            self._clients.submit(self.send, self.decode, decode_leg(request)),
        )

    def generate(self, prompt: Sequence[int], home: int, **more: Any) -> dict[str, Any]:
        return self.begin(prompt, home, **more).answer()

    def request(self, prompt: Sequence[int], home: int, **more: Any) -> dict[str, Any]:
        """The prefill leg's body."""
        number = next(self._numbers)
        return body(prompt, home, **more) | {
            "rid": f"pair-{number:06d}",
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": number * self._size + home,
            "disagg_prefill_dp_rank": home,
        }

    def registered(self) -> list[Any]:
        """What the bootstrap server tells decode servers: of the pool, and of each rank."""
        asked = [(-1, -1, -1), *((rank, 0, 0) for rank in range(self._size))]
        return [fetch(f"{self._bootstrap}/route?{_rows(*one)}") for one in asked]

    @staticmethod
    def send(server: Server, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = fetch(f"{server.url}/generate", request, TIMEOUT_S)
        return answer

    def abort(self, rid: str) -> None:
        for server in (self.pool, self.decode):
            fetch(f"{server.url}/abort_request", {"rid": rid})


def _rows(rank: int, cp_rank: int, other: int) -> str:
    names = {"prefill_dp_rank": rank, "prefill_cp_rank": cp_rank}
    return urlencode(names | {"target_tp_rank": other, "target_pp_rank": other})


def decode_leg(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "routed_dp_rank"}
