"""What is asked of every server at once: their loads, their metrics, to flush their caches."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from vertumnus_router.io.fleet import Link
from vertumnus_router.io.router import Router

_TIMEOUT_S = 120.0
#: sglang-router's word for a load that is not known.
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` None: there was no answer, and ``body`` says why."""

    url: str
    status: int | None
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status is not None and self.status < 400


async def ask_all(
    router: Router,
    method: str,
    path: str,
    *,
    query: str = "",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> Sequence[Answer]:
    """Ask every server that is here, at once."""
    links: list[Link] = [*router.pools, *router.decodes]
    urls = [link.url for link in links if link.visit is not None]

    async def ask(url: str) -> Answer:
        try:
            async with router.session.request(
                method,
                url + path,
                params=query,
                headers=headers,
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            ) as answer:
                return Answer(url, answer.status, await answer.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            return Answer(url, None, str(exc or type(exc).__name__).encode())

    return await asyncio.gather(*map(ask, urls))


async def loads(router: Router) -> dict[str, Any]:
    """``GET /get_loads``: tokens of the requests that each server has."""
    headers = router.asking_header()
    answers = await ask_all(router, "GET", "/v1/loads", query="include=core", headers=headers)
    return {"workers": [{"worker": one.url, "load": _load(one)} for one in answers]}


def _load(answer: Answer) -> int:
    if not answer.ok:
        return _UNKNOWN
    try:
        ranks = orjson.loads(answer.body)["loads"]
        return sum(int(rank["num_total_tokens"]) for rank in ranks)
    except (ValueError, KeyError, TypeError):
        return _UNKNOWN


def flushed(answers: Sequence[Answer]) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to ``/flush_cache``, from those of the servers."""
    done = sum(one.ok for one in answers)
    worst = max((one.status or 502 for one in answers), default=200)
    message = (
        f"Successfully flushed cache on all {done} HTTP workers"
        if done == len(answers)
        else f"{len(answers) - done} of {len(answers)} HTTP workers did not flush their cache"
    )
    return worst, {
        "status": "success" if done == len(answers) else "failure",
        "message": message,
        "workers_flushed": done,
        "total_http_workers": len(answers),
        "total_workers": len(answers),
        "answers": {one.url: one.body.decode("utf-8", "replace").strip() for one in answers},
    }


async def engine_metrics(router: Router) -> bytes:
    """``GET /engine_metrics``: the metrics of all servers, told apart by ``worker_addr``."""
    headers = router.key_header()
    answers = await ask_all(router, "GET", "/metrics", headers=headers)
    return merged((one.url, one.body) for one in answers if one.ok)


def merged(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """One exposition of several: each family once, a colon in a name as an underscore."""
    families: dict[str, list[str]] = {}
    told: dict[str, list[str]] = {}
    for url, text in expositions:
        label = 'worker_addr="' + url.replace("\\", "").replace('"', "") + '"'
        family = ""
        for line in text.decode("utf-8", "replace").splitlines():
            words = line.split(" ", 3)
            if line.startswith(("# HELP ", "# TYPE ")) and len(words) > 3:
                family = words[2].replace(":", "_")
                about = told.setdefault(family, [])
                rest = f"{words[0]} {words[1]} {family} {words[3]}"
                if rest not in about and not any(one.startswith(rest[:6]) for one in about):
                    about.append(rest)
            elif line and not line.startswith("#"):
                families.setdefault(family, []).append(_labelled(line, label))
    lines = [line for name, samples in families.items() for line in (*told.get(name, ()), *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name.replace(':', '_')}{{{label}{',' if rest[:1] != '}' else ''}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name.replace(':', '_')}{{{label}}} {value}"
