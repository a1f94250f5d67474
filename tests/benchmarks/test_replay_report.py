"""Arithmetic that can be done by hand."""

from typing import Any

import pytest
from vertumnus_bench.endpoint import Usage
from vertumnus_bench.replay_report import DEADLINES, report
from vertumnus_bench.replaying import Answer, Replayed

QWEN = DEADLINES["qwen3-30b-a3b"]


def answer(number: int, first_s: float | None = 0.5, **fields: Any) -> Answer:
    """Due each second, sent 2 ms late; three tokens, 0.1 s apart."""
    due_s = float(number)
    return Answer(
        number,
        due_s,
        1_000,
        3,
        **{
            "sent_s": due_s + 0.002,
            "first_s": first_s,
            "last_s": first_s and first_s + 0.2,
            "usage": Usage(1_000, 3, 400),
        }
        | fields,
    )


def figures(answers: list[Answer], tokens: list[int], **options: Any) -> dict[str, Any]:
    replayed = Replayed(answers, options.pop("loop_delays_s", [0.001] * 50), most_open=3)
    return report(replayed, tokens, **{"deadlines": QWEN, "max_lag_s": 0.05} | options)


def test_times_and_hits() -> None:
    found = figures([answer(n, first_s=0.1 * (n + 1)) for n in range(10)], [1_000] * 10)
    assert found["refused"] is None
    ttft = found["ttft_s"]
    assert (ttft["mean"], ttft["p50"], ttft["p90"], ttft["p99"]) == (0.55, 0.5, 0.9, 1.0)
    assert found["tpot_s"]["mean"] == 0.1
    assert found["hit_rate"] == 0.4
    assert found["rate_per_s"] == 1.0


def test_attainment_is_weighted_by_tokens_and_deadlines_go_by_length() -> None:
    found = figures(
        [
            answer(0, first_s=1.5),  # short, its deadline is 1 s
            answer(1, first_s=1.5),  # middle, 5 s
            answer(2, first_s=9.9),  # long, 10 s
            answer(3, first_s=0.1, failure=("broke off", "so")),
            answer(4, first_s=None, failure=("status 503", "full")),
        ],
        [8_191, 8_192, 32_768, 1_000, 40_000],
    )
    asked = 8_191 + 8_192 + 32_768 + 1_000 + 40_000
    assert found["slo"]["attainment"] == round((8_192 + 32_768) / asked, 4)
    assert found["slo"]["by_length"] == {
        "short": 0.0,
        "middle": 1.0,
        "long": round(32_768 / 72_768, 4),
    }


def test_failures_are_counted_by_cause_and_are_in_no_time() -> None:
    failures = [("status 503", "a"), ("status 503", "b"), ("timed out", "c")]
    answers = [answer(n, first_s=9.0, failure=failure) for n, failure in enumerate(failures)]
    found = figures([*answers, answer(3)], [1_000] * 4)
    assert found["failed"] == {"status 503": 2, "timed out": 1}
    assert found["failures"] == {"status 503": "a", "timed out": "c"}
    assert (found["requests"], found["served"]) == (4, 1)
    assert found["ttft_s"]["max"] == 0.5


def test_the_warm_up_is_counted_apart() -> None:
    answers = [
        answer(0, first_s=7.0, sent_s=5.0),
        answer(1, failure=("timed out", "")),
        answer(2),
        answer(3),
    ]
    found = figures(answers, [1_000] * 4, warmup_s=2.0)
    assert found["refused"] is None
    assert found["warm_up"] == {"seconds": 2.0, "requests": 2, "failed": {"timed out": 1}}
    assert found["ttft_s"]["n"] == 2 and found["ttft_s"]["max"] == 0.5
    assert found["failed"] == {}


@pytest.mark.parametrize(
    ("answers", "options", "why"),
    [
        ([answer(0), answer(1, sent_s=1.2)], {}, "requests left 200 ms late"),
        ([answer(0)], {"loop_delays_s": [0.0] * 50 + [0.08]}, "loop ran 80 ms late"),
        ([answer(0)], {"warmup_s": 5.0}, "no request was due"),
    ],
)
def test_a_client_that_was_late_tells_no_times(
    answers: list[Answer], options: dict[str, Any], why: str
) -> None:
    found = figures(answers, [1_000] * len(answers), **options)
    assert why in found["refused"]
    assert not {"ttft_s", "tpot_s", "slo", "hit_rate"} & found.keys()
    assert found["lag_s"] is not None


def test_what_servers_do_not_tell_is_not_invented() -> None:
    silent = answer(0, usage=None)
    counts = answer(1, usage=Usage(1_000, 3, None))
    found = figures([silent, counts], [1_000] * 2)
    assert found["hit_rate"] is None
    assert found["tpot_s"]["n"] == 1
    assert found["usage"]["told"] == 1 and found["usage"]["cached_told"] == 0
