"""Flows share links: times by hand, and against a naive model that looks at all flows all the
time."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_sim.network import Flow, Link, Network
from vertumnus_sim.timeline import Timeline

#: When it is sent, its size, and the links that it crosses, by number.
Sent = tuple[float, float, tuple[int, ...]]


def arrivals(
    capacities: list[float], flows: list[Sent], watch: Callable[[list[Link]], None] | None = None
) -> list[float]:
    """When each flow has arrived."""
    timeline, links = Timeline(), [Link(capacity) for capacity in capacities]
    network, found = Network(timeline), [math.nan] * len(flows)

    def arrived(number: int) -> None:
        assert math.isnan(found[number])
        found[number] = timeline.now
        if watch is not None:
            watch(links)

    def send(number: int, size: float, over: tuple[Link, ...]) -> None:
        network.send(size, over, lambda: arrived(number))
        if watch is not None:
            watch(links)

    for number, (at_s, size, over) in enumerate(flows):
        timeline.at(at_s, send, number, size, tuple(links[n] for n in over))
    timeline.run()
    assert not any(link.flows for link in links)
    return found


def naive_arrivals(capacities: list[float], flows: list[Sent]) -> list[float]:
    """From one change to the next, every pace computed anew."""
    left = [size for _, size, _ in flows]
    found, now = [math.nan] * len(flows), 0.0
    while any(map(math.isnan, found)):
        on = [n for n, flow in enumerate(flows) if flow[0] <= now and math.isnan(found[n])]
        crowd = [sum(link in flows[n][2] for n in on) for link in range(len(capacities))]
        pace = {n: min(capacities[link] / crowd[link] for link in flows[n][2]) for n in on}
        ends = {n: now + left[n] / pace[n] for n in on}
        until = min([*ends.values(), *(at for at, _, _ in flows if at > now)])
        for n in on:
            left[n] -= pace[n] * (until - now)
            if ends[n] <= until:
                found[n], left[n] = until, 0.0
        now = until
    return found


def test_one_flow_goes_at_the_pace_of_the_slowest_link() -> None:
    assert arrivals([100.0, 20.0], [(1.0, 50.0, (0, 1))]) == [pytest.approx(3.5, abs=1e-9)]


def test_two_share_a_link_until_one_ends() -> None:
    # 100 bytes/s: alone for 1 s, by halves until the second has its 50 bytes at 2 s, alone again.
    found = arrivals([100.0], [(0.0, 250.0, (0,)), (1.0, 50.0, (0,))])
    assert found == pytest.approx([3.0, 2.0], abs=1e-9)


def test_a_third_makes_it_a_third_each() -> None:
    # 0–1 s: 45 each. 1–2 s: 30 each, which is all of the third. Then halves again, 15 left each.
    flows: list[Sent] = [(0.0, 90.0, (0,)), (0.0, 90.0, (0,)), (1.0, 30.0, (0,))]
    found = arrivals([90.0], flows)
    assert found == pytest.approx([2 + 1 / 3, 2 + 1 / 3, 2.0], abs=1e-9)


def test_what_others_leave_of_a_share_is_not_handed_out_again() -> None:
    # The first is held to 10 bytes/s elsewhere; the second still has half of the link.
    found = arrivals([100.0, 10.0], [(0.0, 10.0, (0, 1)), (0.0, 50.0, (0,))])
    assert found == pytest.approx([1.0, 1.0], abs=1e-9)


def test_links_apart_do_not_slow_each_other() -> None:
    found = arrivals([10.0, 10.0], [(0.0, 10.0, (0,)), (0.0, 10.0, (1,))])
    assert found == pytest.approx([1.0, 1.0], abs=1e-9)


def test_nothing_arrives_at_once_and_slows_nobody() -> None:
    found = arrivals([10.0], [(0.0, 10.0, (0,)), (0.5, 0.0, (0,))])
    assert found == pytest.approx([1.0, 0.5], abs=1e-9)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[float], list[Sent]]:
    capacities = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0, 10.0]), min_size=1, max_size=4))
    numbers = st.sets(st.integers(0, len(capacities) - 1), min_size=1, max_size=2)
    flow = st.tuples(
        st.integers(0, 20).map(lambda n: n / 2), st.integers(0, 40).map(float), numbers.map(tuple)
    )
    return capacities, draw(st.lists(flow, min_size=1, max_size=12))


@given(traffic())
def test_every_byte_arrives_when_a_naive_model_says_so(
    case: tuple[list[float], list[Sent]],
) -> None:
    capacities, flows = case
    assert arrivals(capacities, flows) == pytest.approx(
        naive_arrivals(capacities, flows), rel=1e-9, abs=1e-9
    )


@given(traffic())
def test_no_link_carries_more_than_it_can(case: tuple[list[float], list[Sent]]) -> None:
    capacities, flows = case

    def watch(links: list[Link]) -> None:
        for link in links:
            paces = [flow.bytes_per_s for flow in link.flows]
            assert sum(paces) <= link.bytes_per_s * (1 + 1e-12)
            assert all(flow.bytes_per_s == fair(flow) for flow in link.flows)

    def fair(flow: Flow) -> float:
        return min(link.bytes_per_s / len(link.flows) for link in flow.links)

    arrivals(capacities, flows, watch)
    # Each link was busy for at least as long as its bytes take.
    ends = arrivals(capacities, flows)
    for number, capacity in enumerate(capacities):
        mine = [(flow, end) for flow, end in zip(flows, ends, strict=True) if number in flow[2]]
        if mine:
            lasted_s = max(end for _, end in mine) - min(flow[0] for flow, _ in mine)
            assert sum(size for (_, size, _), _ in mine) <= capacity * lasted_s + 1e-6
