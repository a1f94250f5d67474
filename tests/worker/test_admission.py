"""The ranks of a block agree on cached prefixes, and copy what some of them lack."""

import importlib.util
from collections.abc import Hashable, Sequence
from unittest.mock import create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vertumnus.worker import admission
from sgl_vertumnus.worker.admission import Agreement, Copy, agree, copies, first_of_step
from sgl_vertumnus.worker.rendezvous import open_store
from tests.patches.schedulers import Size
from tests.worker.admission_scenarios import Outcome, Prompt, Scene, in_processes, in_threads
from tests.worker.configs import config_of
from tests.worker.ranks import run

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="needs SGLang's tree and pools"
)

# -- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "totals", "budget", "count"),
    [
        ([], [], 64, 0),
        ([0], [10], 64, 1),
        ([0], [1000], 64, 1),  # the first of them is cut into chunks
        ([0, 0, 0], [32, 32, 32], 64, 2),  # the budget is used up
        ([0, 0, 0], [32, 33, 32], 64, 2),
        ([0, 0, 0], [32, 31, 1], 64, 3),
        ([48, 48, 0], [64, 64, 64], 64, 3),
    ],
)
def test_a_step_takes_what_its_budget_reaches(
    lengths: list[int], totals: list[int], budget: int, count: int
) -> None:
    assert first_of_step(lengths, totals, budget) == count


def test_each_prefix_is_copied_once_from_one_that_holds_it() -> None:
    held = [[0, 32, 16, 16, 7], [48, 0, 16, 16, 7], [48, 0, 0, 0, 7]]
    names = {(0, 0): "a", (1, 0): "b", (2, 0): "c", (3, 0): "c"}
    assert copies(held, lambda request, start: names[request, start]) == [
        Copy(request=0, start=0, end=48, owner=1),
        Copy(request=1, start=0, end=32, owner=0),
        Copy(request=2, start=0, end=16, owner=0),  # and the fourth looks again
    ]


prompts = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5)


@given(prompts, st.lists(st.lists(st.text("ab", max_size=5), max_size=4), min_size=1, max_size=4))
def test_copying_ends_with_all_ranks_holding_what_one_of_them_did(
    requests: list[str], served: list[list[str]]
) -> None:
    """With room for everything. Pages are characters, and a rank holds every prefix of what it
    served."""
    trees = [{text[:end] for text in texts for end in range(len(text) + 1)} for texts in served]

    def held() -> list[list[int]]:
        return [[longest(tree, request) for request in requests] for tree in trees]

    def first_missing(request: int, start: int) -> Hashable:
        return requests[request][: start + 1]

    best = [max(column) for column in zip(*held(), strict=True)]
    rounds = 0
    while due := copies(held(), first_missing):
        rounds += 1
        assert rounds <= len(requests)
        names = [first_missing(copy.request, copy.start) for copy in due]
        assert len(set(names)) == len(names), "none twice in a round"
        for copy in due:
            assert held()[copy.owner][copy.request] >= copy.end > copy.start
            for tree in trees:
                tree |= {requests[copy.request][:end] for end in range(copy.end + 1)}
    assert held() == [best] * len(trees)


def longest(tree: set[str], request: str) -> int:
    return max((end for end in range(len(request) + 1) if request[:end] in tree), default=0)


# -- with SGLang's trees --------------------------------------------------------------------------


def tokens(number: int, length: int) -> tuple[int, ...]:
    """Of each number other ones from the first on."""
    return (number, *range(length - 1))


def whole(outcomes: Sequence[Outcome]) -> None:
    """What is so however the agreement ends."""
    assert len({outcome.lengths for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.is_right
        assert outcome.room_after == outcome.room_before, "no slot is lost or used twice"
        for length, matched in zip(outcome.lengths, outcome.matched, strict=False):
            assert matched >= length


def held_by_some(size: Size, ranks: int) -> Scene:
    """Two prompts of three pages and a bit: the last rank alone holds the one; of the other each
    rank holds one page more than the rank before it."""
    page = size.page
    one, two = tokens(1, 3 * page + 1), tokens(2, 3 * page + 1)
    held = [[Prompt(two[: min(rank, 3) * page])] if rank else [] for rank in range(ranks)]
    held[-1].append(Prompt(one))
    return Scene((Prompt(one), Prompt(two)), tuple(map(tuple, held)), size)


def check_held_by_some(scene: Scene, outcomes: Sequence[Outcome]) -> None:
    whole(outcomes)
    page, last = scene.size.page, len(outcomes) - 1
    most = min(last, 3)
    assert outcomes[0].lengths == (3 * page, most * page)
    for rank, outcome in enumerate(outcomes):
        lacked = (0 if rank == last else 3) + max(0, most - rank)
        assert outcome.copied == lacked * page, "the missing pages and no more"
        assert outcome.sent == (3 + most) * page
        assert outcome.matched == outcome.lengths


SIZES = [Size(page=1), Size(page=16), Size(page=64, chunk=256)]


@needs_sglang
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"page{size.page}")
def test_what_one_rank_holds_all_can_use(size: Size, ranks: int) -> None:
    scene = held_by_some(size, ranks)
    check_held_by_some(scene, in_threads(scene))


@needs_sglang
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_over_the_ranks_real_group(ranks: int) -> None:
    config = config_of(ranks, (ranks,))
    scenes = (*(held_by_some(size, ranks) for size in SIZES), without_room(ranks))
    store = open_store(config)
    by_rank = run(in_processes, [(config, rank, scenes) for rank in range(ranks)])
    del store
    *several, last = zip(*by_rank, strict=True)
    for scene, outcomes in zip(scenes, several, strict=False):
        check_held_by_some(scene, outcomes)
    check_without_room(last)


@needs_sglang
def test_ranks_that_hold_the_same_copy_nothing() -> None:
    prompt = Prompt(tokens(1, 50))
    outcomes = in_threads(Scene((prompt, Prompt(tokens(2, 50))), ((prompt,), (prompt,))))
    whole(outcomes)
    assert [(o.lengths, o.copied, o.sent) for o in outcomes] == [((48, 0), 0, 0)] * 2


@needs_sglang
def test_a_prefix_that_requests_share_is_copied_once() -> None:
    shared = tokens(1, 32)
    requests = tuple(Prompt((*shared, *tokens(90 + number, 17))) for number in range(3))
    outcomes = in_threads(Scene(requests, (requests, ())))
    whole(outcomes)
    assert outcomes[0].lengths == (48, 48, 48)
    assert [outcome.sent for outcome in outcomes] == [32 + 3 * 16] * 2
    assert [outcome.copied for outcome in outcomes] == [0, 32 + 3 * 16]


@needs_sglang
@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_equal_tokens_of_other_namespaces_are_not_shared(field: str) -> None:
    text = tokens(1, 50)
    mine, theirs = Prompt(text, {field: "mine"}), Prompt(text, {field: "theirs"})
    outcomes = in_threads(Scene((mine, theirs, Prompt(text)), ((mine,), ())))
    whole(outcomes)
    assert outcomes[1].matched == (48, 0, 0) and outcomes[0].sent == 48
    both = in_threads(Scene((mine, theirs), ((mine, theirs), ())))
    whole(both)
    assert both[1].copied == 96, "each of them its own"


@needs_sglang
def test_only_what_the_step_may_take_is_agreed_on() -> None:
    """The rest is looked at when its turn comes."""
    prompts = tuple(Prompt(tokens(number, 50)) for number in range(6))
    outcomes = in_threads(Scene(prompts, (prompts[3:], ()), Size(chunk=64)))
    whole(outcomes)
    assert outcomes[0].lengths == (0, 0) and outcomes[0].sent == 0


@needs_sglang
def test_no_more_requests_are_looked_at_than_a_step_can_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_REQUESTS", 3)
    prompts = tuple(Prompt(tokens(number, 18)) for number in range(6))
    outcomes = in_threads(Scene(prompts, (prompts, ())))
    whole(outcomes)
    assert outcomes[0].lengths == (16, 16, 16) and outcomes[0].sent == 48


def test_no_requests_need_no_agreement() -> None:
    """No collective, above all."""
    group = create_autospec(admission.Group, instance=True)
    assert agree(object(), [], group, 0) == Agreement((), 0)
    assert not group.gather_numbers.called


# -- where memory is short ------------------------------------------------------------------------


SMALL = Size(capacity=256)


def without_room(ranks: int) -> Scene:
    """The last rank has room for two pages, three are missing."""
    prompt = Prompt(tokens(1, 50))
    held = ((prompt,), *[()] * (ranks - 1))
    return Scene((prompt,), held, SMALL, (*[0] * (ranks - 1), 256 - 32))


def check_without_room(outcomes: Sequence[Outcome]) -> None:
    whole(outcomes)
    assert outcomes[0].lengths == (0,)
    assert [outcome.sent for outcome in outcomes] == [0] * len(outcomes)
    assert [outcome.matched for outcome in outcomes] == [(48,), *[(0,)] * (len(outcomes) - 1)]


@needs_sglang
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_one_rank_has_no_room_for_nobody_uses(ranks: int) -> None:
    check_without_room(in_threads(without_room(ranks)))


@needs_sglang
def test_what_there_is_room_for_is_copied_all_the_same() -> None:
    long, short = Prompt(tokens(1, 50)), Prompt(tokens(2, 20))
    outcomes = in_threads(Scene((long, short), ((long, short), ()), SMALL, (0, 256 - 32)))
    whole(outcomes)
    assert outcomes[0].lengths == (0, 16) and outcomes[1].copied == 16


@needs_sglang
def test_unused_prefixes_make_room() -> None:
    prompt, old = Prompt(tokens(1, 50)), Prompt(tokens(2, 129))
    outcomes = in_threads(Scene((prompt,), ((prompt,), (old,)), SMALL, (0, 256 - 144)))
    whole(outcomes)
    assert outcomes[0].lengths == (48,)
    assert outcomes[1].held < (128,)


@needs_sglang
def test_eviction_takes_the_oldest_unused_prefix() -> None:
    """What the agreement has just looked at is in use."""
    prompt, old, new = Prompt(tokens(1, 50)), Prompt(tokens(2, 50)), Prompt(tokens(3, 50))
    scene = Scene((prompt, new), ((prompt, new), (old, new)), SMALL, (0, 256 - 96))
    outcomes = in_threads(scene)
    whole(outcomes)
    assert outcomes[0].lengths == (48, 48)
    assert outcomes[1].held == (0, 48)


@needs_sglang
def test_what_is_read_is_not_evicted_for_another_copy() -> None:
    """Each rank holds what the other lacks, and room is for one of the two."""
    one, two = Prompt(tokens(1, 66)), Prompt(tokens(2, 66))
    outcomes = in_threads(Scene((one, two), ((one,), (two,)), SMALL, (256 - 80, 256 - 80)))
    whole(outcomes)
    assert [outcome.held for outcome in outcomes] == [(64,), (64,)]
    assert outcomes[0].lengths == (0, 0)


@needs_sglang
def test_what_a_copy_is_put_behind_is_not_evicted_for_it() -> None:
    """Two pages are missing behind two, and one is free."""
    text = tokens(1, 66)
    scene = Scene((Prompt(text),), ((Prompt(text),), (Prompt(text[:34]),)), SMALL, (0, 256 - 48))
    outcomes = in_threads(scene)
    whole(outcomes)
    assert outcomes[0].lengths == (32,) and outcomes[1].held == (32,)


@needs_sglang
def test_copies_that_evict_each_other_do_not_go_on_for_ever() -> None:
    prompts = tuple(Prompt(tokens(number, 50)) for number in range(8))
    size = Size(capacity=160, chunk=512)
    outcomes = in_threads(Scene(prompts, (prompts[:3], prompts[3:6]), size, (0, 0)))
    whole(outcomes)


pieces = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@needs_sglang
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(pieces, min_size=1, max_size=5),
    served=st.lists(st.lists(pieces, max_size=3), min_size=2, max_size=3),
    capacity=st.sampled_from([96, 128, 1024]),
)
def test_ranks_agree_whatever_they_hold(
    requests: list[list[int]], served: list[list[list[int]]], capacity: int
) -> None:
    """Prompts are made of pieces of a page, and one token more."""

    def prompt(piece: list[int]) -> Prompt:
        return Prompt((*(100 * number + at for number in piece for at in range(16)), 7))

    scene = Scene(
        tuple(map(prompt, requests)),
        tuple(tuple(map(prompt, texts)) for texts in served),
        Size(capacity=capacity, chunk=1024),
    )
    outcomes = in_threads(scene)
    whole(outcomes)
    if capacity == 1024:
        best = tuple(
            max(longest_of(text, request) for texts in served for text in [[], *texts])
            for request in requests
        )
        assert outcomes[0].lengths == tuple(16 * pages for pages in best)


def longest_of(text: list[int], request: list[int]) -> int:
    """Pieces that both begin with."""
    same = [a == b for a, b in zip(text, request, strict=False)]
    return same.index(False) if False in same else len(same)
