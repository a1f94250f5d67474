"""When a step is worth sharding over a block. Pure; every rank must decide alike."""

from collections.abc import Sequence

#: Below this many tokens a rank, gathering KV in every layer costs more than is saved: on two
#: cores the break-even lies near 50 tokens a rank for a small model, earlier for larger ones.
MIN_TOKENS_PER_RANK = 64


def is_worth_sharding(
    new_tokens: Sequence[int], all_tokens: Sequence[int], degree: int, hidden: int
) -> bool:
    """Whether the step's work, in new tokens, fills ``degree`` ranks.

    A new token that attends to k keys counts as 1 + k / (6·hidden): a layer's projections take
    about 12·hidden² multiplications per token, its attention 2·hidden per key.

    ``new_tokens`` and ``all_tokens`` are the suffix and the total length of each sequence.
    """
    work = sum(
        new * (1 + (total - new / 2) / (6 * hidden))
        for new, total in zip(new_tokens, all_tokens, strict=True)
    )
    return degree > 1 and work >= MIN_TOKENS_PER_RANK * degree
