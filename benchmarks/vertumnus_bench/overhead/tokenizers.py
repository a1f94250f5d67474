"""The tokenizer that the mock pool names, and what it makes of a prompt."""

from collections.abc import Sequence
from pathlib import Path

from vertumnus_router.io.client_request import Endpoint, parse
from vertumnus_router.io.prompt import PromptRules, tokenise
from vertumnus_router.io.tokenizer_files import load

from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.tokenizer_files import byte_tokenizer
from vertumnus_bench.overhead.mock_pool import BLOCK_TOKENS, CONTEXT_TOKENS


def embedded() -> Path:
    """That of the embedded model, a vocabulary of 49152. Raises ``ModelUnavailableError``."""
    return embedded_model.prepare()


def bytes_only(folder: Path) -> Path:
    """A token for each byte; nothing to fetch."""
    byte_tokenizer(CONTEXT_TOKENS).write(folder)
    return folder


def shared_blocks(tokenizer: Path, body: bytes) -> Sequence[int]:
    """The blocks that the prompts of a chat have in common whose last words differ."""
    rules = PromptRules("mock", BLOCK_TOKENS, CONTEXT_TOKENS)
    prompts = (
        tokenise(
            parse(Endpoint.CHAT, body.replace(b"@@@@@@@@", number)),
            load(str(tokenizer), None),
            rules,
        )
        for number in (b"00000000", b"99999999")
    )
    one, other = (prompt.blocks for prompt in prompts)
    return [a for a, b in zip(one, other, strict=True) if a == b]
