"""Servers of plain SGLang, to the control plane: pools that report nothing and are never moved."""

from vertumnus_router.core.events import DecodeJoined, RankReported
from vertumnus_router.core.types import DecodeId, PoolId, Rank
from vertumnus_router.lattice import Block

from tests.router.core.scene import Scene, joined


def plain(it: Scene, degree: int = 1, size: int = 1, **other: object) -> None:
    it.feed(joined("s", size, degrees=(degree,), manifest="", plain=True, **other))
    for first in range(0, size, degree):
        block = Block(first, degree)
        for rank in block.ranks:
            it.feed(RankReported(Rank(PoolId("s"), rank), "life", 0, block, ""))


def test_it_needs_no_patches() -> None:
    it = Scene(None, expected_manifest="m")
    plain(it, degree=2, size=4)
    assert it.serving() == ["s/0x2", "s/2x2"]


def test_its_reservations_age_at_the_predicted_speed() -> None:
    it = Scene(None)
    plain(it)
    it.dispatched("a", 1000)
    it.dispatched("b", 2000)
    assert it.queue_s("s/0x1") == 3.0
    it.wait(1.5)
    assert it.queue_s("s/0x1") == 1.5
    it.first_token("a", "s/0x1")
    assert it.queue_s("s/0x1") == 1.5, "what is left is the second's"
    it.wait(9.0)
    assert it.queue_s("s/0x1") == 0.0
    it.first_token("b", "s/0x1")
    assert it.control.violations() == []


def test_an_answer_in_one_piece_keeps_nobody_from_the_worker() -> None:
    """Nobody says when its prefill ends, and the profile may be of another machine."""
    it = Scene(None, policy="late")
    plain(it)  # chunks of 2000 tokens
    whole = [f"whole-{number}" for number in range(20)]
    for name in whole:
        it.dispatched(name, 1500, streams=False)
    for name in "ab":
        it.dispatched(name, 2000)
    assert it.arrive("c", 2000) == [], "of what streams it is known"
    assert len(it.finish("a")) == 1
    for name in (*whole, "b", "c"):
        it.finish(name)
    assert it.control.violations() == []


def test_what_is_passed_on_unread_keeps_nobody_from_a_rank_either() -> None:
    it = Scene("1x1", policy="late")
    for number in range(20):
        it.dispatched(f"unread-{number}", 1500, streams=False, reported=False)
    assert it.queue_s("p/0x1") == 30.0
    it.wait(31.0)
    assert it.queue_s("p/0x1") == 0.0, "nor does it seem busy for as long as they decode"
    for name in "ab":
        it.dispatched(name, 2000, streams=False)
    assert it.arrive("c", 2000, streams=False) == [], "the ranks report these"


def test_a_time_that_nobody_measured_corrects_nothing() -> None:
    it = Scene(None)
    plain(it)
    it.dispatched("a", 1000)
    it.wait(50.0)
    it.first_token("a", "s/0x1")
    assert all(one.factor == 1.0 for one in it.control.corrections().values())


def test_fluid_composition_leaves_it_as_it_is() -> None:
    it = Scene(None, policy="fluid")
    plain(it, degree=1, size=4, prefill_only=True)
    it.launch("2x1", "q", prefill_only=True)
    it.feed(DecodeJoined(DecodeId("d"), "life", 100))
    for name in "abcdef":
        for effect in it.arrive(name, 4000):
            if type(effect).__name__ == "Regroup":
                assert effect.pool == "q"
    assert it.control.requests_at(PoolId("s"))


def test_no_controller_splits_it() -> None:
    it = Scene(None)
    plain(it, degree=2, size=4)
    view = it.control._regroups.view(it.control.pools[0], it.now)
    assert view.options == ()
