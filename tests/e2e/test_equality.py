"""Greedy output does not depend on the degree, nor on who computes it (fp32).

Degrees 1, 2 and 4 of one pool against plain SGLang and Hugging Face transformers, on a random
untied checkpoint and on the real embedded model.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vertumnus.demo.servers import Server, plain, pool
from tests.e2e.greedy import NEW_TOKENS, Output, Prompt, assert_equal, transformers_output

PAGE_TOKENS = 16
#: Smaller than most prompts below, so that they are prefilled in chunks.
CHUNK_TOKENS = 256
FLAGS = (
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", "32768"),
    *("--dtype", "float32"),
)


def request(prompt: Prompt) -> dict[str, object]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
    }


def generate_plainly(server: Server, prompt: Prompt, rank: int) -> tuple[int, ...]:
    """Without logprobs: what most clients ask, and what only a block's leader computes when
    it is not sharded."""
    answer = server.post("/generate", request(prompt) | {"routed_dp_rank": rank})
    return tuple(answer["output_ids"])


def generate(server: Server, prompt: Prompt, rank: int | None = None) -> Output:
    body = request(prompt) | {"return_logprob": True, "logprob_start_len": -1}
    answer = server.post("/generate", body if rank is None else body | {"routed_dp_rank": rank})
    meta = answer["meta_info"]
    return Output(
        tuple(answer["output_ids"]),
        tuple(entry[0] for entry in meta["output_token_logprobs"]),
        meta["cached_tokens"],
    )


def random_prompts(lengths: Sequence[int], seed: int) -> list[Prompt]:
    source = random.Random(seed)
    return [tuple(source.randrange(5, 250) for _ in range(length)) for length in lengths]


#: Shorter than 2·C for every C, around a page, around a chunk, several chunks.
LENGTHS = (1, 3, 7, 8, 17, 100, 255, 257, 700)
SUFFIX_LENGTHS = (1, 3, 15, 200)
COLD = random_prompts(LENGTHS, seed=1)
PREFIX = random_prompts([600], seed=2)[0]
EXTENDED = [PREFIX + suffix for suffix in random_prompts(SUFFIX_LENGTHS, seed=3)]
MIXED = random_prompts([1, 300, 3, 120, 20, 2, 400, 64], seed=4)


#: Short enough for the leader of a block to compute alone; what follows is sharded.
SHORT = random_prompts([40], seed=5)[0]
TAIL = random_prompts([500], seed=6)[0]


@dataclass(frozen=True)
class Reference:
    plain: dict[Prompt, Output]
    transformers: dict[Prompt, Output]


@pytest.fixture(scope="module")
def reference(random_model: Path) -> Reference:
    prompts = [*COLD, PREFIX, *EXTENDED, *MIXED, SHORT]
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    by_transformers = {prompt: transformers_output(model, prompt) for prompt in prompts}
    prompts.append(SHORT + by_transformers[SHORT].tokens + TAIL)
    by_transformers[prompts[-1]] = transformers_output(model, prompts[-1])
    with plain(random_model, flags=FLAGS) as server:
        by_plain = {prompt: generate(server, prompt) for prompt in prompts}
    return Reference(by_plain, by_transformers)


@pytest.fixture(scope="module")
def wide_pool(random_model: Path, reference: Reference) -> Iterator[Server]:
    """Degrees 1, 2 and 4 in one pool; asks for the reference first: one server at a time."""
    with pool(
        random_model,
        size=8,
        degrees=(1, 2, 4),
        composition="2x1,1x2,1x4",
        router=False,
        flags=FLAGS,
    ) as server:
        yield server


#: Leaders by degree in that composition.
LEADERS = {1: 0, 2: 2, 4: 4}


def test_plain_sglang_equals_transformers(reference: Reference) -> None:
    for prompt, expected in reference.transformers.items():
        assert_equal(reference.plain[prompt], expected, f"{len(prompt)} tokens")


@pytest.mark.parametrize("degree", LEADERS)
def test_cold_and_cached_prompts(degree: int, wide_pool: Server, reference: Reference) -> None:
    for prompt in COLD:
        cold = generate(wide_pool, prompt, LEADERS[degree])
        again = generate(wide_pool, prompt, LEADERS[degree])
        assert cold.cached_tokens == 0
        assert again.cached_tokens == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        plainly = generate_plainly(wide_pool, prompt, LEADERS[degree])
        assert plainly == reference.plain[prompt].tokens, f"degree {degree}, {len(prompt)} tokens"
        for name, output in (("cold", cold), ("cached", again)):
            what = f"degree {degree}, {len(prompt)} tokens, {name}"
            assert_equal(output, reference.plain[prompt], what)
            assert_equal(output, reference.transformers[prompt], what)


@pytest.mark.parametrize("degree", LEADERS)
def test_suffixes_behind_a_cached_prefix(
    degree: int, wide_pool: Server, reference: Reference
) -> None:
    generate(wide_pool, PREFIX, LEADERS[degree])
    for prompt in EXTENDED:
        output = generate(wide_pool, prompt, LEADERS[degree])
        assert output.cached_tokens >= len(PREFIX) // PAGE_TOKENS * PAGE_TOKENS
        assert_equal(output, reference.plain[prompt], f"degree {degree}, {len(prompt)} tokens")


@pytest.mark.parametrize("degree", LEADERS)
def test_members_hold_what_their_leader_computed_alone(
    degree: int, wide_pool: Server, reference: Reference
) -> None:
    """A short prompt and its decode without logprobs run on the leader, members get the KV;
    the sharded suffix behind them is right only if every member's copy is."""
    expected = reference.plain[SHORT]
    answer = wide_pool.post("/generate", request(SHORT) | {"routed_dp_rank": LEADERS[degree]})
    assert tuple(answer["output_ids"]) == expected.tokens
    continued = SHORT + expected.tokens + TAIL
    output = generate(wide_pool, continued, LEADERS[degree])
    assert output.cached_tokens >= len(SHORT) // PAGE_TOKENS * PAGE_TOKENS
    assert_equal(output, reference.plain[continued], f"degree {degree}")


def test_concurrent_prompts_of_unequal_lengths(wide_pool: Server, reference: Reference) -> None:
    """Half of them with logprobs: one such request changes how its whole batch is computed."""
    asked = [(prompt, rank) for prompt in MIXED for rank in LEADERS.values()]

    def ask(turn: int) -> tuple[int, ...]:
        prompt, rank = asked[turn]
        if turn % 2:
            return generate_plainly(wide_pool, prompt, rank)
        output = generate(wide_pool, prompt, rank)
        assert_equal(output, reference.plain[prompt], f"rank {rank}, {len(prompt)} tokens")
        return output.tokens

    with ThreadPoolExecutor(len(asked)) as clients:
        for round_ in range(2):
            outputs = list(clients.map(ask, range(len(asked))))
            for (prompt, rank), tokens in zip(asked, outputs, strict=True):
                what = f"round {round_}, rank {rank}, {len(prompt)} tokens"
                assert tokens == reference.plain[prompt].tokens, what


def test_a_member_passes_its_requests_to_the_leader(
    wide_pool: Server, reference: Reference
) -> None:
    for member in (3, 5, 7):
        output = generate(wide_pool, COLD[4], member)
        assert_equal(output, reference.plain[COLD[4]], f"member {member}")


def test_grammars_and_sampling_stay_in_step_inside_a_block(wide_pool: Server) -> None:
    """Compiled grammars become ready at different times on different ranks, and random states
    differ; a block whose ranks disagreed would hang or answer nonsense afterwards."""
    body = {
        "text": "A digit:",
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "regex": "[0-9]{4}"},
        "routed_dp_rank": LEADERS[4],
    }
    for _ in range(3):
        text = wide_pool.post("/generate", body)["text"]
        assert text.isdigit() and len(text) == 4, text
    sampled = body | {"sampling_params": {"max_new_tokens": 16, "temperature": 1.0}}
    assert wide_pool.post("/generate", sampled)["meta_info"]["completion_tokens"] > 0


#: Text that the embedded model continues with confidence, and some that needs several pages.
REAL_TEXTS = (
    "The capital of France is",
    "Here is a list of the planets of the solar system, starting from the sun: " * 12,
    "\n".join(f"Line {n}: the quick brown fox jumps over the lazy dog." for n in range(40)),
)


def test_the_real_model_answers_alike_at_every_degree(embedded_model_path: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path)
    prompts = [tuple(tokenizer.encode(text)) for text in REAL_TEXTS]
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path, dtype=torch.float32).eval()
    expected = {prompt: transformers_output(model, prompt) for prompt in prompts}
    del model
    with pool(
        embedded_model_path,
        size=7,
        degrees=(1, 2, 4),
        composition="1x4,1x2,1x1",
        router=False,
        flags=FLAGS,
    ) as server:
        for degree, leader in ((4, 0), (2, 4), (1, 6)):
            for prompt in prompts:
                output = generate(server, prompt, leader)
                assert_equal(output, expected[prompt], f"degree {degree}")
