"""A CP group across replicas passes SGLang's check; every other inconsistency still does not."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vertumnus_patches.patches.topology_check import check_apart_from_cp

runtime_context = pytest.importorskip("sglang.srt.runtime_context", reason="needs sglang")
ORIGINAL = runtime_context._validate_parallel


def group(size: int) -> Any:
    return SimpleNamespace(world_size=size)


def alone(**changes: Any) -> Any:
    """The topology of one data-parallel replica at tp = cp = 1, as SGLang's check reads it."""
    values: dict[str, Any] = {
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": group(1),
        "pp_size": 1,
        "pp_rank": 0,
        "pp_group": group(1),
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_tp_group": group(1),
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_group": group(1),
        "moe_ep_size": 1,
        "moe_ep_rank": 0,
        "moe_ep_group": group(1),
        "moe_dp_size": 1,
        "moe_tp_size": 1,
    }
    return SimpleNamespace(**values | changes)


def in_block(size: int, rank: int, **changes: Any) -> Any:
    return alone(attn_cp_size=size, attn_cp_rank=rank, attn_cp_group=group(size), **changes)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_block_across_replicas_is_accepted(size: int) -> None:
    for rank in range(size):
        with pytest.raises(ValueError, match="tp_size == "):
            ORIGINAL(in_block(size, rank), "test")  # why the patch exists
        check_apart_from_cp(ORIGINAL, in_block(size, rank), "test")


def test_a_rank_alone_is_accepted() -> None:
    ORIGINAL(alone(), "test")
    check_apart_from_cp(ORIGINAL, alone(), "test")


BROKEN = [
    {"tp_size": 2},
    {"tp_rank": 1},
    {"pp_rank": 1},
    {"pp_size": 2},
    {"attn_tp_size": 2},
    {"attn_tp_rank": 1},
    {"attn_dp_size": 2},
    {"attn_dp_rank": 1},
    {"moe_ep_size": 2},
    {"moe_ep_rank": 1},
    {"moe_dp_size": 2},
    {"moe_tp_size": 2},
    {"tp_group": group(2)},
    {"pp_group": group(2)},
    {"attn_tp_group": group(2)},
    {"moe_ep_group": group(2)},
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: "-".join(broken))
@pytest.mark.parametrize("size", [1, 2])
def test_everything_else_is_still_checked(size: int, broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as found:
        check_apart_from_cp(ORIGINAL, in_block(size, 0, **broken), "test")
    with pytest.raises(ValueError) as expected:
        ORIGINAL(alone(**broken), "test")
    assert str(found.value) == str(expected.value)


def test_broken_covers_every_value_that_upstream_compares() -> None:
    """A new clause upstream wants a line in ``BROKEN``."""
    import inspect

    source = inspect.getsource(ORIGINAL)
    tables = [*runtime_context._RANK_AND_WIDTH, *runtime_context._WIDTH_AND_GROUP]
    compared = set(re.findall(r'"((?:tp|pp|attn|moe)_\w+)"', source))
    compared |= {name for row in tables for name in row}
    cp = {name for name in compared if "_cp_" in name}
    assert compared - cp == {name for broken in BROKEN for name in broken}
    assert cp == {"attn_cp_size", "attn_cp_rank", "attn_cp_group"}


@pytest.mark.parametrize(
    "geometry",
    [
        {"attn_cp_size": 2, "attn_cp_rank": 2, "attn_cp_group": group(2)},
        {"attn_cp_size": 2, "attn_cp_rank": -1, "attn_cp_group": group(2)},
        {"attn_cp_size": 2, "attn_cp_rank": 0, "attn_cp_group": group(4)},
        {"attn_cp_size": 2, "attn_cp_rank": 0, "attn_cp_group": group(1)},
        {"attn_cp_size": 1, "attn_cp_rank": 0, "attn_cp_group": group(2)},
    ],
)
def test_the_cp_geometry_itself_is_checked(geometry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"CP geometry .* \(set by test\)"):
        check_apart_from_cp(ORIGINAL, alone(**geometry), "test")


# -- on SGLang's context --------------------------------------------------------------------------


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(
        runtime_context,
        "_validate_parallel",
        lambda parallel, source: check_apart_from_cp(ORIGINAL, parallel, source),
    )
    yield runtime_context.ParallelContext()


def test_partly_initialised_contexts_pass_as_they_do_upstream(context: Any) -> None:
    context.override_permanently(tp_size=1)
    context.override_permanently(attn_cp_size=2)  # rank and group follow later
    assert context.attn_cp_size == 2


def test_a_refused_change_leaves_the_context_as_it_was(context: Any) -> None:
    context.override_permanently(**vars(in_block(2, 1)))
    with pytest.raises(ValueError, match="CP geometry"):
        context.override_permanently(attn_cp_size=4)
    with pytest.raises(ValueError, match="tp_size == "):
        context.override_permanently(tp_size=2)
    assert (context.attn_cp_size, context.tp_size) == (2, 1)
    context.override_permanently(attn_cp_size=1, attn_cp_rank=0, attn_cp_group=group(1))
    assert context.attn_cp_size == 1
