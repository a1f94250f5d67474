"""Another degree for a running service: in place, and by restarting the server.

The restart is what an operator does with a server whose degree is fixed: stop it, start it
with the other degree. Both arms serve the same model on the same machine under the same load,
whose clients ask the front itself and never again.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sgl_vertumnus.demo.servers import Server, pool
from vertumnus_bench.client import Streams, open_loop, running
from vertumnus_bench.figures import say
from vertumnus_bench.moves import reconfigure
from vertumnus_bench.stream import causes, tally
from vertumnus_bench.switching import DEGREES, SIZE
from vertumnus_bench.workload import Phase, Tokens, arrivals, random_tokens

BEFORE, AFTER = "2x2", "1x4"
_PAGE_TOKENS = 16
_QUESTION_TOKENS = 32
_LONGER_THAN_ANY_RESTART_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    documents: int = 8
    document_tokens: int = 1600
    #: Cold prompts, so that the load does not bring the documents back.
    rate_per_s: float = 4.0
    load_tokens: tuple[int, int] = (100, 600)
    load_new_tokens: int = 16
    #: Of undisturbed load before and after.
    around_s: float = 3.0
    seed: int = 5

    @property
    def load(self) -> list[Phase]:
        return [
            Phase(
                seconds=_LONGER_THAN_ANY_RESTART_S,
                rate_per_s=self.rate_per_s,
                tokens=self.load_tokens,
                new_tokens=self.load_new_tokens,
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """``seconds``: until a request was answered in the new shape. ``hits_kept``: the share of
    the documents' tokens, all cached before, that was cached after."""

    seconds: float
    hits_kept: float
    streams: Streams

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 3),
            "requests": len(self.streams),
            "failed": tally(self.streams)["lost"],
            "hits_kept": round(self.hits_kept, 4),
            "causes": causes(self.streams),
        }


def compare(model: Path, flags: Sequence[str], plan: RestartPlan) -> dict[str, Any]:
    """Both arms, one after the other."""
    with _pool(model, BEFORE, flags, router=True) as server:
        in_place = _change(server, plan, lambda: _moved(server))
    say(f"restart: in place {in_place.figures()}")
    with ExitStack() as old, ExitStack() as new:
        server = old.enter_context(_pool(model, BEFORE, flags, router=False))

        def restart() -> Server:
            old.close()
            return new.enter_context(_pool(model, AFTER, flags, router=False))

        restarted = _change(server, plan, restart)
    say(f"restart: by restarting {restarted.figures()}")
    return {
        "from": BEFORE,
        "to": AFTER,
        "rate_per_s": plan.rate_per_s,
        "in_place": in_place.figures(),
        "restart": restarted.figures(),
    }


def _change(server: Server, plan: RestartPlan, change: Callable[[], Server]) -> Change:
    """``change`` under load; it returns the server that has the new shape."""
    serving = [server]
    source = Random(plan.seed)
    documents = [random_tokens(source, plan.document_tokens) for _ in range(plan.documents)]
    _ask(server, documents)
    schedule = arrivals(plan.load, plan.seed)
    with running(lambda stop: open_loop(lambda: serving[-1].url, schedule, stop)) as load:
        time.sleep(plan.around_s)
        began = time.perf_counter()
        serving.append(change())
        _ask(serving[-1], [random_tokens(source, _QUESTION_TOKENS)])
        seconds = time.perf_counter() - began
        time.sleep(plan.around_s)
    asked_again = [document + random_tokens(source, _QUESTION_TOKENS) for document in documents]
    cached = _ask(serving[-1], asked_again)
    whole_pages = plan.document_tokens // _PAGE_TOKENS * _PAGE_TOKENS
    return Change(
        seconds=seconds,
        hits_kept=cached / (plan.documents * whole_pages),
        streams=load.result,
    )


def _moved(server: Server) -> Server:
    for move in reconfigure(server.router_url or "", AFTER):
        if not move.committed:
            raise RuntimeError(f"to {move.after}: {move.outcome}, {move.reason}")
    return server


def _ask(server: Server, prompts: Iterable[Tokens]) -> int:
    """One after the other; how many tokens of them were cached."""
    cached = 0
    for prompt in prompts:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        cached += server.post("/generate", body)["meta_info"]["cached_tokens"]
    return cached


def _pool(
    model: Path, composition: str, flags: Sequence[str], *, router: bool
) -> AbstractContextManager[Server]:
    return pool(
        model, size=SIZE, degrees=DEGREES, composition=composition, router=router, flags=flags
    )
