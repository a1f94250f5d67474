import pytest
from vertumnus_sim.workloads.statistics import PAPER, reused_tokens, statistics, table
from vertumnus_sim.workloads.traces import TraceRequest


def request(tokens: int, blocks: tuple[int, ...], output: int = 1) -> TraceRequest:
    return TraceRequest(0.0, tokens, output, blocks, 10)


def test_reuse_is_the_longest_prefix_seen_before() -> None:
    requests = [
        request(25, (1, 2, 3)),
        request(25, (1, 2, 3)),  # all of it, the part of a block included
        request(30, (1, 4, 3)),  # 3 comes behind something else
        request(35, (1, 4)),  # what has no id is not shared
    ]
    assert reused_tokens(requests) == [0, 25, 10, 20]
    assert statistics(requests).reuse == 55 / 115


def test_means_and_percentiles() -> None:
    found = statistics([request(n, (), output=2 * n) for n in range(1, 201)])
    assert (found.requests, found.mean_input, found.mean_output) == (200, 100.5, 201)
    assert (found.p99_input, found.p99_output) == (198, 396)
    with pytest.raises(ValueError, match="no requests"):
        statistics([])


def test_the_papers_figures_stand_beside() -> None:
    found = statistics([request(6_952, (), output=822)])
    rows = table("mine", found, PAPER["production"]).splitlines()
    assert rows[1].split() == ["mine", "1", "6,952", "6,952", "822", "822", "0.00%"]
    assert rows[2].split()[-6:] == ["22,446", "6,952", "81,724", "411", "4,227", "24.75%"]
    assert rows[3].split()[-5:] == ["+0.0%", "-91.5%", "+100.0%", "-80.6%", "-100.0%"]
    assert len(table("mine", found).splitlines()) == 2
