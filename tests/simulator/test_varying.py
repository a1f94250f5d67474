import pytest
from vertumnus_sim.workloads.traces import TraceRequest
from vertumnus_sim.workloads.varying import Phase, time_varying


def workload(tokens: int, count: int = 2_000, block_tokens: int = 512) -> list[TraceRequest]:
    """Told apart by their length; every two neighbours share a block."""
    return [TraceRequest(0.0, tokens, 1, (n // 2,), block_tokens) for n in range(count)]


def test_rates_and_mix_follow_the_phases() -> None:
    phases = [Phase(100, 10, {"a": 1}), Phase(50, 2, {"a": 1, "b": 3}), Phase(100, 5, {"b": 1})]
    found = time_varying(phases, {"a": workload(1), "b": workload(2)}, seed=1)
    assert [r.arrival_s for r in found] == sorted(r.arrival_s for r in found)

    def count(first_s: float, end_s: float) -> tuple[int, int]:
        lengths = [r.input_tokens for r in found if first_s <= r.arrival_s < end_s]
        return lengths.count(1), lengths.count(2)

    assert count(0, 100) == (pytest.approx(1000, rel=0.1), 0)
    few, many = count(100, 150)
    assert few + many == pytest.approx(100, rel=0.3) and 1.5 < many / few < 6
    assert count(150, 250) == (0, pytest.approx(500, rel=0.15))


def test_workloads_share_nothing_with_each_other_and_as_much_within_as_before() -> None:
    phases = [Phase(50, 10, {"a": 1, "b": 1})]
    found = time_varying(phases, {"a": workload(1), "b": workload(2)}, seed=1)
    ids = [{r.blocks[0] for r in found if r.input_tokens == kind} for kind in (1, 2)]
    assert not ids[0] & ids[1]
    first = [r.blocks[0] for r in found if r.input_tokens == 1][:6]
    assert first[0] == first[1] != first[2] == first[3] != first[4] == first[5]


def test_the_seed_decides() -> None:
    phases = [Phase(20, 5, {"a": 1})]
    workloads = {"a": workload(1)}
    assert time_varying(phases, workloads, 1) == time_varying(phases, workloads, 1)
    assert time_varying(phases, workloads, 1) != time_varying(phases, workloads, 2)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match=r"a has 3 requests, used up at \d+ s"):
        time_varying([Phase(10, 5, {"a": 1})], {"a": workload(1, count=3)}, 1)
    with pytest.raises(ValueError, match="no workload b; there are a"):
        time_varying([Phase(10, 5, {"b": 1})], {"a": workload(1)}, 1)
    mixed = {"a": workload(1), "b": workload(1, block_tokens=16)}
    with pytest.raises(ValueError, match="block sizes"):
        time_varying([Phase(10, 5, {"a": 1, "b": 1})], mixed, 1)


def test_a_phase_as_text() -> None:
    assert Phase.parse("60:110:tool-agent=3,production=1") == Phase(
        60, 110, {"tool-agent": 3, "production": 1}
    )


@pytest.mark.parametrize(
    "text", ["60", "60:1", "60:1:a", "60:0:a=1", "-1:2:a=1", "1:1:a=0", "x:1:a=1"]
)
def test_what_is_no_phase(text: str) -> None:
    with pytest.raises(ValueError, match="is no phase"):
        Phase.parse(text)
