"""Real ranks split and merge while they serve: nothing is lost, nothing changes, KV stays."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import pytest

from sgl_vertumnus.demo.servers import Server, pool
from tests.e2e.moving import (
    FLAGS,
    PAGE_TOKENS,
    Computed,
    body,
    cached,
    flush,
    generate,
    move,
    move_at_random_under_load,
    prompt_of,
    stream,
)


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with pool(
        random_model, size=4, degrees=(1, 2, 4), composition="4x1", router=False, flags=FLAGS
    ) as running:
        yield running


def test_after_a_split_each_child_serves_what_was_computed_together(server: Server) -> None:
    prompt = prompt_of(1, 700)
    move(server, "1x4")
    together = generate(server, prompt, 2)
    assert cached(together) == 0
    move(server, "4x1")
    for rank in range(4):
        alone = generate(server, prompt, rank)
        assert cached(alone) == 688, "all whole pages"
        assert alone["output_ids"] == together["output_ids"]


def test_after_a_merge_prefixes_are_taken_over_on_first_use(server: Server) -> None:
    move(server, "4x1")
    prompt = prompt_of(2, 701)
    alone = generate(server, prompt, 0)
    move(server, "2x2")
    computed = Computed(server, rank=0)
    merged = generate(server, prompt, 1)
    assert cached(merged) == 688 and merged["output_ids"] == alone["output_ids"]
    assert computed.tokens() == 701 - 688
    elsewhere = generate(server, prompt, 2)
    assert cached(elsewhere) == 0 and elsewhere["output_ids"] == alone["output_ids"]
    move(server, "4x1")
    assert cached(generate(server, prompt, 1)) == 688, "rank 1 has a copy of its own now"
    assert cached(generate(server, prompt, 3)) == 688, "so has rank 3, of the other block's"


def test_decodes_go_on_through_a_merge_and_are_not_computed_again(server: Server) -> None:
    move(server, "4x1")
    prompts = [prompt_of(10 + n, 900) for n in range(4)]
    expected = [generate(server, prompt, 0, tokens=60)["output_ids"] for prompt in prompts]
    flush(server)
    begun = [threading.Event() for _ in prompts]
    with ThreadPoolExecutor(4) as clients:
        streams = [
            clients.submit(stream, server, body(prompt, home, tokens=60), begun[home])
            for home, prompt in enumerate(prompts)
        ]
        for event in begun:
            assert event.wait(60)
        computed = Computed(server, rank=0)
        move(server, "1x4")
        answers = [one.result() for one in streams]
    assert [answer["output_ids"] for answer in answers] == expected
    assert 0 < computed.tokens() <= 4 * PAGE_TOKENS, "of each, the page that was not yet full"


def test_every_kind_of_request_survives_random_moves(server: Server) -> None:
    move_at_random_under_load(server)


def test_a_move_that_cannot_be_is_refused_and_says_why(server: Server) -> None:
    for composition, words in (
        ("1x3", b"degree 3"),
        ("1x4,1x1", b"uses 5"),
        ("x", b"COUNTxDEGREE"),
    ):
        with pytest.raises(HTTPError) as caught:
            server.post("/vertumnus/regroup", {"composition": composition})
        assert caught.value.code in (400, 409)
        assert words in caught.value.read()
    now = server.get("/vertumnus/composition")
    with pytest.raises(HTTPError) as caught:
        server.post("/vertumnus/regroup", {"composition": "2x2", "epoch": now["epoch"] + 7})
    assert caught.value.code == 409
    assert server.get("/vertumnus/composition") == now
