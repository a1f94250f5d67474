import subprocess
import sys
from dataclasses import replace

import pytest
from vertumnus_bench.trace_prompts import Prompts, scaled, text
from vertumnus_sim.workloads.traces import TraceRequest


def request(tokens: int, blocks: tuple[int, ...], block_tokens: int = 16) -> TraceRequest:
    return TraceRequest(0.0, tokens, 4, blocks, block_tokens)


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    one = Prompts().tokens(0, request(48, (1, 2, 3)))
    other = Prompts().tokens(7, request(48, (1, 2, 4)))
    assert len(one) == 48
    assert one[:32] == other[:32] and one[32:] != other[32:]
    assert one[:16] != one[16:32]


def test_a_block_in_part_is_the_beginning_of_the_block() -> None:
    whole = Prompts().tokens(0, request(48, (1, 2, 3)))
    assert Prompts().tokens(1, request(37, (1, 2, 3))) == whole[:37]


def test_what_no_id_covers_is_the_requests_own() -> None:
    one, other = (Prompts().tokens(number, request(25, (1,))) for number in (0, 1))
    assert one[:16] == other[:16] and one[16:] != other[16:]
    assert len(one) == len(other) == 25


def test_ids_come_from_the_given_range_and_another_seed_shares_nothing() -> None:
    asked = request(400, tuple(range(25)))
    ids = range(100_000, 100_050)
    found = Prompts(ids).tokens(0, asked)
    assert set(found) == set(ids)
    assert Prompts(ids, seed=1).tokens(0, asked)[:16] != found[:16]


def test_another_process_finds_the_same() -> None:
    code = (
        "from vertumnus_bench.trace_prompts import *;"
        "print(Prompts().tokens(3, TraceRequest(0.0, 40, 4, (9, 8), 16)))"
    )
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert told.strip() == str(Prompts().tokens(3, request(40, (9, 8))))


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("block_tokens", [1, 16, 51, 512, 600])
def test_scaling_keeps_the_number_of_blocks(tokens: int, block_tokens: int) -> None:
    blocks = tuple(range(-(-tokens // 512)))
    found = scaled(TraceRequest(1.0, tokens, 100, blocks, 512), block_tokens)
    assert -(-found.input_tokens // block_tokens) == len(blocks)
    assert 0 <= found.input_tokens - tokens * block_tokens / 512 < 1
    assert found.output_tokens == round(100 * block_tokens / 512) or found.output_tokens == 1


def test_whole_blocks_stay_whole_when_scaled() -> None:
    found = scaled(request(47, (1, 2)), 4)
    assert found.input_tokens >= 2 * 4
    assert scaled(replace(found, output_tokens=0), 4).output_tokens == 1


def test_a_word_for_every_token() -> None:
    assert len(text([5, 6, 5, 249]).split()) == 4
    assert text([5, 6]).split()[0] == text([5])
