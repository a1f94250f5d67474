"""A request to a pool that prefills only: two legs, one answer."""

import asyncio
import json
from typing import Any

import pytest
from vertumnus_router.io.client_request import (
    ClientRequest,
    Endpoint,
    check_pairable,
    parse,
    wants_prompt_logprobs,
)
from vertumnus_router.io.decodes import DecodeLink

from tests.router.io import fake_pool
from tests.router.io.fake_decode import BOOTSTRAP_PORT, WHOLE_STREAM, decoding, paired
from tests.router.io.fake_pool import Seen, sse_chunks
from tests.router.io.harness import run, until

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/generate": {"text": "x"},
}


def asked(path: str, **fields: Any) -> ClientRequest:
    return parse(Endpoint(path), json.dumps(BODIES[path] | fields).encode())


def test_the_client_gets_the_decode_legs_answer_byte_for_byte() -> None:
    async def scenario() -> None:
        async with paired(2, "1x2") as (pool, (decode,), it):
            async with await it.chat(stream=True) as response:
                assert response.status == 200
                assert response.headers["content-type"] == fake_pool.SSE["content-type"]
                assert response.headers["x-vertumnus-worker"] == "fake/0x2"
                assert await response.read() == WHOLE_STREAM
            assert len(pool.seen) == len(decode.seen) == 1
            await until(it.settled, "settled")
            assert [terms.rooms for terms in it.router.core.decodes()] == [0]
            assert not pool.aborted and not decode.aborted

    run(scenario())


def test_a_decode_server_that_cannot_be_followed_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow, begun = DecodeLink._follow, []

    async def fails_once(link: DecodeLink, server: Any) -> str:
        begun.append(server)
        if len(begun) == 1:
            raise OSError("no sockets left")
        return await follow(link, server)

    async def scenario() -> None:
        monkeypatch.setattr(DecodeLink, "_follow", fails_once)
        async with paired(1) as (_, _, it):
            await until(lambda: len(begun) == 2, "followed again")
            async with await it.chat() as response:
                assert response.status == 200

    run(scenario())


def test_both_legs_name_the_room_and_the_home() -> None:
    async def scenario() -> None:
        async with paired(4, "2x1,1x2") as (pool, (decode,), it):
            for _ in range(6):
                async with await it.chat(stream=True) as response:
                    await response.read()
            rooms = set()
            for leg, other in zip(pool.seen, decode.seen, strict=True):
                assert leg.rid == other.rid
                assert len(leg.rid) == 32
                for fields in (leg.fields, other.fields):
                    room = fields["bootstrap_room"]
                    rooms.add(room)
                    assert 0 <= room < 2**62
                    assert room % 4 == leg.rank == fields["disagg_prefill_dp_rank"]
                    assert fields["bootstrap_host"] == "127.0.0.1"
                    assert fields["bootstrap_port"] == BOOTSTRAP_PORT
                    assert fields["rid"] == leg.rid
                assert not [name for name in other.headers if name.startswith("x-override-")]
                assert "x-data-parallel-rank" not in other.headers
                assert leg.headers["x-data-parallel-rank"] == str(leg.rank)
            assert len(rooms) == 6

    run(scenario())


def test_what_a_client_writes_of_routing_does_not_count() -> None:
    spoofed = {"rid": "mine", "bootstrap_room": None, "routed_dp_rank": None}
    text = '{ "text" : "h\\u00e9" , "temperature" : 1.0e-1, ' + json.dumps(spoofed)[1:-1] + " } \n"

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            headers = {"content-type": "application/json", "authorization": "Bearer client"}
            async with it.client.post("/generate", data=text.encode(), headers=headers) as response:
                assert response.status == 200, await response.text()
            for seen in (*pool.seen, *decode.seen):
                assert seen.body.startswith(text.rstrip()[:-1].encode()), "it was re-encoded"
                assert seen.headers["authorization"] == "Bearer client"
                for name in ("bootstrap_room", "rid"):
                    assert seen.fields[name] != spoofed[name]
                assert seen.fields["disagg_prefill_dp_rank"] == pool.seen[0].rank
            assert decode.seen[0].fields["routed_dp_rank"] is None
            assert decode.seen[0].fields["data_parallel_rank"] is None

    run(scenario())


def test_every_endpoint_streaming_and_not() -> None:
    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            for path, body in BODIES.items():
                for stream in (False, True):
                    async with it.client.post(path, json={**body, "stream": stream}) as response:
                        assert response.status == 200, (path, stream)
                        answer = await response.read()
                    if stream:
                        assert answer == WHOLE_STREAM
                    else:
                        assert json.loads(answer)["choices"]
                    assert pool.seen[-1].path == decode.seen[-1].path == path
            await until(it.settled, "settled")
            assert not pool.aborted and not decode.aborted

    run(scenario())


def test_the_first_event_is_not_held_back() -> None:
    async def scenario() -> None:
        async with paired() as (_, (decode,), it):
            decode.answer = decoding(decode.rooms, fake_pool.stream_slowly(tokens=3, gap_s=0.3))
            async with await it.chat(stream=True) as response:
                assert await response.content.readany() == sse_chunks(3)[0]
                assert decode.running, "it is still generating"
                await response.read()

    run(scenario())


def test_a_slow_client_slows_the_decode_server_down_and_loses_nothing() -> None:
    chunk = b"data: " + b"x" * 65536 + b"\n\n"

    async def long_answer(server: Any, request: Any, seen: Seen) -> Any:
        response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
        await response.prepare(request)
        for _ in range(400):
            await response.write(chunk)
        await response.write_eof()
        return response

    async def scenario() -> None:
        async with paired() as (_, (decode,), it):
            decode.answer = decoding(decode.rooms, long_answer)
            async with await it.chat(stream=True) as response:
                await asyncio.sleep(0.5)
                assert decode.running, "26 MB were buffered somewhere instead of waiting"
                total = 0
                async for part in response.content.iter_any():
                    total += len(part)
            assert total == 400 * len(chunk)
            await until(it.settled, "settled")

    run(scenario())


def test_a_batch_takes_a_room_for_each_prompt() -> None:
    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            decode.answer = decoding(decode.rooms, fake_pool.hang)
            task = asyncio.create_task(it.client.post("/generate", json={"text": ["a", "b", "c"]}))
            await until(lambda: decode.running and pool.seen, "running")
            assert [terms.rooms for terms in it.router.core.decodes()] == [3]
            first = pool.seen[0].fields["bootstrap_room"]
            assert isinstance(first, int)
            assert decode.seen[0].rooms == [first, first + 1, first + 2]
            task.cancel()
            await until(lambda: len(decode.aborted) >= 3, "aborted")
            rid = decode.seen[0].rid
            assert decode.aborted[:3] == [f"{rid}_0", f"{rid}_1", f"{rid}_2"]
            await until(it.settled, "settled")
            assert [terms.rooms for terms in it.router.core.decodes()] == [0]

    run(scenario())


def test_the_time_to_the_first_token_is_split_into_parts_that_add_up() -> None:
    async def scenario() -> None:
        async with paired() as (_, _, it):
            async with await it.chat(stream=True) as response:
                await response.read()
            samples = await it.samples()
            total = samples['vertumnus_ttft_seconds_sum{degree="1"}']
            parts = [
                samples[f'vertumnus_ttft_part_seconds_sum{{part="{part}"}}']
                for part in ("queue", "pull", "prefill", "transfer", "first_decode")
            ]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(total)
            async with it.client.post("/explain", json=BODIES["/generate"]) as response:
                recent = (await response.json())["ttft"]
            assert recent["requests"] == 1
            assert sum(recent["mean_s"].values()) == pytest.approx(total)

    run(scenario())


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/v1/chat/completions", {"n": 2}, "n other than"),
        ("/v1/chat/completions", {"n": "2"}, "n other than"),
        ("/v1/chat/completions", {"n": 2.0}, "n other than"),
        ("/v1/chat/completions", {"n": True}, "n other than"),
        ("/v1/completions", {"n": 2}, "n other than"),
        ("/v1/completions", {"n": "2"}, "n other than"),
        ("/generate", {"sampling_params": {"n": 2}}, "n other than"),
        ("/generate", {"sampling_params": [{"n": 2.0}]}, "n other than"),
        ("/v1/completions", {"echo": True, "logprobs": 1}, "/generate"),
    ],
)
def test_what_cannot_be_paired_is_refused(path: str, fields: dict[str, Any], word: str) -> None:
    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            async with it.client.post(path, json=BODIES[path] | fields) as response:
                assert response.status == 400
                error = await it.error(response)
            assert word in error["message"]
            assert not pool.seen and not decode.seen

    run(scenario())


def test_a_single_answer_may_be_asked_for() -> None:
    for n in (1, None):
        for path in ("/v1/chat/completions", "/v1/completions"):
            check_pairable(asked(path, n=n))
        check_pairable(asked("/generate", sampling_params={"n": n}))


# -- log-probabilities of the prompt -----------------------------------------------------------


@pytest.mark.parametrize("start", [0, 0.0, "0", "0.0", " 3 ", False, True, [-1, 0], ["-1", "0"]])
def test_log_probabilities_are_merged_from_every_start_that_sglang_takes(start: Any) -> None:
    assert wants_prompt_logprobs(asked("/generate", return_logprob=True, logprob_start_len=start))


@pytest.mark.parametrize("start", [None, -1, -1.0, "-1", [-1, None], [], "x", {}])
def test_log_probabilities_are_not_merged_where_sglang_gives_none(start: Any) -> None:
    fields = {"return_logprob": True, "logprob_start_len": start}
    assert not wants_prompt_logprobs(ClientRequest(Endpoint.GENERATE, fields, 0, None, 0))


def output(index: int, prompt: list[Any], **more: Any) -> dict[str, Any]:
    meta = {"id": "x", "finish_reason": None, "input_token_logprobs": prompt, **more}
    return {"index": index, "text": f"t{index}", "meta_info": meta}


def answering(outputs: list[dict[str, Any]], *, batch: bool) -> Any:
    """The outputs as events, or in one piece; a single one without its index."""

    async def answer(server: Any, request: Any, seen: Seen) -> Any:
        if not seen.fields.get("stream"):
            bare = [{k: v for k, v in one.items() if k != "index"} for one in outputs]
            return fake_pool.web.json_response(bare if batch else bare[0])
        response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
        await response.prepare(request)
        for one in outputs:
            # In two pieces: an event must not be cut up.
            event = b"data: " + json.dumps(one).encode() + b"\n\n"
            await response.write(event[:20])
            await asyncio.sleep(0.01)
            await response.write(event[20:])
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return answer


def met(rooms: Any, side: str, then: Any) -> Any:
    async def answer(server: Any, request: Any, seen: Seen) -> Any:
        meet = rooms.as_prefill if side == "prefill" else rooms.as_decode
        await meet(seen.rooms)
        if side == "prefill":
            await asyncio.sleep(0.1)  # so that the decode server is first
        return await then(server, request, seen)

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["x", ["x", "y"]])
def test_log_probabilities_of_the_prompt_come_from_the_prefill_leg(
    stream: bool, prompts: Any
) -> None:
    batch = isinstance(prompts, list)
    indices = [0, 1] if batch else [0]
    of_prompt = {i: [[None, i, None], [-0.5 - i, 7, None]] for i in indices}
    top = {i: [None, [[-0.25, i, None]]] for i in indices}
    from_prefill = [output(i, of_prompt[i], input_top_logprobs=top[i]) for i in indices]
    from_decode = [
        output(i, [], input_top_logprobs=[], output_token_logprobs=[[-1.0, 3, None]])
        for i in [*indices, *indices]
    ]
    if not stream:
        from_decode = from_decode[: len(indices)]

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            rooms = decode.rooms
            pool.answer = met(rooms, "prefill", answering(from_prefill, batch=batch))
            decode.answer = met(rooms, "decode", answering(from_decode, batch=batch))
            body = {
                "text": prompts,
                "stream": stream,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 1,
            }
            async with it.client.post("/generate", json=body) as response:
                assert response.status == 200
                answer = await response.read()
            if stream:
                *events, done = answer.removesuffix(b"\n\n").split(b"\n\n")
                assert done == b"data: [DONE]"
                found = [json.loads(event.removeprefix(b"data: ")) for event in events]
                assert len(found) == len(from_decode)
            else:
                found = json.loads(answer)
                found = [one | {"index": i} for i, one in enumerate(found if batch else [found])]
            for one, sent in zip(found, from_decode, strict=True):
                meta, index = one["meta_info"], one["index"]
                assert meta["input_token_logprobs"] == of_prompt[index]
                assert meta["input_top_logprobs"] == top[index]
                assert meta["output_token_logprobs"] == [[-1.0, 3, None]]
                assert one["text"] == sent["text"]
            await until(it.settled, "settled")

    run(scenario())


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}, {"logprob_start_len": 0}])
def test_without_them_the_answer_is_not_parsed(fields: dict[str, Any]) -> None:
    odd = b'{ "text" : "x" , "meta_info" : { "x" : 1.0e-1 } }'

    async def answer(server: Any, request: Any, seen: Seen) -> Any:
        return fake_pool.web.Response(body=odd, content_type="application/json")

    async def scenario() -> None:
        async with paired() as (_, (decode,), it):
            decode.answer = decoding(decode.rooms, answer)
            async with it.client.post("/generate", json={"text": "x", **fields}) as response:
                assert await response.read() == odd

    run(scenario())
