"""Which attention layers zigzag CP of a pool covers."""

from typing import Any


def is_plain_causal(layer: Any) -> bool:
    """Whether every query of the layer sees all positions up to its own, and nothing else."""
    from sglang.srt.layers.radix_attention import AttentionType

    window = layer.sliding_window_size
    return (
        not layer.is_cross_attention
        and layer.attn_type != AttentionType.ENCODER_ONLY
        and (window is None or window <= -1)
    )
