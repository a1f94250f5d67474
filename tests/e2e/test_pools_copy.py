"""Two pools with one admin key copy prefixes from each other, as between two machines."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from vertumnus_router.io.hashing import block_hashes

from sgl_vertumnus.demo.servers import Server, fetch, pool
from sgl_vertumnus.environment import TRANSPORT_VARIABLE
from tests.e2e.moving import FLAGS, PAGE_TOKENS, cached, generate, prompt_of
from tests.e2e.routers import router_before, until

KEY = "the key of both pools"

pytestmark = pytest.mark.usefixtures("transfer_engine")


@pytest.fixture(scope="module")
def pools(random_model: Path) -> Iterator[tuple[Server, Server]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TRANSPORT_VARIABLE, "mooncake")
        flags = (*FLAGS, "--admin-api-key", KEY)
        with (
            pool(
                random_model, size=2, degrees=(1, 2), composition="2x1", router=False, flags=flags
            ) as one,
            pool(
                random_model, size=2, degrees=(1, 2), composition="2x1", router=False, flags=flags
            ) as other,
        ):
            yield one, other


@pytest.fixture(scope="module")
def router(pools: tuple[Server, Server]) -> Iterator[str]:
    urls = ",".join(server.url for server in pools)
    with router_before(urls, "--control-key", KEY) as (url, _):
        until("both pools have joined", lambda: len(fetch(f"{url}/workers")["workers"]) == 4)
        yield url


def replicate(router: str, prompt: list[int], to: Server, key: str) -> dict[str, Any]:
    worker = f"{to.get('/vertumnus/pool')['pool_id']}/0x1"
    body = {"tip": str(block_hashes(prompt, PAGE_TOKENS)[-1]), "worker": worker}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"{router}/vertumnus/replicate", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as exc:
        return {"outcome": "refused", "reason": exc.read().decode()}
    return found


def test_a_prefix_is_copied_from_pool_to_pool(pools: tuple[Server, Server], router: str) -> None:
    one, other = pools
    prompt = prompt_of(200, 1088)
    expected = generate(one, [*prompt, 7], 0)
    answers: list[dict[str, Any]] = []

    def is_copied() -> bool:
        answers.append(replicate(router, prompt, other, KEY))
        return bool(answers[-1]["outcome"] == "done")

    until("copied", is_copied)
    token_bytes = one.get("/vertumnus/pool")["kv_service"]["token_bytes"]
    assert answers[-1]["bytes"] == 1088 * token_bytes
    copied = generate(other, [*prompt, 7], 0)
    assert cached(copied) == 1088 and cached(expected) == 0
    assert copied["output_ids"] == expected["output_ids"]


def test_operators_of_a_pool_with_a_key_need_it(pools: tuple[Server, Server], router: str) -> None:
    front = {"rank": 0, "incarnation": "", "blocks": [1], "keep": 0, "as_of": 0}
    with pytest.raises(HTTPError) as caught:
        pools[0].post("/vertumnus/kv/reclaim", front)
    assert caught.value.code in (401, 403)
