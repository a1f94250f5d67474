"""What a prompt costs the router before it is placed: at first, and at the next turn.

    python benchmarks/tokenisation.py [--model DIR] [--json]

The embedded model's tokenizer, or that in DIR; text of made-up words; the machine at hand. The time
is that of the whole way, from the bytes of the body to tokens and block hashes, on the event loop
and the service's threads. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

import orjson
from vertumnus_bench.figures import say
from vertumnus_router.io.client_request import Endpoint, parse
from vertumnus_router.io.prompt import Prompt, PromptRules, tokenise
from vertumnus_router.io.tokenize import TokenizeService
from vertumnus_router.io.tokenizer_files import ModelTokenizer, load

from sgl_vertumnus.demo import embedded_model

SIZES = (1024, 8 * 1024, 64 * 1024)
#: Of the user, and of the assistant: a turn adds two of them.
_MESSAGE_TOKENS = 256
_ROUNDS = 5
_RULES = PromptRules(served_name="m", block_tokens=64, context_tokens=1 << 20)
_CACHE_BYTES = 128 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory with a tokenizer and a chat template")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="TOKENS")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    options = parser.parse_args()
    model = load(options.model or str(embedded_model.prepare()), None)
    rows = {str(size): asyncio.run(measure(model, size)) for size in options.sizes}
    if not options.json:
        for size, row in rows.items():
            say(f"{size:>6} tokens  {row}")
    print(json.dumps(rows))


async def measure(model: ModelTokenizer, size_tokens: int) -> dict[str, Any]:
    """Medians over conversations of that size that share nothing."""
    cold_ms: list[float] = []
    next_ms: list[float] = []
    next_cpu_ms: list[float] = []
    reused = worked = 0
    for seed in range(_ROUNDS):
        service = TokenizeService(threads=1, deadline_s=600, cache_bytes=_CACHE_BYTES)
        service.use(model, _RULES)
        first, second = _turns(model, size_tokens, random.Random(seed))
        took_ms, _, _ = await _timed(service, first)
        cold_ms.append(took_ms)
        before = service.cache.reused_bytes, service.cache.worked_bytes
        took_ms, cpu_ms, prompt = await _timed(service, second)
        next_ms.append(took_ms)
        next_cpu_ms.append(cpu_ms)
        reused = service.cache.reused_bytes - before[0]
        worked = service.cache.worked_bytes - before[1]
        if prompt != tokenise(parse(Endpoint.CHAT, second), model, _RULES):
            sys.exit("the cache changed what a prompt is")
        service.close()
    return {
        "cold_ms": round(statistics.median(cold_ms), 2),
        "next_turn_ms": round(statistics.median(next_ms), 2),
        "next_turn_worst_ms": round(max(next_ms), 2),
        "next_turn_cpu_ms": round(statistics.median(next_cpu_ms), 2),
        "hit_bytes": reused,
        "miss_bytes": worked,
        "cache_bytes": service.cache.size_bytes,
    }


def _turns(model: ModelTokenizer, size_tokens: int, source: random.Random) -> tuple[bytes, bytes]:
    """The body of a conversation of about that size, and of the turn after it."""
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(2, 7))) for _ in range(2000)]
    sample = " ".join(source.choices(words, k=1000))
    words_of_message = round(1000 * _MESSAGE_TOKENS / len(model.encode(sample, special=False)))
    messages: list[dict[str, str]] = []

    def say_something(role: str) -> None:
        content = " ".join(source.choices(words, k=words_of_message))
        messages.append({"role": role, "content": content})

    say_something("user")
    while (len(messages) + 2) * _MESSAGE_TOKENS <= size_tokens:
        say_something("assistant")
        say_something("user")
    first = orjson.dumps({"model": "m", "messages": messages})
    say_something("assistant")
    say_something("user")
    return first, orjson.dumps({"model": "m", "messages": messages})


async def _timed(service: TokenizeService, body: bytes) -> tuple[float, float, Prompt]:
    """Milliseconds on the clock, and of CPU in all threads."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    prompt = await service.prompt(parse(Endpoint.CHAT, body))
    cpu_s = time.process_time() - began_cpu_s
    return 1000 * (time.perf_counter() - began_s), 1000 * cpu_s, prompt


if __name__ == "__main__":
    main()
