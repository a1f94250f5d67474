"""Qwen3, dense and as a mixture of experts, in a block of two ranks: greedy outputs are those of
transformers (fp32). Every rank has all experts; a step's tokens are sharded before them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vertumnus.demo.random_model import Architecture, RandomModelSpec, write_random_model
from sgl_vertumnus.demo.servers import Server, pool
from tests.e2e.greedy import Output, Prompt, assert_equal, transformers_output
from tests.e2e.test_equality import FLAGS, generate, random_prompts

#: Computed once, sharded, in chunks; then behind a cached prefix.
PROMPTS = random_prompts((5, 200, 300), seed=11)
EXTENDED = [PROMPTS[2] + suffix for suffix in random_prompts((1, 180), seed=12)]


@pytest.fixture(scope="module", params=[Architecture.QWEN3, Architecture.QWEN3_MOE], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RandomModelSpec(
        architecture=request.param,
        hidden=128,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=128,
    )
    return write_random_model(tmp_path_factory.mktemp("qwen3"), spec)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[Prompt, Output]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return {prompt: transformers_output(model, prompt) for prompt in [*PROMPTS, *EXTENDED]}


@pytest.fixture(scope="module")
def block(checkpoint: Path, expected: object) -> Iterator[Server]:
    with pool(
        checkpoint, size=2, degrees=(1, 2), composition="1x2", router=False, flags=FLAGS
    ) as server:
        yield server


def test_a_block_answers_as_transformers(block: Server, expected: dict[Prompt, Output]) -> None:
    for prompt in [*PROMPTS, *EXTENDED]:
        output = generate(block, prompt, 0)
        assert_equal(output, expected[prompt], f"{len(prompt)} tokens")
