"""Figures from a router's own counts: the real one's, so that a renamed metric shows."""

import pytest
from vertumnus_bench import router_metrics
from vertumnus_bench.router_metrics import Counted
from vertumnus_router.core.effects import CostTerms
from vertumnus_router.core.types import WorkerId
from vertumnus_router.io.metrics import RouterMetrics


class Rendered:
    """A router's metrics as its clients read them."""

    def __init__(self) -> None:
        self.metrics = RouterMetrics()

    def read(self) -> Counted:
        return router_metrics.parse(self.metrics.exposition().decode())


@pytest.fixture
def router() -> Rendered:
    return Rendered()


def test_the_parts_are_means_over_what_came_between(router: Rendered) -> None:
    router.metrics.ttft_split((9.0, 9.0, 9.0, 9.0, 9.0))
    before = router.read()
    router.metrics.ttft_split((0.001, 0.0, 0.1, 0.02, 0.004))
    router.metrics.ttft_split((0.003, 0.0, 0.3, 0.04, 0.008))
    parts = router_metrics.ttft_ms(router.read().since(before))
    assert parts == {"queue": 2.0, "prefill": 200.0, "transfer": 30.0, "first_decode": 6.0}


def test_no_request_no_parts(router: Rendered) -> None:
    with pytest.raises(ValueError, match="no request"):
        router_metrics.ttft_ms(router.read())


def test_retries_are_the_dispatches_beyond_the_first(router: Rendered) -> None:
    chosen = CostTerms(WorkerId("w"), 1, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    before = router.read()
    for attempt in (1, 1, 2, 3):
        router.metrics.dispatched(chosen, attempt, 0.1)
    assert router_metrics.retried(router.read().since(before)) == 2


def test_failures_by_leg(router: Rendered) -> None:
    for leg, cause in (("decode", "x"), ("decode", "y"), ("prefill", "x")):
        router.metrics.leg_failed(leg, cause)
    failures = router.read().by("vertumnus_pair_failures_total", "leg")
    assert failures == {"decode": 2, "prefill": 1}
