from random import Random

import pytest
from vertumnus_sim.workloads.prefixes import Application, Shape, Sharing, share_prefixes

ALWAYS = Sharing(applications=(Application(1.0, 2),), continued=1.0, think_s=10, forget_s=100)


def blocks(*shapes: tuple[float, int], sharing: Sharing = ALWAYS) -> list[tuple[int, ...]]:
    """Of requests given as time and length in blocks, each with a part of a block more."""
    made = [Shape(at_s, 512 * whole + 5, 1) for at_s, whole in shapes]
    return [request.blocks for request in share_prefixes(made, sharing, Random(1))]


def test_a_conversation_goes_on_behind_the_whole_blocks_of_its_last_request() -> None:
    first, second, third = blocks((0, 3), (20, 5), (40, 6))
    assert [len(first), len(second), len(third)] == [4, 6, 7]
    assert second[:3] == first[:3] and second[3] != first[3]
    assert third[:5] == second[:5]


def test_a_request_is_continued_once() -> None:
    first, second, third = blocks((0, 3), (20, 5), (40, 4))
    assert second[:3] == first[:3]
    # The open conversation is too long, and the one that would fit is that one's past.
    assert third[:2] == first[:2] and third[2] not in first + second


@pytest.mark.parametrize("again_s", [9, 101])
def test_nobody_goes_on_at_once_or_after_a_long_time(again_s: float) -> None:
    first, second = blocks((0, 3), (again_s, 5))
    assert first[:2] == second[:2] and first[2] != second[2]


def test_the_conversation_that_fits_best_goes_on() -> None:
    many = Sharing(applications=(Application(1.0, 1),), continued=1.0, tries=64)
    short, long, too_long, after = blocks((0, 3), (0, 5), (0, 9), (20, 7), sharing=many)
    assert after[:5] == long[:5]
    assert short[0] == too_long[0] and short[1] not in after


def test_applications_share_their_prefix_as_far_as_it_fits_and_nothing_else() -> None:
    alone = Sharing(applications=(Application(1.0, 2), Application(1.0, 4)), continued=0.0)
    found = blocks(*((n, 6) for n in range(50)), (60, 1), sharing=alone)
    prefixes = {tuple(b for b in ids if b < 6) for ids in found[:-1]}
    assert prefixes == {(0, 1), (2, 3, 4, 5)}
    own = [b for ids in found for b in ids if b >= 6]
    assert len(own) == len(set(own))
    assert found[-1][0] in (0, 2) and len(found[-1]) == 2
