"""Prompts of the lengths in a trace, that share what the trace says they share.

The trace tells no words. What stands for a block is drawn from its id, so that equal ids are
equal tokens, in every process.
"""

import hashlib
from dataclasses import dataclass, replace
from struct import unpack

from vertumnus_sim.workloads.traces import TraceRequest

from vertumnus_bench.workload import IDS

_BYTES_PER_DRAW = 4
_TEXT = """
the of and to in is you that it he was for on are with as his they at be this have from or one had
by but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more
write go see number no way could people my than first water been call who oil its now find long
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompts:
    """``ids`` are the token ids that may come. Another ``seed`` shares nothing with this one:
    a server that is warm from one replay is cold for the other."""

    ids: range = IDS
    seed: int = 0

    def tokens(self, number: int, request: TraceRequest) -> list[int]:
        """The prompt of request ``number`` of a trace: ``request.input_tokens`` ids."""
        tokens: list[int] = []
        for block in request.blocks:
            count = min(request.block_tokens, request.input_tokens - len(tokens))
            tokens += self._drawn(f"block {block}", count)
        tokens += self._drawn(f"request {number}", request.input_tokens - len(tokens))
        return tokens

    def _drawn(self, name: str, count: int) -> list[int]:
        """Of the same name the shorter is a prefix of the longer."""
        data = hashlib.shake_128(f"{name} of {self.seed}".encode()).digest(count * _BYTES_PER_DRAW)
        first, size, step = self.ids.start, len(self.ids), self.ids.step
        return [first + step * (draw % size) for draw in unpack(f"<{count}I", data)]


def scaled(request: TraceRequest, block_tokens: int) -> TraceRequest:
    """The same request with blocks of ``block_tokens``, and its lengths in proportion: of at
    least one token, with the same number of blocks."""
    was = request.block_tokens
    return replace(
        request,
        input_tokens=-(-request.input_tokens * block_tokens // was),
        output_tokens=max(1, round(request.output_tokens * block_tokens / was)),
        block_tokens=block_tokens,
    )


def text(tokens: list[int]) -> str:
    """A word for every token. The words are common and short, so that most tokenizers make
    about as many tokens of them."""
    return " ".join([_WORDS[token % len(_WORDS)] for token in tokens])
