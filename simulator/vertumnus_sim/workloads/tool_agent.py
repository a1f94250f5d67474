"""A surrogate for the Tool-Agent trace: conversations, and about as many tool calls.

What is known of the trace: about half of it are rows of the conversation trace, with their
times and lengths; the others are tool calls with one of two prefixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vertumnus_sim.workloads.lengths import Between, Lengths, Quantiles, sample
from vertumnus_sim.workloads.statistics import PAPER
from vertumnus_sim.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

#: Rows of the conversation that are longer are left out: with them P99 input were 8 % above the
#: paper's.
_LONGEST_TOKENS = 110_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    """``share`` of the calls begin with the same ``prefix_blocks``."""

    share: float
    prefix_blocks: int
    input: Lengths
    output: Lengths


#: Lengths within what is known; most are near the shortest, a fit to the reuse.
_TOOLS = (
    _Tool(
        share=0.82,
        prefix_blocks=12,
        input=Quantiles((0, 80, 100), (6_150, 6_450, 8_000)),
        output=Quantiles((0, 60, 60.1, 100), (2, 4, 20, 50)),
    ),
    _Tool(
        share=0.18,
        prefix_blocks=5,
        input=Quantiles((0, 80, 100), (3_000, 3_300, 5_000)),
        output=Between(15, 25),
    ),
)


def tool_agent_like(conversation: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """``conversation`` is the public trace, or what stands in for it. In proportion to it there
    are as many requests as in the paper's workload. Raises ``ValueError`` without any, or with
    blocks of another size than the tools' prefixes have."""
    if not conversation:
        raise ValueError("no conversation to add tool calls to")
    if conversation[0].block_tokens != MOONCAKE_BLOCK_TOKENS:
        raise ValueError(f"tool calls need blocks of {MOONCAKE_BLOCK_TOKENS} tokens")
    source = Random(f"tool agent {seed}")
    rows = [row for row in conversation if row.input_tokens <= _LONGEST_TOKENS]
    total = round(len(conversation) * PAPER["tool-agent"].requests / 12_031)
    calls = _calls(conversation, total - len(rows), source)
    return sorted([*rows, *calls], key=lambda request: request.arrival_s)


def _calls(conversation: Sequence[TraceRequest], count: int, source: Random) -> list[TraceRequest]:
    """At random times between the first and the last of the conversation."""
    fresh = 1 + max(max(request.blocks, default=-1) for request in conversation)
    first_s, last_s = conversation[0].arrival_s, conversation[-1].arrival_s
    found: list[TraceRequest] = []
    for tool in _TOOLS:
        prefix = tuple(range(fresh, fresh + tool.prefix_blocks))
        fresh += tool.prefix_blocks
        calls = round(count * tool.share)
        at_s = sorted(source.uniform(first_s, last_s) for _ in range(calls))
        lengths = zip(
            at_s, sample(tool.input, calls, source), sample(tool.output, calls, source), strict=True
        )
        for arrival_s, input_tokens, output_tokens in lengths:
            own = -(-input_tokens // MOONCAKE_BLOCK_TOKENS) - len(prefix)
            blocks = (*prefix, *range(fresh, fresh + own))
            fresh += own
            found.append(
                TraceRequest(arrival_s, input_tokens, output_tokens, blocks, MOONCAKE_BLOCK_TOKENS)
            )
    return found
