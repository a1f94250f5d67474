"""Prompts: exact where SGLang's can be rebuilt, an honest estimate where not."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from vertumnus_router.io import tokenize
from vertumnus_router.io.chat_template import ChatTemplate
from vertumnus_router.io.client_request import Endpoint, parse
from vertumnus_router.io.config import Limits
from vertumnus_router.io.hashing import block_hashes
from vertumnus_router.io.prompt import Prompt, PromptRules, tokenise
from vertumnus_router.io.tokenizer_files import ModelTokenizer, TokenizerError, load

from tests.router.io.chat_cases import (
    CONTEXT_TOKENS,
    REQUESTS,
    SMOL,
    TEMPLATES,
    WEATHER,
    write_model,
)
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running, until

#: Far more than the deadline of a prompt, on a slow machine as well.
SLOW_S = 2.5
RULES = PromptRules(served_name="m", block_tokens=4, context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(str(write_model(tmp_path_factory.mktemp("model"), SMOL)), None)


def prompt(model: ModelTokenizer, endpoint: Endpoint, /, **fields: Any) -> Prompt:
    return tokenise(parse(endpoint, orjson.dumps(fields)), model, RULES)


def ask(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_text_and_ids_are_counted_and_hashed(model: ModelTokenizer) -> None:
    text = prompt(model, Endpoint.GENERATE, text="0123456789")
    ids = model.tokenizer.encode("0123456789").ids
    assert text == Prompt(10, block_hashes(ids, 4), exact=True)
    assert len(text.blocks) == 2
    assert prompt(model, Endpoint.GENERATE, input_ids=ids) == text
    assert prompt(model, Endpoint.COMPLETIONS, prompt="0123456789") == text
    assert prompt(model, Endpoint.COMPLETIONS, prompt=ids) == text
    assert prompt(model, Endpoint.CHAT, **ask(), input_ids=ids) == text
    # SGLang prefers ids where both are given.
    assert prompt(model, Endpoint.GENERATE, text="other", input_ids=ids) == text


def test_chat_prompts_share_their_prefix_blocks(model: ModelTokenizer) -> None:
    short = prompt(model, Endpoint.CHAT, **ask("one " * 40))
    long = prompt(model, Endpoint.CHAT, **ask("one " * 80))
    shared = [a for a, b in zip(short.blocks, long.blocks, strict=False) if a == b]
    assert len(shared) > 40
    assert short.blocks[-1] != long.blocks[len(short.blocks) - 1]


@pytest.mark.parametrize(
    ("endpoint", "fields", "reason"),
    [
        (Endpoint.CHAT, ask([{"type": "image_url", "image_url": {"url": "x"}}]), "multimodal"),
        (Endpoint.CHAT, ask([{"type": "thinking", "thinking": "x"}]), "unsupported_field"),
        (Endpoint.CHAT, ask(7), "invalid"),
        (Endpoint.CHAT, ask(chat_template_kwargs={"chat_template": "x"}), "unsupported_field"),
        (Endpoint.CHAT, ask(chat_template_kwargs={"documents": []}), "unsupported_field"),
        (Endpoint.CHAT, ask(reasoning={"effort": "high"}), "unsupported_field"),
        (Endpoint.CHAT, ask(reasoning_effort=0.5), "unsupported_field"),
        (Endpoint.CHAT, ask(tools=[{"function": {}}]), "invalid"),
        (Endpoint.CHAT, ask(tools=[WEATHER], tool_choice="sometimes"), "invalid"),
        (Endpoint.CHAT, ask(input_ids=["a"]), "invalid"),
        (Endpoint.CHAT, ask(input_ids=[-1]), "invalid"),
        (Endpoint.CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "invalid"),
        (
            Endpoint.CHAT,
            {"messages": [{"role": "system", "content": "x", "tools": [WEATHER]}]},
            "message_tools",
        ),
        (Endpoint.GENERATE, {"text": "x", "image_data": "y"}, "multimodal"),
        (Endpoint.GENERATE, {"text": "x", "session_params": {"id": "s"}}, "unsupported_field"),
        (Endpoint.GENERATE, {"text": ["a", "b"]}, "batch"),
        (Endpoint.GENERATE, {"input_ids": [[1], [2]]}, "batch"),
        (Endpoint.COMPLETIONS, {"prompt": ["a"]}, "batch"),
    ],
)
def test_what_cannot_be_rebuilt_is_estimated_and_says_why(
    model: ModelTokenizer, endpoint: Endpoint, fields: dict[str, Any], reason: str
) -> None:
    found = prompt(model, endpoint, **fields)
    assert not found.exact
    assert found.blocks == ()
    assert found.reason == reason
    assert found.input_tokens >= 1


@pytest.mark.parametrize(
    ("endpoint", "fields", "reason"),
    [
        (Endpoint.GENERATE, {"text": "x" * 9, "extra_key": ["k"]}, "namespace"),
        (Endpoint.GENERATE, {"text": "x" * 9, "cache_salt": 7}, "namespace"),
        (Endpoint.GENERATE, {"text": "x" * 9, "lora_path": "l"}, "namespace"),
        (Endpoint.COMPLETIONS, {"prompt": "x" * 9, "model": "m:adapter"}, "namespace"),
        (Endpoint.COMPLETIONS, {"prompt": "x" * 9, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        (
            Endpoint.GENERATE,
            {"text": "x" * 9, "return_logprob": True, "logprob_start_len": 0},
            "prompt_logprobs",
        ),
    ],
)
def test_prompts_whose_blocks_are_not_ours_are_counted_only(
    model: ModelTokenizer, endpoint: Endpoint, fields: dict[str, Any], reason: str
) -> None:
    assert prompt(model, endpoint, **fields) == Prompt(9, (), exact=True, reason=reason)


def test_every_namespace_has_blocks_of_its_own(model: ModelTokenizer) -> None:
    ids = model.tokenizer.encode("x" * 8).ids
    plain = prompt(model, Endpoint.GENERATE, text="x" * 8)
    found = {plain.blocks}
    for named in ({"cache_salt": "s"}, {"extra_key": "s"}, {"extra_key": "k", "cache_salt": "s"}):
        apart = prompt(model, Endpoint.GENERATE, text="x" * 8, **named)
        assert apart.blocks == block_hashes(ids, 4, **named)
        assert apart.reason is None
        found.add(apart.blocks)
    assert len(found) == 4
    unnamed = {"cache_salt": "", "extra_key": ""}
    assert prompt(model, Endpoint.GENERATE, text="x" * 8, **unnamed) == plain


def test_a_text_that_cannot_fit_is_not_even_tokenised(model: ModelTokenizer) -> None:
    longest = model.most_chars_per_token
    assert longest is not None
    found = prompt(model, Endpoint.GENERATE, text="a" * (CONTEXT_TOKENS * longest + 10))
    assert found.exact
    assert found.input_tokens > CONTEXT_TOKENS - 1
    assert found.reason == "over_long"


def test_over_long_prompts_are_refused_by_the_router(tmp_path: Path) -> None:
    write_model(tmp_path, SMOL)

    async def scenario() -> None:
        fake = FakePool(1, tokenizer_path=str(tmp_path), context_tokens=1000)
        async with fake as pool, running(pool.url) as it:
            await it.ready()
            for words, tokens in ((2000, "2000"), (5_000_000, None)):
                async with it.client.post("/generate", json={"text": "x" * words}) as response:
                    assert response.status == 400
                    error = await it.error(response)
                assert error["code"] == "context_length_exceeded"
                assert tokens is None or tokens in error["message"]
            async with await it.chat(max_tokens=2000) as response:
                assert response.status == 400
                await it.error(response)
            async with await it.chat(max_tokens=20) as response:
                assert response.status == 200
            assert len(pool.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_late_prompt_is_estimated_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, SMOL)
    slow = threading.Event()

    def slowly(*args: Any) -> Prompt:
        if slow.is_set():
            time.sleep(SLOW_S)
        return tokenise(*args)

    monkeypatch.setattr(tokenize, "tokenise", slowly)

    async def scenario() -> None:
        limits = Limits(tokenize_s=0.1, stop_s=1.0)
        fake = FakePool(1, tokenizer_path=str(tmp_path))
        async with fake as pool, running(pool.url, limits=limits) as it:
            await it.ready()
            slow.set()
            began = asyncio.get_running_loop().time()
            # What is short does not go to a thread.
            asked = [{"role": "user", "content": "hello " * 500}]
            async with await it.chat(messages=asked) as response:
                assert response.status == 200
            assert asyncio.get_running_loop().time() - began < SLOW_S
            slow.clear()
            samples = await it.samples()
            assert samples['vertumnus_prompts_total{knowledge="deadline"}'] == 1

    run(scenario())


def test_a_cached_prefix_is_seen_by_placement(tmp_path: Path) -> None:
    """Blocks that a rank has published are predicted as cached for the same chat."""
    write_model(tmp_path, SMOL)

    async def scenario() -> None:
        fake = FakePool(2, tokenizer_path=str(tmp_path))
        async with fake as pool, running(pool.url) as it:
            await it.ready()
            body = ask("a long story " * 20)
            known = tokenise(
                parse(Endpoint.CHAT, orjson.dumps(body)), load(str(tmp_path), None), RULES
            )
            pool.ranks[1].store(known.blocks)

            async def explained() -> dict[str, Any]:
                async with it.client.post("/explain", json=body) as response:
                    assert response.status == 200
                    return dict(await response.json())

            for _ in range(400):
                answer = await explained()
                if answer["candidates"][0]["cached_tokens"]:
                    break
                await asyncio.sleep(0.01)
            assert answer["exact"]
            assert answer["input_tokens"] == known.input_tokens
            assert answer["choice"] == "fake/1x1"
            best, other = answer["candidates"]
            assert best["cached_tokens"] == (known.input_tokens - 1) // 4 * 4
            assert other["cached_tokens"] == 0
            async with await it.chat(**body) as response:
                assert response.headers["x-vertumnus-worker"] == "fake/1x1"

    run(scenario())


# -- tokenizer files ------------------------------------------------------------------------------


def test_a_missing_tokenizer_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--tokenizer-path"):
        load(str(tmp_path / "nowhere"), None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load(str(tmp_path), None)
    with pytest.raises(TokenizerError, match="--tokenizer-path"):
        load("not/a/valid repository!", None)


def test_an_override_replaces_the_template(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", SMOL)
    source = "{{ messages[0].content }}"
    assert load(str(directory), source).chat is not None
    file = tmp_path / "own.jinja"
    file.write_text("\n{{ messages[0].content }}\\n\n")
    from_file = load(str(directory), str(file)).chat
    assert from_file is not None
    assert from_file.source == "{{ messages[0].content }}\n"
    builtin = load(str(directory), "chatml")
    assert builtin.chat is None
    assert "chatml" in str(builtin.no_chat)


def test_files_win_over_the_configuration_and_the_first_name_over_others(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", SMOL)
    (directory / "chat_template.jinja").write_text("file {{ messages }}")
    found = load(str(directory), None).chat
    assert found is not None and found.source.startswith("file")
    named = [{"name": "b", "template": "second"}, {"name": "a", "template": "third"}]
    several = load(
        str(
            write_model(
                tmp_path / "n",
                named,
            )
        ),
        None,
    ).chat  # type: ignore[arg-type]
    assert several is not None and several.source == "second"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no Jinja chat template"),
        ("{% for %}", "does not compile"),
        ("{{ cls_token }}{{ messages }}", "cls_token"),
    ],
)
def test_a_template_that_cannot_be_used_turns_chat_into_estimates(
    template: str | None, says: str, tmp_path: Path
) -> None:
    tokenizer = load(str(write_model(tmp_path / "m", template)), None)
    assert tokenizer.chat is None
    assert says in str(tokenizer.no_chat)
    found = prompt(tokenizer, Endpoint.CHAT, **ask())
    assert (found.exact, found.reason) == (False, "no_chat_template")
    assert prompt(tokenizer, Endpoint.GENERATE, text="abcd").exact


def test_architectures_whose_prompts_sglang_writes_in_python_are_estimated(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", SMOL)
    (directory / "config.json").write_bytes(
        orjson.dumps({"architectures": ["DeepseekV4ForCausalLM"]})
    )
    tokenizer = load(str(directory), None)
    assert tokenizer.chat is None
    assert "DeepseekV4ForCausalLM" in str(tokenizer.no_chat)


# -- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_rendering_equals_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    directory = write_model(tmp_path / "m", TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    mine = ChatTemplate(TEMPLATES[name], theirs.special_tokens_map)
    compared = 0
    for fields in REQUESTS.values():
        messages, tools = fields["messages"], fields.get("tools")
        extra = {"style": "é\n<", "enable_thinking": False}
        try:
            expected = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **extra
            )
        except Exception:
            continue
        assert mine.render(messages, tools, extra) == expected
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'].mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% for m in [1] %}{{ loop.__class__.__mro__[1].__subclasses__() }}{% endfor %}",
        "{% for m in [1] %}{{ loop._iterator.append(1) }}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(Exception, match=r"unsafe|not safely callable"):
        print(ChatTemplate(source, {}).render([], None, {}))
