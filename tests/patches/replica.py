"""One data-parallel replica of SGLang at tp = cp = 1, as far as its CP geometry goes."""

from types import SimpleNamespace
from typing import Any


def group(size: int, rank: int) -> Any:
    """What SGLang reads of a group coordinator."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        first_rank=0,
        is_first_rank=rank == 0,
        cpu_group=object(),
    )


def launched() -> Any:
    """Bring this process's parallel context to where a replica's start leaves it; its group."""
    from sglang.srt.runtime_context import get_parallel

    alone = group(1, 0)
    one = ("tp", "pp", "attn_tp", "attn_cp")
    get_parallel().override_permanently(
        **{f"{name}_size": 1 for name in one},
        **{f"{name}_rank": 0 for name in one},
        **{f"{name}_group": alone for name in one},
        attn_dp_size=1,
        enable_prefill_cp=False,
    )
    return alone


def scheduler_of(alone: Any) -> Any:
    """What a scheduler keeps of the geometry; ``test_geometry`` scans SGLang for more."""
    return SimpleNamespace(
        attn_cp_group=alone,
        attn_cp_cpu_group=alone.cpu_group,
        tree_cache=SimpleNamespace(attn_cp_group=alone.cpu_group),
        grammar_manager=SimpleNamespace(
            grammar_sync_group=alone.cpu_group,
            grammar_sync_size=1,
            grammar_sync_entry=0,
            is_grammar_sync_entry=True,
        ),
    )
