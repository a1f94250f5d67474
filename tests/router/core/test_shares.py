"""Clients take turns: one with a long queue does not keep the others waiting."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.effects import Dispatch, Effect, Reject
from vertumnus_router.core.requests import Entry
from vertumnus_router.core.shares import Shares

from tests.router.core.scene import Scene, only, request


def late(**config: object) -> Scene:
    return Scene("1x1", policy="late", **config)


def names(effects: list[Effect]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, Dispatch)]


class Watched(Scene):
    """Remembers what was dispatched."""

    def __init__(self, **config: object) -> None:
        self.sent: list[str] = []
        super().__init__("1x1", policy="late", **config)

    def feed(self, event: object) -> list[Effect]:
        effects = super().feed(event)  # type: ignore[arg-type]
        self.sent += names(effects)
        return effects


def served(scene: Watched) -> list[str]:
    """Work off everything: the order in which requests were dispatched."""
    done = 0
    while done < len(scene.sent):
        name = scene.sent[done]
        scene.start(name, "p/0x1")
        scene.wait(1.0)
        scene.first_token(name, "p/0x1")
        scene.finish(name)
        done += 1
    return scene.sent


def test_who_comes_later_with_little_is_served_soon() -> None:
    scene = Watched()
    for at in range(10):
        scene.arrive(f"heavy{at}", 5000, client="heavy")
    scene.arrive("light", 5000, client="light")
    order = served(scene)
    assert len(order) == 11
    # Two were with the worker already; one more may have begun its turn.
    assert order.index("light") <= 3


def test_two_long_queues_are_served_in_turns_though_a_worker_takes_one_at_a_time() -> None:
    scene = Watched()
    for at in range(8):
        scene.arrive(f"a{at}", 5000, client="a")
    for at in range(8):
        scene.arrive(f"b{at}", 5000, client="b")
    order = served(scene)
    assert order[:2] == ["a0", "a1"], "they went before anybody else was there"
    for upto in range(2, 15):
        count = Counter(name[0] for name in order[2:upto])
        assert abs(count["a"] - count["b"]) <= 1, order


def test_turns_are_of_tokens_not_of_requests() -> None:
    scene = Watched()
    scene.arrive("first", 5000, client="other")
    scene.arrive("second", 5000, client="other")
    for at in range(4):
        scene.arrive(f"long{at}", 8000, client="long")
    for at in range(16):
        scene.arrive(f"short{at}", 2000, client="short")
    order = served(scene)[2:]
    tokens = Counter({"long": 0, "short": 0})
    for name in order[:-1]:
        client = name.rstrip("0123456789")
        tokens[client] += 8000 if client == "long" else 2000
        if tokens["long"] < 32_000 and tokens["short"] < 32_000:
            assert abs(tokens["long"] - tokens["short"]) <= 16_000, order


def test_priority_goes_before_turns() -> None:
    scene = Watched()
    for at in range(5):
        scene.arrive(f"a{at}", 5000, client="a")
    scene.arrive("b", 5000, client="b")
    scene.arrive("urgent", 5000, client="a", priority=1)
    order = served(scene)
    assert order.index("urgent") < order.index("b")


def test_alone_a_client_keeps_the_order_of_the_policy() -> None:
    orders = []
    for client in ("", "a"):
        scene = Watched()
        for at, tokens in enumerate((5000, 5000, 9000, 1000, 7000, 3000, 8000)):
            scene.arrive(f"r{at}", tokens, client=client)
        orders.append(served(scene))
    assert orders[0] == orders[1]


def test_explain_knows_the_turns() -> None:
    scene = late()
    for at in range(6):
        scene.arrive(f"a{at}", 5000, client="a")
    behind = scene.control.explain(request("x", 5000, client="a"), scene.now)
    before = scene.control.explain(request("x", 5000, client="b"), scene.now)
    assert before.chosen.queue_s < behind.chosen.queue_s
    assert scene.control.violations() == []


def test_a_full_queue_drops_the_last_of_whoever_fills_it() -> None:
    scene = late(queue_limit=3)
    for name in ("a0", "a1", "a2", "a3", "a4"):
        assert not [e for e in scene.arrive(name, 5000, client="a") if isinstance(e, Reject)]
    reject = only(Reject, scene.arrive("b0", 5000, client="b"))
    assert (reject.request_id, reject.code) == ("a4", "queue_full")
    reject = only(Reject, scene.arrive("a5", 5000, client="a"))
    assert reject.request_id == "a5"
    assert reject.retry_s == pytest.approx(10.0)  # two prefills of 5 s
    assert scene.control.violations() == []


clients = st.sampled_from(("a", "b", "c"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(clients, st.integers(1, 5000), st.integers(-1, 1), st.integers(0, 100)),
        max_size=30,
    ),
    st.lists(st.tuples(clients, st.integers(0, 9000)), max_size=6),
)
def test_turns_lose_nobody_and_keep_each_clients_order(
    asked: list[tuple[str, int, int, int]], charged: list[tuple[str, int]]
) -> None:
    shares = Shares()
    entries = []
    for at, (client, tokens, priority, urgency) in enumerate(asked):
        one = request(f"r{at}", tokens, client=client, priority=priority)
        entries.append(Entry(one, 0.0, at, float(urgency)))
        shares.enter(client)
    for client, tokens in charged:
        shares.charge(client, tokens)
    entries.sort(key=lambda entry: entry.key)
    turns = list(shares.turns(entries))
    assert sorted(turns, key=lambda entry: entry.key) == entries
    assert [e.request.priority for e in turns] == [e.request.priority for e in entries]
    for client in "abc":
        mine = [entry for entry in turns if entry.request.client == client]
        assert mine == [entry for entry in entries if entry.request.client == client]
    for client, *_ in asked:
        shares.leave(client)
    assert shares.waiting() == {}
