"""Copies of cached prefixes between real ranks, against computing the same prefix again."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.error import HTTPError

from vertumnus_router.io.hashing import block_hashes

from sgl_vertumnus.demo.servers import Server, fetch
from vertumnus_bench.figures import say
from vertumnus_bench.pool_state import until
from vertumnus_bench.workload import Tokens, random_tokens

COMPOSITION = "2x1,1x2"
PAGE_TOKENS = 16
#: In ``COMPOSITION``: where a prefix is computed, where it is copied to; (lowest rank, degree).
PATHS = (((0, 1), (1, 1)), ((0, 1), (2, 2)), ((2, 2), (0, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    lengths: tuple[int, ...] = (1024, 4096)
    rounds: int = 5
    #: of prefills with and without a copy beside them
    beside: int = 8
    beside_tokens: int = 1024


QUICK = CopyPlan(lengths=(256,), rounds=1, beside=1, beside_tokens=256)


class Prefixes:
    """Prompts at the ranks of a pool in ``COMPOSITION``, behind a router with ``/replicate``."""

    def __init__(self, server: Server, seed: int = 5) -> None:
        self._server = server
        self._router = server.router_url or ""
        self._pool = str(server.get("/vertumnus/pool")["pool_id"])
        self.token_bytes = int(server.get("/vertumnus/pool")["kv_service"]["token_bytes"])
        self._source = Random(seed)

    def prompt(self, tokens: int) -> Tokens:
        """One that nobody has seen."""
        return random_tokens(self._source, tokens)

    def prefill_s(self, prompt: Sequence[int], rank: int) -> float:
        """How long its first token takes at the block of ``rank``."""
        began = time.perf_counter()
        self._generate(prompt, rank)
        return time.perf_counter() - began

    def cached(self, prompt: Sequence[int], rank: int) -> int:
        """How many of its tokens the block of ``rank`` has not computed again."""
        return int(self._generate(prompt, rank)["meta_info"]["cached_tokens"])

    def replicate(self, prompt: Sequence[int], to: tuple[int, int]) -> dict[str, Any]:
        """Copy what is cached of the prompt's full pages to a worker, once the router knows of
        it. ``RuntimeError`` when that did not succeed."""
        first, degree = to
        tip = block_hashes(prompt, PAGE_TOKENS)[-1]
        body = {"tip": str(tip), "worker": f"{self._pool}/{first}x{degree}"}
        refusals: list[str] = []
        answers: list[dict[str, Any]] = []

        def taken() -> bool:
            try:
                answers.append(fetch(f"{self._router}/vertumnus/replicate", body))
            except HTTPError as exc:
                refusals.append(exc.read().decode())
                return False
            return True

        try:
            until("the copy was taken", taken, limit_s=10)
        except TimeoutError as exc:
            raise RuntimeError(f"replicate was refused: {refusals[-1]}") from exc
        if answers[0]["outcome"] != "done":
            raise RuntimeError(f"the copy was not done: {answers[0]}")
        return answers[0]

    def _generate(self, prompt: Sequence[int], rank: int) -> dict[str, Any]:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "routed_dp_rank": rank,
        }
        answer: dict[str, Any] = self._server.post("/generate", body)
        return answer


def measure(server: Server, plan: CopyPlan) -> list[dict[str, Any]]:
    """One row for every path and length, seconds. ``copy_s`` is from the operator's order to its
    end; ``first_use_s`` the prefill of one more token behind the copy, which takes it to the
    other ranks of the block first. Raises where a copy moved other bytes than it had to, or is
    no prefix hit afterwards."""
    prefixes = Prefixes(server)
    rows = []
    for tokens in plan.lengths:
        for source, destination in PATHS:
            copies, computed = [], []
            for _ in range(plan.rounds):
                copies.append(_copy(prefixes, tokens, source[0], destination))
                computed.append(prefixes.prefill_s(prefixes.prompt(tokens), destination[0]))
            copy_s = statistics.median(copy["seconds"] for copy in copies)
            transfer_s = statistics.median(c["transfers"][0]["transfer_s"] for c in copies)
            row = {
                "tokens": tokens,
                "from_degree": source[1],
                "to_degree": destination[1],
                "copy_s": round(copy_s, 4),
                "recompute_s": round(statistics.median(computed), 4),
                "first_use_s": round(statistics.median(copy["first_use_s"] for copy in copies), 4),
                "gbps": round(copies[0]["bytes"] / transfer_s / 1e9, 3),
                "gbps_of_the_whole_copy": round(copies[0]["bytes"] / copy_s / 1e9, 3),
                "mb": round(copies[0]["bytes"] / 1e6, 2),
                "n": plan.rounds,
            }
            say(f"copy: {row}")
            rows.append(row)
    return rows


def _copy(
    prefixes: Prefixes, tokens: int, source: int, destination: tuple[int, int]
) -> dict[str, Any]:
    """A prefix whose first half the destination has: the other half is what moves."""
    prompt = prefixes.prompt(2 * tokens)
    prefixes.prefill_s(prompt[:tokens], destination[0])
    prefixes.prefill_s(prompt, source)
    answer = prefixes.replicate(prompt, destination)
    due = tokens * prefixes.token_bytes
    if answer["bytes"] != due:
        raise RuntimeError(f"{answer['bytes']} bytes moved, {due} were missing: {answer}")
    began = time.perf_counter()
    hit = prefixes.cached((*prompt, 7), destination[0])
    if hit != 2 * tokens:
        raise RuntimeError(f"{hit} tokens are hits after a copy of {2 * tokens}")
    return {**answer, "first_use_s": time.perf_counter() - began}


def beside(server: Server, plan: CopyPlan) -> dict[str, Any]:
    """What a copy into a rank costs the prefill that runs there meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    prefixes = Prefixes(server, seed=6)
    alone: list[float] = []
    disturbed: list[float] = []
    copying: list[float] = []
    tokens = plan.beside_tokens
    with ThreadPoolExecutor(1) as other:
        for _ in range(plan.beside):
            alone.append(prefixes.prefill_s(prefixes.prompt(tokens), 0))
            ready = prefixes.prompt(tokens)
            prefixes.prefill_s(ready, 1)
            prefixes.replicate(ready, (2, 2))  # by now the router knows of it
            running = other.submit(prefixes.prefill_s, prefixes.prompt(tokens), 0)
            copying.append(prefixes.replicate(ready, (0, 1))["seconds"])
            disturbed.append(running.result())
    return {
        "alone_s": round(statistics.median(alone), 4),
        "beside_a_copy_s": round(statistics.median(disturbed), 4),
        "copy_s": round(statistics.median(copying), 4),
        "slower_pct": round(100 * (statistics.median(disturbed) / statistics.median(alone) - 1), 1),
        "tokens": tokens,
        "n": plan.beside,
    }
