"""A cache of prompts' beginnings changes what they cost, never what they are."""

import asyncio
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.io.client_request import ClientRequest, Endpoint, parse
from vertumnus_router.io.hashing import BlockChain, block_hashes, words_of
from vertumnus_router.io.prefix_cache import PrefixCache
from vertumnus_router.io.prompt import PromptRules, tokenise
from vertumnus_router.io.text_cuts import TextCuts
from vertumnus_router.io.tokenizer_files import ModelTokenizer, load

from tests.router.io.chat_cases import REQUESTS, SMOL, TOOLS, write_model
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running

PLENTY = 2**24
CONTENTS = ["", "a", "<|im_end|>", "<|im_", "end|>\n", "Tell me. ", "\n\n", "12", "é", "🙂 "]
contents = st.lists(st.sampled_from(CONTENTS), max_size=6).map("".join)


def rules(block_tokens: int = 4) -> PromptRules:
    return PromptRules(served_name="m", block_tokens=block_tokens, context_tokens=2**20)


def cutting(model: ModelTokenizer, part_chars: int) -> ModelTokenizer:
    """The same tokenizer, with shorter parts: short texts are then cut as well."""
    cuts = TextCuts.of(model.tokenizer, part_chars)
    assert cuts is not None
    names = ("tokenizer", "chat", "no_chat", "chat_adds_special", "bos_id", "most_chars_per_token")
    return ModelTokenizer(**{name: getattr(model, name) for name in names}, cuts=cuts)


def chat(messages: list[dict[str, Any]], **fields: Any) -> ClientRequest:
    return parse(Endpoint.CHAT, orjson.dumps({"messages": messages, **fields}))


@pytest.fixture(scope="module")
def embedded(embedded_model_path: str) -> ModelTokenizer:
    return cutting(load(embedded_model_path, None), 8)


@settings(max_examples=60)
@given(
    spoken=st.lists(contents, min_size=1, max_size=8),
    other=contents,
    at=st.integers(0, 7),
    block_tokens=st.sampled_from([1, 4, 64]),
    salts=st.lists(st.sampled_from([None, "s", "t"]), min_size=8, max_size=8),
)
def test_conversations_that_go_on_and_branch_off(
    embedded: ModelTokenizer,
    spoken: list[str],
    other: str,
    at: int,
    block_tokens: int,
    salts: list[str | None],
) -> None:
    cache = PrefixCache(PLENTY)
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(spoken)
    ]
    branch = [*messages[:at], {"role": "user", "content": other}, *messages[at + 1 :]]
    turns = [messages[: end + 1] for end in range(len(messages))]
    for salt, turn in zip([*salts, None], [*turns, branch], strict=False):
        request = chat(turn, cache_salt=salt)
        alone = tokenise(request, embedded, rules(block_tokens))
        assert alone.exact
        assert tokenise(request, embedded, rules(block_tokens), cache) == alone


def test_every_kind_of_chat_twice(tmp_path: Path) -> None:
    cache, model = PrefixCache(PLENTY), cutting(load(str(write_model(tmp_path, TOOLS)), None), 4)
    for fields in [*REQUESTS.values(), *REQUESTS.values()]:
        request = parse(Endpoint.CHAT, orjson.dumps(fields))
        assert tokenise(request, model, rules(), cache) == tokenise(request, model, rules())
    assert cache.reused_bytes > cache.worked_bytes / 2


def test_special_tokens_around_a_text_are_in_the_chain(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    model = cutting(load(str(write_model(tmp_path, SMOL, **config)), None), 4)
    request = parse(Endpoint.GENERATE, orjson.dumps({"text": "ab<|im_end|>cd<|im_end|>e"}))
    ids = model.tokenizer.encode("ab<|im_end|>cd<|im_end|>e").ids
    assert ids[0] == model.bos_id
    cache = PrefixCache(PLENTY)
    for _ in range(2):
        found = tokenise(request, model, rules(1), cache)
        assert (found.input_tokens, found.blocks) == (len(ids), block_hashes(ids, 1))
    assert cache.reused_bytes


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.GENERATE])
def test_the_next_turn_works_out_what_is_new_only(
    embedded_model_path: str, endpoint: Endpoint
) -> None:
    model, cache = load(embedded_model_path, None), PrefixCache(PLENTY)
    messages = [{"role": "user", "content": "word " * 500} for _ in range(40)]

    def ask(turn: list[dict[str, str]]) -> None:
        if endpoint is Endpoint.CHAT:
            request = chat(turn)
        else:
            ids = [number for message in turn for number in message["content"].encode()]
            request = parse(endpoint, orjson.dumps({"input_ids": ids}))
        assert tokenise(request, model, rules(), cache) == tokenise(request, model, rules())

    ask(messages)
    assert cache.reused_bytes == 0
    first = cache.worked_bytes
    assert first > 100_000
    ask([*messages, {"role": "user", "content": "and now?"}])
    assert first - 20_000 < cache.reused_bytes <= first
    assert cache.worked_bytes - first < 20_000


# -- the cache itself -----------------------------------------------------------------------------


def ask_for(cache: PrefixCache, *parts: bytes, kind: str = "k", block_tokens: int = 1) -> int:
    """Put parts that are their own token ids into the cache: how many of them it knew."""
    known: list[int] = []

    def words(found: int) -> list[bytes]:
        known.append(found)
        return [words_of(list(part)) for part in parts[found:]]

    start = BlockChain.start(block_tokens)
    chain, blocks = cache.extend(kind, start, parts, words)
    ids = list(b"".join(parts))
    assert (chain.tokens, blocks) == (len(ids), block_hashes(ids, block_tokens))
    return known[0]


def test_what_is_known_of_one_kind_is_not_of_another() -> None:
    cache = PrefixCache(PLENTY)
    assert ask_for(cache, b"ab", b"c") == 0
    assert ask_for(cache, b"ab", b"c") == 1
    assert ask_for(cache, b"ab", b"c", kind="other") == 0
    assert ask_for(cache, b"ab", b"c", block_tokens=2) == 0


def test_the_last_part_is_not_kept() -> None:
    cache = PrefixCache(PLENTY)
    ask_for(cache, b"ab", b"cd")
    assert ask_for(cache, b"ab", b"cd", b"e") == 1


def test_what_was_not_used_for_longest_goes_and_of_one_prompt_its_end() -> None:
    sizes = PrefixCache(PLENTY)
    ask_for(sizes, b"a1", b"a2", b"")
    cache = PrefixCache(3 * sizes.size_bytes // 2)  # three entries
    ask_for(cache, b"a1", b"a2", b"")
    ask_for(cache, b"b1", b"")
    assert ask_for(cache, b"a1", b"") == 1  # used again, so now a2 and b1 are older
    ask_for(cache, b"c1", b"")
    ask_for(cache, b"d1", b"")
    assert cache.size_bytes <= 3 * sizes.size_bytes // 2
    assert ask_for(cache, b"a1", b"a2", b"") == 1
    assert ask_for(cache, b"d1", b"") == 1


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(5000)
    parts = [b"%4d" % number for number in range(1000)]
    ask_for(cache, *parts)
    assert 0 < cache.size_bytes <= 5000
    assert 2 <= ask_for(cache, *parts) < 20


def test_the_size_is_about_what_memory_it_takes() -> None:
    for block_tokens, blocks in ((1, 500), (64, 8), (64, 0)):
        words = bytes(4 * (blocks * block_tokens + block_tokens // 2))
        start, cache = BlockChain.start(block_tokens), PrefixCache(2**40)
        tracemalloc.start()
        try:
            for number in range(60):
                parts = [b"%d" % number, b""]
                cache.extend("k", start, parts, lambda known, words=words: [words, b""])  # type: ignore[misc]
            used_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 0.6 < cache.size_bytes / used_bytes < 1.6


def test_threads_share_it() -> None:
    cache, wrong = PrefixCache(20_000), []

    def work(seed: int) -> None:
        try:
            for number in range(200):
                ask_for(cache, *(b"%d" % ((number + seed + at) % 7) for at in range(6)))
        except Exception as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.size_bytes == sum(one.size_bytes for one in cache._known.values())


# -- in the router --------------------------------------------------------------------------------


def test_a_long_text_does_not_stop_the_event_loop(embedded_model_path: str) -> None:
    """``Tokenizer.encode`` would: it keeps the interpreter lock."""
    model = load(embedded_model_path, None)
    text = "It goes on and on, 123 times. " * 3000

    async def longest_stop() -> float:
        """As a part of the time that it took."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, lambda: model.encode(text, special=False))
        began_s = last_s = time.monotonic()
        longest_s = 0.0
        while not work.done():
            await asyncio.sleep(0.002)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return longest_s / (time.monotonic() - began_s)

    # Another process may stop this one for a while, but hardly each time.
    assert min(asyncio.run(longest_stop()) for _ in range(5)) < 0.6


def test_the_router_says_how_much_it_knew(tmp_path: Path) -> None:
    write_model(tmp_path, SMOL)

    async def scenario() -> None:
        fake = FakePool(1, tokenizer_path=str(tmp_path))
        async with fake as pool, running(pool.url) as it:
            await it.ready()
            first = [{"role": "user", "content": "a long story " * 300}]
            for messages in (first, [*first, {"role": "user", "content": "and?"}]):
                async with await it.chat(messages=messages, max_tokens=2) as response:
                    assert response.status == 200
            samples = await it.samples()
            assert samples["vertumnus_tokenize_reused_bytes_total"] > 3900
            assert samples["vertumnus_tokenize_worked_bytes_total"] < 2 * 3900
            assert samples["vertumnus_tokenize_cache_bytes"] > 0

    run(scenario())
