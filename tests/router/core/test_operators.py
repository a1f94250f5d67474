"""Copies and deletions by hand."""

from typing import Any

import pytest
from vertumnus_router.core.effects import Cause, Copy, Effect, Reclaim, TransferRefused
from vertumnus_router.core.events import (
    RankLost,
    ReclaimEnded,
    ReclaimRequested,
    ReplicateRequested,
    TransferOutcome,
)
from vertumnus_router.core.types import BlockHash, PoolId, Rank, TransferId, WorkerId

from tests.router.core.prefix_scene import PrefixScene
from tests.router.core.scene import chain

DOCUMENT = chain(1, 6)


def replicate(scene: PrefixScene, tip: BlockHash, worker: str, name: str = "op") -> Effect:
    event = ReplicateRequested(TransferId(name), tip, WorkerId(worker))
    (effect,) = scene.feed(event)
    return effect


def reclaim(scene: PrefixScene, tip: BlockHash, worker: str, name: str = "op") -> list[Effect]:
    return scene.feed(ReclaimRequested(TransferId(name), tip, WorkerId(worker)))


@pytest.mark.parametrize("mode", ["observe", "on"])
def test_a_copy_by_hand(mode: str) -> None:
    scene = PrefixScene("1x2,2x1", mode=mode)
    scene.store(2, DOCUMENT)
    scene.store(1, DOCUMENT[:2])
    copy = replicate(scene, DOCUMENT[3], "p/0x2")
    assert isinstance(copy, Copy)
    assert (copy.transfer, copy.cause, copy.blocks) == ("op", Cause.OPERATOR, DOCUMENT[:4])
    assert (copy.source.rank.index, copy.destination.rank.index) == (2, 1)
    (pending,) = scene.prefixes().transfers
    assert (pending.transfer, pending.tip, pending.blocks) == ("op", DOCUMENT[3], 4)
    again = replicate(scene, DOCUMENT[3], "p/3x1")
    assert again == TransferRefused(TransferId("op"), "a transfer with the id op is in flight")
    scene.copied(copy)
    assert scene.prefixes().transfers == ()


def refused(effect: Effect) -> str:
    assert isinstance(effect, TransferRefused)
    return effect.reason


def test_a_copy_that_cannot_be_made_says_why() -> None:
    scene = PrefixScene("1x2,2x1")
    scene.launch("1x1", pool="q")  # without a KV service
    scene.store(2, DOCUMENT)
    tip = DOCUMENT[-1]
    assert refused(replicate(scene, tip, "p/0x4")) == "there is no worker p/0x4"
    assert "cannot copy" in refused(replicate(scene, tip, "q/0x1"))
    assert refused(replicate(scene, BlockHash(99), "p/0x2")) == "no rank holds a block 99"
    assert refused(replicate(scene, tip, "p/2x1")) == "worker p/2x1 holds it already"
    scene.feed(RankLost(Rank(PoolId("p"), 3), "gone"))
    assert "does not serve: rank 3: gone" in refused(replicate(scene, tip, "p/3x1"))
    scene.feed(RankLost(Rank(PoolId("p"), 2), "gone"))
    assert "no living rank holds all of it" in refused(replicate(scene, tip, "p/0x2"))


def test_off_names_the_flag() -> None:
    scene = PrefixScene("2x1", mode="off")
    scene.store(0, DOCUMENT)
    assert "--prefix-manager observe" in refused(replicate(scene, DOCUMENT[0], "p/1x1"))
    (effect,) = reclaim(scene, DOCUMENT[0], "p/0x1")
    assert "--prefix-manager observe" in refused(effect)


def chains(effects: list[Effect]) -> list[tuple[Any, ...]]:
    found = []
    for effect in effects:
        assert isinstance(effect, Reclaim)
        found.append((effect.holder.rank.index, effect.blocks, effect.keep))
    return found


def test_a_deletion_by_hand_takes_what_is_below() -> None:
    scene = PrefixScene("4x1")
    scene.store(0, DOCUMENT)
    assert chains(reclaim(scene, DOCUMENT[2], "p/0x1")) == [(0, DOCUMENT, 2)]
    scene.feed(ReclaimEnded(TransferId("op"), TransferOutcome.DONE, 4))
    assert scene.prefixes().transfers == ()


def test_branches_go_one_by_one_the_trunk_with_the_last() -> None:
    scene = PrefixScene("1x2,1x1")
    trunk, one, other = chain(1, 3), chain(2, 2), chain(3, 1)
    for rank in (0, 1):
        scene.store(rank, (*trunk, *one))
    scene.store(0, (*trunk, *other))
    effects = reclaim(scene, trunk[1], "p/0x2")
    mine = [one for one in chains(effects) if one[0] == 0]
    assert sorted(blocks for _, blocks, _ in mine) == sorted([(*trunk, *one), (*trunk, *other)])
    assert mine[0][2] == 3  # its own branch
    assert mine[1][2] == 1  # the trunk, too
    assert [c for c in chains(effects) if c[0] == 1] == [(1, (*trunk, *one), 1)]
    ids = [effect.transfer for effect in effects if isinstance(effect, Reclaim)]
    assert ids[0] == "op" and len(set(ids)) == 3
    assert scene.control.violations() == []


def test_a_deletion_that_cannot_be_made_says_why() -> None:
    scene = PrefixScene("2x1")
    scene.store(0, DOCUMENT)
    (effect,) = reclaim(scene, DOCUMENT[0], "p/1x1")
    assert refused(effect) == "worker p/1x1 does not hold it"
    assert isinstance(replicate(scene, DOCUMENT[-1], "p/1x1", "copy"), Copy)
    (effect,) = reclaim(scene, DOCUMENT[2], "p/0x1")
    assert "in flight" in refused(effect)


def test_a_copy_does_not_read_what_is_being_deleted() -> None:
    scene = PrefixScene("4x1")
    for rank in (0, 1):
        scene.store(rank, DOCUMENT)
    assert chains(reclaim(scene, DOCUMENT[0], "p/0x1", "gone")) == [(0, DOCUMENT, 0)]
    copy = replicate(scene, DOCUMENT[-1], "p/2x1")
    assert isinstance(copy, Copy) and copy.source.rank.index == 1


def test_what_a_deletion_keeps_may_be_copied_meanwhile() -> None:
    scene = PrefixScene("2x1")
    scene.store(0, DOCUMENT)
    assert chains(reclaim(scene, DOCUMENT[3], "p/0x1", "gone")) == [(0, DOCUMENT, 3)]
    assert isinstance(replicate(scene, DOCUMENT[2], "p/1x1", "kept"), Copy)
    assert "no living rank" in refused(replicate(scene, DOCUMENT[3], "p/1x1", "lost"))
