"""What a pool costs and what a larger degree buys, on the machine at hand.

    python benchmarks/pool.py [--json] [--quick]

Every ratio comes from requests that alternate between the two sides in one run. Run it on
idle cores; the last line is one JSON object.
"""

import argparse
import http.client
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sgl_vertumnus import processes
from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.random_model import RandomModelSpec, write_random_model
from sgl_vertumnus.demo.servers import Server, plain, pool

TTFT_TOKENS = (64, 256, 1024, 4096, 8192)
IDLE_S = 20.0
FP32 = ("--dtype", "float32")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


#: Servers close connections that were idle for longer.
KEEP_ALIVE_S = 2.0


class Client:
    """One keep-alive connection; prompts never repeat, so that every prefill is cold."""

    def __init__(self, url: str, seed: int) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=600
        )
        self._used_at = 0.0
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(50, 40000) for _ in range(tokens)]

    def seconds(
        self, prompt: Sequence[int], new_tokens: int = 1, rank: int | None = None
    ) -> tuple[float, float]:
        """(to the first event, to the end) of one streamed request."""
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }
        if rank is not None:
            body["routed_dp_rank"] = rank
        if time.perf_counter() - self._used_at > KEEP_ALIVE_S:
            self._connection.close()
            self._connection.connect()
        started = time.perf_counter()
        self._connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
        answer.read1(1)
        first_s = time.perf_counter() - started
        answer.read()
        self._used_at = time.perf_counter()
        return first_s, self._used_at - started


def paired_ratio(
    slow: Callable[[], float], fast: Callable[[], float], rounds: int
) -> dict[str, float]:
    """slow/fast of alternating runs: the ratio of medians, and the medians in seconds."""
    slow_s, fast_s = [], []
    for _ in range(rounds):
        slow_s.append(slow())
        fast_s.append(fast())
    a, b = statistics.median(slow_s), statistics.median(fast_s)
    return {"ratio": a / b, "slow_s": a, "fast_s": b}


def start_up(model: Path, runs: int) -> dict[str, Any]:
    """Four ranks of the embedded model: readiness, memory after one answer, idle CPU."""
    ready_s, pss_gib, idle_pct = [], [], []
    for run in range(runs):
        with pool(model, size=4, degrees=(1, 2), composition="2x1,1x2") as server:
            Client(server.router_url or "", run).seconds([50, 51, 52], 4)
            ready_s.append(server.ready_s)
            pss_gib.append(processes.pss_bytes(server.family) / 2**30)
            before = processes.cpu_s(server.family)
            time.sleep(IDLE_S)
            idle_pct.append((processes.cpu_s(server.family) - before) / IDLE_S * 100)
        say(f"ready {ready_s[-1]:.1f} s, {pss_gib[-1]:.2f} GiB, idle {idle_pct[-1]:.1f} %")
    return {
        "ready_s": statistics.median(ready_s),
        "pss_gib": statistics.median(pss_gib),
        "idle_core_pct": statistics.median(idle_pct),
        "ready_runs_s": ready_s,
    }


@contextmanager
def two_degrees(model: Path) -> Iterator[Server]:
    """A degree-2 worker on ranks 0 and 1, a degree-1 worker on rank 2, one thread a rank."""
    with pool(
        model,
        size=3,
        degrees=(1, 2),
        composition="1x2,1x1",
        router=False,
        flags=(*FP32, "--max-total-tokens", "65536"),
    ) as server:
        yield server


def cp_speedup(server: Server, lengths: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """TTFT at degree 1 over degree 2, by prompt length in tokens."""
    client = Client(server.url, seed=1)
    result = {}
    for length in lengths:
        for rank in (0, 2):
            client.seconds(client.prompt(length), rank=rank)

        def ttft(rank: int, length: int = length) -> float:
            return client.seconds(client.prompt(length), rank=rank)[0]

        result[str(length)] = paired_ratio(lambda: ttft(2), lambda: ttft(0), rounds)
        say(f"TTFT at {length} tokens, degree 1 over 2: {result[str(length)]}")
    return result


def decode_ratio(model: Path, rounds: int, new_tokens: int = 48) -> dict[str, float]:
    """Decode speed of a degree-1 worker over plain SGLang's. Both servers run, one works."""
    flags = (*FP32, "--max-total-tokens", "16384")
    with (
        pool(model, size=2, degrees=(1, 2), composition="2x1", router=False, flags=flags) as ours,
        plain(model, flags=flags) as theirs,
    ):
        mine, other = Client(ours.url, 1), Client(theirs.url, 1)

        def per_token(client: Client, rank: int | None) -> float:
            first_s, total_s = client.seconds(client.prompt(64), new_tokens, rank)
            return (total_s - first_s) / (new_tokens - 1)

        per_token(mine, 0), per_token(other, None)
        result = paired_ratio(lambda: per_token(other, None), lambda: per_token(mine, 0), rounds)
    say(f"decode, plain SGLang over degree 1: {result}")
    return result


def router_overhead(model: Path, requests: int) -> dict[str, float]:
    """Router CPU per short request, and what it adds to the first event, against the front."""
    with pool(model, size=2, degrees=(1, 2), composition="2x1", flags=FP32) as server:
        through, direct = Client(server.router_url or "", 1), Client(server.url, 1)
        router = [p for p in server.family if "launch_router" in command_line(p.pid)]
        for client in (through, direct):
            for _ in range(10):
                client.seconds(client.prompt(8))
        before = run_time_s(router)
        added = []
        for turn in range(requests):
            prompt = through.prompt(8)
            # The second of a pair finds the prefix cached: take turns.
            pair = (through, direct) if turn % 2 else (direct, through)
            first = {client: client.seconds([turn % 50 + 50, *prompt])[0] for client in pair}
            added.append(first[through] - first[direct])
        cpu_us = (run_time_s(router) - before) / requests * 1e6
    result = {"cpu_us": cpu_us, "added_ttft_ms": statistics.median(added) * 1e3}
    say(f"router: {result}")
    return result


def run_time_s(family: Sequence[processes.Process]) -> float:
    """Time on a core of all threads, by the scheduler's clock: ticks are too coarse here."""
    nanoseconds = 0
    for process in family:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def kernel() -> dict[str, Any]:
    """``benchmarks/kernel.py``, in this process."""
    spec = importlib.util.spec_from_file_location("kernel", Path(__file__).with_name("kernel.py"))
    if spec is None or spec.loader is None:
        raise ImportError("benchmarks/kernel.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    measured: dict[str, Any] = module.measure()
    return measured


def measure(*, quick: bool) -> dict[str, Any]:
    """All figures; see the keys of the last line."""
    rounds = 3 if quick else 7
    embedded = embedded_model.prepare()
    kernel_figures = kernel()
    started = start_up(embedded, 1 if quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        busy, tiny = Path(folder, "busy"), Path(folder, "tiny")
        tokenizer = embedded  # a vocabulary of usual size
        write_random_model(busy, RandomModelSpec(hidden=512, layers=6), tokenizer)
        small = RandomModelSpec(hidden=128, layers=2, query_heads=4, kv_heads=2, head_dim=32)
        write_random_model(tiny, small, tokenizer)
        with two_degrees(busy) as server:
            speedup = cp_speedup(server, TTFT_TOKENS, rounds)
        overhead = router_overhead(tiny, 50 if quick else 300)
    with two_degrees(embedded) as server:
        embedded_speedup = cp_speedup(server, (64, 1024), rounds)
    decode = decode_ratio(embedded, rounds)
    return {
        "ready_s": round(started["ready_s"], 1),
        "pss_gib": round(started["pss_gib"], 2),
        "ttft_speedup_cp2": {k: round(v["ratio"], 2) for k, v in speedup.items()},
        "ttft_speedup_cp2_embedded": {k: round(v["ratio"], 2) for k, v in embedded_speedup.items()},
        "decode_ratio": round(decode["ratio"], 3),
        "kernel_speedup": round(kernel_figures["kernel_speedup"], 1),
        "idle_core_pct": round(started["idle_core_pct"], 2),
        "router_cpu_us": round(overhead["cpu_us"]),
        "router_added_ttft_ms": round(overhead["added_ttft_ms"], 2),
        "details": {
            "ready_runs_s": [round(s, 1) for s in started["ready_runs_s"]],
            "ttft": speedup,
            "ttft_embedded": embedded_speedup,
            "decode": decode,
            "kernel": kernel_figures,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, about 5 minutes")
    options = parser.parse_args()
    figures = measure(quick=options.quick)
    if not options.json:
        for name, value in figures.items():
            if name != "details":
                say(f"{name:28} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
