"""Who may touch a rank's tree."""

import threading
import time
from collections.abc import Callable

import pytest

from sgl_vertumnus.worker.kv_service.baton import Baton, BatonTimeout


def on_a_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def waiting(baton: Baton, count: int) -> None:
    while len(baton._waiting) < count:
        time.sleep(0.0005)


def taker(baton: Baton, log: list[str], name: str) -> threading.Thread:
    def take() -> None:
        with baton.held(10):
            log.append(name)

    thread = on_a_thread(take)
    return thread


@pytest.fixture
def baton() -> Baton:
    made = Baton()
    made.begin()
    return made


def test_nobody_gets_in_before_the_first_step() -> None:
    baton = Baton()
    with baton.away(), pytest.raises(BatonTimeout, match=r"busy for 0.0 s"), baton.held(0.001):
        pass


def test_nobody_gets_in_while_the_scheduler_works(baton: Baton) -> None:
    with pytest.raises(BatonTimeout), baton.held(0.001):
        pass
    assert not baton._waiting
    with baton.away(), baton.held(0):
        pass
    with pytest.raises(BatonTimeout), baton.held(0.001):
        pass


def test_the_scheduler_waits_for_whoever_is_in(baton: Baton) -> None:
    log: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def take() -> None:
        with baton.held(10):
            inside.set()
            leave.wait(10)
            log.append("left")

    with baton.away():
        thread = on_a_thread(take)
        inside.wait(10)
        threading.Timer(0.02, leave.set).start()
    log.append("back")
    assert log == ["left", "back"]
    thread.join()


def test_all_who_wait_get_their_turn_before_the_next_step(baton: Baton) -> None:
    log: list[str] = []
    threads = []
    for count, name in enumerate("abc", start=1):
        threads.append(taker(baton, log, name))
        waiting(baton, count)
    baton.pass_on()
    assert log == ["a", "b", "c"], "in the order in which they came"
    baton.pass_on()
    for thread in threads:
        thread.join()


def test_two_are_never_in_together(baton: Baton) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with baton.held(10):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [on_a_thread(work) for _ in range(4)]
    while any(thread.is_alive() for thread in threads):
        with baton.away():
            pass
        inside += 1
        most = max(most, inside)
        inside -= 1
    assert most == 1


def test_an_error_outside_gives_the_baton_back(baton: Baton) -> None:
    with pytest.raises(ValueError, match="x"), baton.away():
        raise ValueError("x")
    with pytest.raises(BatonTimeout), baton.held(0.001):
        pass
    with baton.away():
        with pytest.raises(ValueError, match="y"), baton.held(1):
            raise ValueError("y")
        with baton.held(0):
            pass


def test_passing_on_to_nobody_costs_nothing(baton: Baton) -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        baton.pass_on()
    assert time.perf_counter() - began < 0.1
