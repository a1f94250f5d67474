"""Bytes and rates of a hand-over."""

import pytest
from vertumnus_bench.hand_over import kv_bytes, logged_rates

from sgl_vertumnus.demo.random_model import RandomModelSpec

LOG = """
[2026-01-01 00:00:00 DP0] Req Time Stats(rid=a, bootstrap_room=4, input len=1024, output len=1, \
type=prefill): bootstrap_duration=1.00ms, queue_duration=2.00ms, forward_duration=400.00ms, \
entry_time=1.000, transfer_speed=0.50 GB/s, transfer_total=24.00 MB
[2026-01-01 00:00:01 DP0] Prefill batch, #new-seq: 1, #new-token: 1024
[2026-01-01 00:00:02 DP2] Req Time Stats(rid=b, type=prefill): transfer_speed=1.00 GB/s, \
transfer_total=96.00 MB
"""


def test_the_kv_of_a_token() -> None:
    spec = RandomModelSpec(layers=6, kv_heads=8, head_dim=64)
    assert kv_bytes(spec, 1) == 24 * 1024
    assert kv_bytes(spec, 4096) == 96 * 2**20


def test_logged_rates_are_in_bytes_of_1000() -> None:
    (slow, small), (fast, large) = logged_rates(LOG)
    assert (slow, fast) == pytest.approx((0.536870912, 1.073741824))
    assert (small, large) == pytest.approx((25.165824, 100.663296))
