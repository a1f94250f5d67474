"""Pull at dispatch: a copy and a short prefill against a long prefill.

Ê_C(R, P) = R/1000/C. One token of KV is one byte; a pull takes latency_s + bytes/bytes_per_s.
"""

from typing import Any

import pytest
from vertumnus_router.core.config import LateConfig
from vertumnus_router.core.effects import Cause, Dispatch
from vertumnus_router.core.events import CopyEnded, Tick, TransferOutcome
from vertumnus_router.core.types import PoolId, Rank, WorkerId

from tests.router.core.prefix_scene import PrefixScene
from tests.router.core.scene import chain, request

DOCUMENT = chain(1, 50)


def pulling(composition: str = "2x1", policy: str = "paper", **prefix: Any) -> PrefixScene:
    """Rank 0 holds 50 blocks, 5000 tokens. To pull them takes 0.5 + 5000/5000 s."""
    defaults = {"pull": True, "latency_s": 0.5, "local_bytes_per_s": 5000.0}
    scene = PrefixScene(
        composition, scene={"policy": policy, "lam": 0.0}, **{"mode": "off", **defaults, **prefix}
    )
    scene.store(0, DOCUMENT)
    return scene


def busy(scene: PrefixScene, tokens: int = 20_000) -> None:
    """Rank 0 has a long prefill ahead of it."""
    assert scene.dispatched("warm", tokens + 5000, blocks=DOCUMENT).worker == "p/0x1"


def test_a_pull_is_priced_and_taken_where_it_is_cheaper() -> None:
    scene = pulling()
    busy(scene)
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert dispatch.worker == "p/1x1"
    chosen, other = dispatch.decision.candidates
    # 6 s without, 1.5 + 1 s with it.
    assert (chosen.pull_tokens, chosen.pull_s) == (5000, pytest.approx(1.5))
    assert (chosen.cached_tokens, chosen.service_s) == (5000, pytest.approx(2.5))
    assert chosen.total == pytest.approx(3 * 2.5)
    assert (other.pull_tokens, other.pull_s) == (0, 0.0)
    copy = dispatch.pull
    assert copy is not None
    assert (copy.source.rank, copy.destination.rank) == (
        Rank(PoolId("p"), 0),
        Rank(PoolId("p"), 1),
    )
    assert (copy.blocks, copy.cause) == (DOCUMENT, Cause.PULL)
    assert scene.queue_s("p/1x1") == pytest.approx(2.5)


def test_computing_wins_where_the_link_is_slow() -> None:
    scene = pulling(local_bytes_per_s=500.0)  # 0.5 + 10 s
    busy(scene)
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert (dispatch.worker, dispatch.pull) == ("p/1x1", None)
    assert dispatch.decision.chosen.service_s == pytest.approx(6.0)


def test_without_pull_nothing_changes() -> None:
    scene = pulling(pull=False)
    busy(scene)
    assert scene.dispatched("a", 6000, blocks=DOCUMENT).pull is None


def test_a_holder_that_is_free_needs_no_pull() -> None:
    scene = pulling()
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert (dispatch.worker, dispatch.pull) == ("p/0x1", None)


def test_only_what_the_destination_lacks_is_priced() -> None:
    scene = pulling()
    scene.store(1, DOCUMENT[:20])
    busy(scene)
    chosen = scene.dispatched("a", 6000, blocks=DOCUMENT).decision.chosen
    assert (chosen.pull_tokens, chosen.pull_s) == (3000, pytest.approx(0.5 + 0.6))


def test_the_last_token_is_computed_so_its_block_is_not_pulled() -> None:
    scene = pulling()
    busy(scene)
    dispatch = scene.dispatched("a", 5000, blocks=DOCUMENT)
    assert dispatch.pull is not None
    assert dispatch.pull.blocks == DOCUMENT[:-1]
    assert dispatch.decision.chosen.cached_tokens == 4900


def test_explaining_shows_the_pull_and_starts_none() -> None:
    scene = pulling()
    busy(scene)
    for _ in range(2):
        decision = scene.control.explain(request("a", 6000, blocks=DOCUMENT), scene.now)
        assert decision.chosen.pull_tokens == 5000
    assert scene.prefixes().transfers == ()


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_what_is_being_pulled_is_not_pulled_again(policy: str) -> None:
    scene = pulling(policy=policy)
    busy(scene)
    first = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert first.pull is not None
    second = scene.dispatched("b", 6000, blocks=DOCUMENT)
    # It waits for the same one: what is sent before that has ended computes all of it.
    assert (second.worker, second.pull) == ("p/1x1", first.pull)
    # Late binding counts on the copy, the paper's policy does not know of it.
    assert second.decision.chosen.cached_tokens == (5000 if policy == "late" else 0)
    assert len(scene.prefixes().transfers) == 1


def test_what_is_being_computed_is_not_pulled() -> None:
    scene = pulling(mode="off")
    busy(scene, 40_000)
    longer = (*DOCUMENT, *chain(2, 10))
    assert scene.dispatched("a", 900, blocks=chain(3, 8)).worker == "p/1x1"
    dispatch = scene.dispatched("b", 6500, blocks=longer)
    assert dispatch.pull is not None
    scene.end(dispatch.pull.transfer, TransferOutcome.REFUSED)
    # b is to compute the same blocks there now.
    again = scene.dispatched("c", 6500, blocks=longer)
    assert (again.worker, again.pull) == ("p/1x1", None)


def test_a_pull_between_pools_has_its_own_speed_and_needs_the_same_geometry() -> None:
    scene = PrefixScene(
        "1x1",
        mode="off",
        pull=True,
        latency_s=0.5,
        remote_bytes_per_s=2500.0,
        scene={"lam": 0.0},
    )
    scene.launch("1x1", pool="like", kv_token_bytes=1)
    scene.launch("1x1", pool="unlike", kv_token_bytes=2)
    scene.launch("1x1", pool="none")
    scene.store(0, DOCUMENT)
    scene.dispatched("warm", 90_000, blocks=DOCUMENT)
    decision = scene.control.explain(request("a", 6000, blocks=DOCUMENT), scene.now)
    pulls = {terms.worker: terms.pull_s for terms in decision.candidates}
    assert pulls == {
        "p/0x1": 0.0,
        "like/0x1": pytest.approx(0.5 + 2.0),
        "unlike/0x1": 0.0,
        "none/0x1": 0.0,
    }


def test_what_copies_took_is_what_pulls_will_cost() -> None:
    scene = pulling(gain=0.5)
    busy(scene)
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert dispatch.pull is not None
    # 5000 bytes in 3 s, and 1.5 s around them.
    scene.feed(CopyEnded(dispatch.pull.transfer, TransferOutcome.DONE, 50, 5000, 4.5, 3.0))
    local = scene.prefixes().local
    assert local.latency_s == pytest.approx(1.0)
    # The mean of 1/5000 and 3/5000 s per byte.
    assert local.bytes_per_s == pytest.approx(2500.0)
    assert local.copies == 1
    assert scene.prefixes().remote.copies == 0


def test_a_pull_that_failed_is_not_tried_again_at_once() -> None:
    scene = pulling(retry_s=5.0)
    busy(scene, 60_000)
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert dispatch.pull is not None
    scene.end(dispatch.pull.transfer, TransferOutcome.FAILED)
    scene.finish("a")
    assert scene.dispatched("b", 6000, blocks=DOCUMENT).pull is None
    scene.finish("b")
    scene.wait(5.0)
    assert scene.dispatched("c", 6000, blocks=DOCUMENT).pull is not None


def test_where_a_pull_failed_it_is_not_priced_and_elsewhere_it_is() -> None:
    scene = pulling("4x1")
    busy(scene)
    dispatch = scene.dispatched("a", 6000, blocks=DOCUMENT)
    assert dispatch.pull is not None
    scene.end(dispatch.pull.transfer, TransferOutcome.FAILED)
    scene.finish("a")
    terms = scene.control.explain(request("b", 6000, blocks=DOCUMENT), scene.now).candidates
    pulled = {one.worker: one.pull_tokens for one in terms}
    assert pulled.pop(WorkerId("p/0x1")) == pulled.pop(dispatch.worker) == 0
    assert list(pulled.values()) == [5000, 5000]


def test_pulls_from_one_rank_are_bounded() -> None:
    scene = pulling("4x1", pulls_per_rank=2)
    busy(scene, 90_000)
    pulls = [scene.dispatched(f"r{i}", 6000, blocks=DOCUMENT).pull for i in range(2)]
    assert None not in pulls
    decision = scene.control.explain(request("a", 6000, blocks=DOCUMENT), scene.now)
    assert not any(terms.pull_tokens for terms in decision.candidates)
    assert scene.dispatched("r2", 6000, blocks=DOCUMENT).pull is None


def test_a_rank_that_takes_as_many_as_it_may_is_offered_no_more() -> None:
    scene = pulling("4x1", pulls_per_rank=1)
    other = chain(1001, 50)
    scene.store(2, other)
    busy(scene, 90_000)
    pull = scene.dispatched("a", 6000, blocks=DOCUMENT).pull
    assert pull is not None
    decision = scene.control.explain(request("b", 6000, blocks=other), scene.now)
    offered = {terms.worker for terms in decision.candidates if terms.pull_tokens}
    taking = f"p/{pull.destination.rank.index}x1"
    assert offered == {"p/0x1", "p/1x1", "p/3x1"} - {taking, "p/2x1"}


@pytest.mark.parametrize(("within", "between"), [(5000.0, 2500.0), (2500.0, 5000.0)])
def test_of_two_sources_the_faster_is_priced(within: float, between: float) -> None:
    scene = pulling(local_bytes_per_s=within, remote_bytes_per_s=between)
    scene.launch("1x1", pool="like", kv_token_bytes=1)
    scene.store(0, DOCUMENT, pool="like")
    decision = scene.control.explain(request("a", 6000, blocks=DOCUMENT), scene.now)
    pulls = {terms.worker: terms.pull_s for terms in decision.candidates}
    assert pulls["p/1x1"] == pytest.approx(0.5 + 1.0)


def test_one_rank_of_a_worker_pulls_and_the_others_take_it_over() -> None:
    scene = pulling("2x1,1x2")
    decision = scene.control.explain(request("a", 6000, blocks=DOCUMENT), scene.now)
    pair = next(terms for terms in decision.candidates if terms.worker == "p/2x2")
    assert (pair.pull_tokens, pair.cached_tokens, pair.reconcile_tokens) == (5000, 5000, 5000)
    assert pair.service_s == pytest.approx(1.5 + 0.5)


# -- bursts --------------------------------------------------------------------------------------


def burst(in_flight: bool) -> list[Dispatch]:
    """Twenty requests for one document that nobody has, while the first of them is prefilled."""
    scene = PrefixScene(
        "4x1",
        mode="off",
        scene={"policy": "late", "lam": 0.0, "late": LateConfig(in_flight=in_flight)},
    )
    document = chain(7, 50)
    sent = [scene.dispatched("r0", 5001, blocks=document)]
    scene.start("r0", sent[0].worker)
    scene.wait(0.5)
    for i in range(1, 20):
        sent += [e for e in scene.arrive(f"r{i}", 5001, blocks=document) if isinstance(e, Dispatch)]
    ended = 0
    while ended < len(sent):
        one = sent[ended]
        effects = scene.first_token(one.request_id, one.worker)
        sent += [effect for effect in effects if isinstance(effect, Dispatch)]
        ended += 1
    return sent


def test_a_burst_on_one_document_goes_to_one_worker_and_its_prefill_is_priced_once() -> None:
    sent = burst(in_flight=True)
    assert len(sent) == 20
    assert {one.worker for one in sent} == {sent[0].worker}
    priced = [one.decision.chosen.service_s for one in sent[:5]]
    assert priced == pytest.approx([5.001, *[0.001] * 4])


def test_without_it_every_worker_computes_the_document() -> None:
    sent = burst(in_flight=False)
    assert {one.worker for one in sent} == {WorkerId(f"p/{rank}x1") for rank in range(4)}


def test_a_prefix_that_is_being_copied_counts_for_late_binding() -> None:
    scene = PrefixScene("2x1", theta_intra=2, scene={"policy": "late", "lam": 0.0})
    scene.store(0, DOCUMENT)
    scene.serve(DOCUMENT, 5001, times=3)
    busy(scene)
    (copy,) = scene.scan()
    decision = scene.control.explain(request("a", 5001, blocks=DOCUMENT), scene.now)
    assert [terms.cached_tokens for terms in decision.candidates] == [5000, 5000]
    waits = scene.dispatched("b", 5001, blocks=DOCUMENT)
    assert (waits.worker, waits.pull) == ("p/1x1", copy)
    other = scene.dispatched("c", 5001, blocks=chain(8, 50))
    assert (other.worker, other.pull) == ("p/1x1", None)
    scene.finish("b")
    scene.end(copy.transfer, TransferOutcome.FAILED)
    decision = scene.control.explain(request("a", 5001, blocks=DOCUMENT), scene.now)
    assert sorted(terms.cached_tokens for terms in decision.candidates) == [0, 5000]


def test_pools_that_cannot_copy_are_asked_more_and_more_rarely() -> None:
    """Without a common key or Mooncake each pair of ranks would have to fail for itself."""
    scene = PrefixScene(
        "4x1", scene={"policy": "paper", "lam": 0.0}, mode="off", pull=True, retry_s=10.0
    )
    scene.launch("4x1", "q", kv_token_bytes=1)
    for rank in range(4):
        scene.store(rank, DOCUMENT)
        assert scene.dispatched(f"warm-{rank}", 1_000_000 // 20, blocks=DOCUMENT).pool == "p"
    tried = 0
    for number in range(600):  # ten minutes
        dispatch = scene.dispatched(f"a{number}", 6000, blocks=DOCUMENT)
        if dispatch.pull is not None:
            assert dispatch.pool == "q"
            tried += 1
            scene.end(dispatch.pull.transfer, TransferOutcome.REFUSED)
        scene.finish(f"a{number}")
        scene.wait(1.0)
        scene.feed(Tick())
    assert 3 <= tried < 12
    assert scene.control.violations() == []
