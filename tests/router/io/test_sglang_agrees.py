"""What the router computes and decodes, against the functions of the installed SGLang."""

import asyncio
import json
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest
import zmq
from vertumnus_router.core.events import BlocksRemoved, BlocksStored, Event, IndexReset
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io.client_request import Endpoint, parse
from vertumnus_router.io.decodes import DecodeServer
from vertumnus_router.io.event_stream import EventStream
from vertumnus_router.io.forwarding import addressed, paired_bodies
from vertumnus_router.io.hashing import block_hashes
from vertumnus_router.io.kv_batch import decode_batch, index_events
from vertumnus_router.io.plain import ServerInfo
from vertumnus_router.io.prompt import PromptRules, tokenise
from vertumnus_router.io.rank_feed import RankFeed
from vertumnus_router.io.tokenizer_files import load

from tests.patches.schedulers import scheduler_with_pools, sglang_context
from tests.router.io.chat_cases import CONTEXT_TOKENS, REQUESTS, TEMPLATES, write_model
from tests.router.io.fake_pool import _free_ports
from tests.router.io.harness import run, until

kv_events = pytest.importorskip("sglang.srt.disaggregation.kv_events", reason="needs sglang")

RANK = Rank(PoolId("p"), 1)
SENTENCES = "The quick brown fox, aged 12345, isn't “lazy”…\n\n  é 東京 🙂\t<|im_end|> end"


def tokens(count: int, seed: int = 3) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2**17) for _ in range(count)]


# -- block hashes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 64, 200])
def test_block_hashes(page: int, count: int) -> None:
    from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

    ids = tokens(count)
    whole = count // page * page
    expected = get_hash_str(array("q", ids[:whole]), None, page_size=page) if whole else []
    assert list(block_hashes(ids, page)) == [hash_str_to_int64(one) for one in expected]


NAMESPACES = [(None, None), ("k", None), (None, "söle"), ("k", "söle")]


@pytest.mark.parametrize(("extra_key", "cache_salt"), NAMESPACES)
def test_block_hashes_as_the_tree_of_a_rank_publishes_them(
    extra_key: str | None, cache_salt: str | None
) -> None:
    """A tree in a pool's format, with a prefix that is extended: the second node has a parent."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    ids, page = tokens(80), 16
    with sglang_context():
        scheduler = scheduler_with_pools()
        allocator = scheduler.token_to_kv_pool_allocator
        tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                page_size=page,
                enable_kv_cache_events=True,
                dynamo_kv_event_format=True,
                tree_components=(ComponentType.FULL,),
            )
        )
        slots = allocator.alloc(len(ids))
        for length in (32, len(ids)):
            key = RadixKey(array("q", ids[:length]), extra_key, cache_salt=cache_salt)
            tree.insert(InsertParams(key=key, value=slots[:length]))
        _cleared, *stored = tree.take_events()
    published = [one for event in stored for one in event.block_hashes]
    blocks = block_hashes(ids, page, extra_key=extra_key, cache_salt=cache_salt)
    assert list(blocks) == published
    assert stored[0].parent_block_hash is None
    known = dict(zip(blocks[1:], blocks, strict=False))
    assert all(event.parent_block_hash == known.get(event.block_hashes[0]) for event in stored)


# -- events ---------------------------------------------------------------------------------------


def test_events_as_sglang_encodes_them() -> None:
    batch = kv_events.KVEventBatch(
        ts=12.5,
        events=[
            kv_events.BlockStored(
                block_hashes=[1, -2],
                parent_block_hash=None,
                token_ids=tokens(8),
                block_size=4,
                lora_id=None,
                medium=kv_events.StorageMedium.GPU,
                cache_salt="s",
            ),
            kv_events.BlockRemoved(block_hashes=[1], medium=kv_events.StorageMedium.GPU),
            kv_events.BlockRemoved(block_hashes=[9], medium=kv_events.StorageMedium.CPU),
            kv_events.AllBlocksCleared(),
        ],
        attn_dp_rank=3,
    )
    decoded = decode_batch(msgspec.msgpack.Encoder().encode(batch))
    assert decoded.ts == 12.5
    assert decoded.skipped == 0
    stored, removed, cleared = index_events(RANK, decoded, 4)
    assert stored == BlocksStored(RANK, None, (1, -2))  # type: ignore[arg-type]
    assert removed == BlocksRemoved(RANK, (1,))  # type: ignore[arg-type]
    assert isinstance(cleared, IndexReset)


def test_sglangs_own_publisher_is_followed_from_its_first_batch_on() -> None:
    """Publish, join late, lose nothing; then publish more, live."""

    def store(number: int, parent: int | None) -> Any:
        event = kv_events.BlockStored(
            block_hashes=[number],
            parent_block_hash=parent,
            token_ids=tokens(4),
            block_size=4,
            lora_id=None,
        )
        return kv_events.KVEventBatch(ts=float(number), events=[event])

    async def scenario() -> None:
        base = _free_ports(4)
        publisher = kv_events.ZmqEventPublisher(
            attn_dp_rank=1,
            endpoint=f"tcp://127.0.0.1:{base}",
            replay_endpoint=f"tcp://127.0.0.1:{base + 2}",
            topic="kv-events",
            bind=True,
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        seen: list[Event] = []
        feed = RankFeed(
            loop=asyncio.get_running_loop(),
            context=context,
            stream=EventStream(RANK, 4),
            topic=b"kv-events",
            publish_url=f"tcp://127.0.0.1:{base + 1}",
            replay_url=f"tcp://127.0.0.1:{base + 3}",
            on_events=seen.extend,
            on_incomplete=lambda: None,
        )
        try:
            for number in range(50):
                publisher.publish(store(number, number - 1 if number else None))
            feed.start()
            await until(lambda: feed.stream.warm, "replayed")
            for number in range(50, 60):
                publisher.publish(store(number, number - 1))

            def blocks() -> list[int]:
                return [int(b) for e in seen if isinstance(e, BlocksStored) for b in e.blocks]

            await until(lambda: len(blocks()) >= 60, "followed live")
            assert blocks() == list(range(60))
        finally:
            feed.close()
            context.destroy(linger=0)
            publisher.shutdown()

    run(scenario())


# -- prompts --------------------------------------------------------------------------------------


def rules() -> PromptRules:
    return PromptRules(served_name="m", block_tokens=4, context_tokens=CONTEXT_TOKENS)


class SglangChat:
    """``OpenAIServingChat`` with a tokenizer and a template, without an engine behind it."""

    def __init__(self, directory: Path) -> None:
        from collections import OrderedDict

        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
        from sglang.srt.parser.template_manager import TemplateManager
        from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

        self.tokenizer = get_tokenizer(str(directory))
        manager = SimpleNamespace(
            tokenizer=self.tokenizer,
            processor=None,
            served_model_name="m",
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"),
                is_multimodal=False,
            ),
        )
        templates = TemplateManager()
        templates.load_chat_template(manager, None, str(directory))
        chat = OpenAIServingChat.__new__(OpenAIServingChat)
        chat.tokenizer_manager, chat.template_manager = manager, templates
        chat.reasoning_parser = chat.tool_call_parser = chat.chat_encoding_spec = None
        chat._encoding_adapter = chat._reasoning_detector = None
        chat.default_chat_template_kwargs = {}
        chat.is_gpt_oss = chat.is_gemma4 = chat.is_minimax_m3 = False
        chat._tokenizer_auto_adds_specials = len(self.tokenizer.encode("")) > 0
        chat._prompt_text_round_trip_is_lossy = chat._probe_prompt_text_round_trip()
        chat._chat_template_cache = OrderedDict()
        self._chat = chat

    def prompt_ids(self, body: bytes) -> list[int]:
        """What SGLang would prefill for the body; whatever it raises for one it refuses."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(orjson.loads(body))
        if "reasoning_effort" in (request.chat_template_kwargs or {}):  # as in conversion
            request.reasoning_effort = request.chat_template_kwargs.pop("reasoning_effort")
        return list(self._chat._process_messages(request, is_multimodal=False).prompt_ids)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / request.param
    return write_model(directory, TEMPLATES[request.param])


@pytest.fixture(scope="module")
def sglang_chat(model: Path) -> SglangChat:
    return SglangChat(model)


@pytest.mark.parametrize("name", list(REQUESTS))
def test_chat_prompts(name: str, model: Path, sglang_chat: SglangChat) -> None:
    body = orjson.dumps({"model": "m", **REQUESTS[name]})
    prompt = tokenise(parse(Endpoint.CHAT, body), load(str(model), None), rules())
    try:
        expected = sglang_chat.prompt_ids(body)
    except ValueError:
        assert not prompt.exact, "SGLang refuses it, so nothing can be exact"
        return
    assert prompt.exact, prompt.reason
    assert prompt.input_tokens == len(expected)
    assert prompt.blocks == block_hashes(expected, 4)


def test_every_request_is_served_by_some_template(tmp_path: Path) -> None:
    """Guards the test above: refusals must not hide a case on every template."""
    served = set()
    for name, source in TEMPLATES.items():
        tokenizer = load(str(write_model(tmp_path / name, source)), None)
        for case, fields in REQUESTS.items():
            request = parse(Endpoint.CHAT, orjson.dumps(fields))
            if tokenise(request, tokenizer, rules()).exact:
                served.add(case)
    assert served == set(REQUESTS)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True},
    ],
    ids=["generic", "llama with bos", "llama without bos", "llama default", "qwen2"],
)
@pytest.mark.parametrize("text", ["", "hello", SENTENCES], ids=["empty", "word", "sentences"])
def test_text_prompts(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

    directory = write_model(tmp_path / "m", TEMPLATES["smol"], **config)
    expected = list(get_tokenizer(str(directory)).encode(text))
    assert load(str(directory), None).tokenizer.encode(text).ids == expected


def test_the_embedded_model(embedded_model_path: str) -> None:
    chat, mine = SglangChat(Path(embedded_model_path)), load(embedded_model_path, None)
    for fields in REQUESTS.values():
        body = orjson.dumps(fields)
        prompt = tokenise(parse(Endpoint.CHAT, body), mine, rules())
        try:
            expected = chat.prompt_ids(body)
        except (ValueError, TypeError):
            assert not prompt.exact
            continue
        assert prompt.blocks == block_hashes(expected, 4)
    for text in (SENTENCES, "x" * 3000, "  spaces   \n"):
        request = parse(Endpoint.GENERATE, orjson.dumps({"text": text}))
        expected = chat.tokenizer.encode(text)
        assert tokenise(request, mine, rules()).blocks == block_hashes(expected, 4)


# -- what the routing headers rely on -------------------------------------------------------------


def test_the_override_headers_exist_and_batches_are_named_as_expected() -> None:
    from sglang.srt.entrypoints.request_headers import _HEADER_OVERRIDES
    from sglang.srt.managers.io_struct import GenerateReqInput
    from vertumnus_router.io.forwarding import engine_rids, routing

    known = {name.decode() for name, _ in routing(0, "r", b"x")}
    assert {"x-override-rid", "x-override-routed-dp-rank"} <= known & set(_HEADER_OVERRIDES)
    for body in ({"text": ["a", "b"]}, {"input_ids": [[1], [2], [3]]}, {"text": ["a"]}):
        request = parse(Endpoint.GENERATE, orjson.dumps(body))
        engine = GenerateReqInput(**body, rid="abc", sampling_params={})
        engine.normalize_batch_and_arguments()
        assert engine_rids("abc", request.engine_items) == engine.rid
    engine = GenerateReqInput(text="a", rid="abc", sampling_params={})
    engine.normalize_batch_and_arguments()
    request = parse(Endpoint.GENERATE, orjson.dumps({"text": "a"}))
    assert engine_rids("abc", request.engine_items) == [engine.rid]


# -- pairs of legs --------------------------------------------------------------------------------

ROOM = 2**62 - 3
SPOOFED = {"bootstrap_host": "evil", "bootstrap_room": 1, "rid": "mine", "routed_dp_rank": 9}


def decode_leg(client: dict[str, Any]) -> Any:
    """The body of a decode leg, as FastAPI reads it."""
    _, body = paired_bodies(
        orjson.dumps(client | SPOOFED), host="::1", port=8998, room=ROOM, dp_rank=1, rid="r" * 32
    )
    return json.loads(body)


def as_decoded(request: Any) -> tuple[Any, ...]:
    return (
        request.bootstrap_host,
        request.bootstrap_port,
        request.bootstrap_room,
        request.disagg_prefill_dp_rank,
        request.rid,
        request.routed_dp_rank,
    )


def test_plain_sglang_takes_id_and_rank_from_the_body() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.managers.io_struct import GenerateReqInput

    spoofed = {"rid": "mine", "routed_dp_rank": 9, "data_parallel_rank": 9}
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for read, body in (
        (ChatCompletionRequest.model_validate, chat),
        (CompletionRequest.model_validate, {"model": "m", "prompt": "x"}),
        (lambda fields: GenerateReqInput(**fields), {"text": "x"}),
    ):
        for dp_rank in (1, None):
            sent = addressed(orjson.dumps(body | spoofed), rid="r" * 32, dp_rank=dp_rank)
            parsed = read(json.loads(sent))
            assert (parsed.rid, parsed.routed_dp_rank) == ("r" * 32, dp_rank)


def test_chat_and_completions_take_what_pairs_the_legs() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "data_parallel_rank": 3}
    for kind, body in (
        (ChatCompletionRequest, chat),
        (CompletionRequest, {"model": "m", "prompt": "x"}),
    ):
        parsed = kind.model_validate(decode_leg(body))
        assert as_decoded(parsed) == ("::1", 8998, ROOM, 1, "r" * 32, None)


def test_generate_numbers_the_rooms_of_a_batch() -> None:
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers.io_struct import GenerateReqInput

    for text in ("x", ["x", "y"]):
        body = decode_leg({"text": text, "sampling_params": {"max_new_tokens": 1}})
        assert generate_contract_error(body) is None
        request = GenerateReqInput(**body)
        request.normalize_batch_and_arguments()
        assert request.disagg_prefill_dp_rank == 1 and request.routed_dp_rank is None
        if isinstance(text, str):
            assert (request.bootstrap_room, request.rid) == (ROOM, "r" * 32)
        else:
            assert request.bootstrap_room == [ROOM, ROOM + 1]
            assert request.rid == [f"{'r' * 32}_0", f"{'r' * 32}_1"]


def test_server_info_says_what_is_read_of_it() -> None:
    from sglang.srt.server_args import ServerArgs

    read = {one.name for kind in (DecodeServer, ServerInfo) for one in msgspec.structs.fields(kind)}
    not_arguments = {"startup_time", "internal_states", "kv_events"}
    not_arguments |= {"max_total_num_tokens", "max_req_input_len"}
    assert read - not_arguments <= set(ServerArgs.__struct_fields__)
