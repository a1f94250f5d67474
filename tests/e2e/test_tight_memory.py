"""Moves and blocks of ranks where memory is short."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_vertumnus.demo.servers import Server, pool
from tests.e2e.moving import FLAGS, cached, generate, move_at_random_under_load, prompt_of


@pytest.fixture(scope="module")
def tight(random_model: Path) -> Iterator[Server]:
    """Ranks whose KV pools hold 6000 tokens."""
    flags = (*FLAGS, "--max-total-tokens", "6000")
    with pool(
        random_model, size=4, degrees=(1, 2, 4), composition="1x4", router=False, flags=flags
    ) as running:
        yield running


def test_of_a_blocks_copies_one_is_kept(tight: Server) -> None:
    """16 documents of 700 tokens are more than a rank holds, and less than four hold together."""
    documents = [prompt_of(60 + n, 701) for n in range(16)]
    first = [generate(tight, document, n % 4) for n, document in enumerate(documents)]
    again = [generate(tight, document, n % 4) for n, document in enumerate(documents)]
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in first]
    assert sum(cached(one) for one in again) >= 0.9 * 16 * 688


def test_moves_while_memory_is_short_and_prefixes_differ(tight: Server) -> None:
    move_at_random_under_load(tight)
