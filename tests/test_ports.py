"""Free ranges of ports."""

import inspect
import socket

import pytest

from sgl_vertumnus.errors import ConfigurationError, PoolStartError
from sgl_vertumnus.ports import FIRST, LAST, SGLANG, free_range

HOST = "127.0.0.1"


def listen(port: int, host: str = HOST) -> socket.socket:
    return socket.create_server((host, port))


def test_a_range_can_be_bound_whole() -> None:
    base = free_range(HOST, 10)
    held = [listen(port) for port in range(base, base + 10)]
    for end in held:
        end.close()
    assert base >= FIRST and base + 10 <= LAST


@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_range_steps_over_ports_in_use(host: str, at: int) -> None:
    base = free_range(HOST, 16)
    with listen(base + at, host):
        next_base = free_range(HOST, 8, start=base)
    assert next_base == base + at + 1


def test_two_searches_do_not_meet_while_the_first_range_is_held() -> None:
    base = free_range(HOST, 4)
    held = [listen(port) for port in range(base, base + 4)]
    assert free_range(HOST, 4, start=base) >= base + 4
    for end in held:
        end.close()


def test_no_range_says_so() -> None:
    with pytest.raises(PoolStartError, match=f"between {LAST - 3} and {LAST}.*stop other pools"):
        free_range(HOST, 4, start=LAST - 3)


def test_an_address_of_another_machine_is_no_shortage() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1 is no address of this machine"):
        free_range("192.0.2.1", 4)


@pytest.mark.parametrize("start", [SGLANG.start - 3, SGLANG.start, SGLANG[-1]])
def test_ports_that_sglang_takes_at_random_are_left_to_it(start: int) -> None:
    assert free_range(HOST, 4, start=start) >= SGLANG.stop
    assert free_range(HOST, 4, start=SGLANG.start - 4) in (SGLANG.start - 4, SGLANG.stop)


def test_sglang_takes_its_ports_where_we_think() -> None:
    network = pytest.importorskip("sglang.srt.utils.network", reason="needs sglang")
    asked = inspect.signature(network.get_free_port_below_ephemeral).parameters
    assert (asked["low"].default, asked["high"].default) == (SGLANG[0], SGLANG[-1])
