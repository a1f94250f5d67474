"""Durations of prefill steps, from reports."""

from vertumnus_bench.steps import StepTimes
from vertumnus_router.protocol import PrefillDone, PrefillFinished, PrefillStarted

CHUNK = 1024


def started(rank: int, *rids: str) -> PrefillStarted:
    return PrefillStarted(rank=rank, incarnation="a", epoch=1, rids=rids)


def finished(rank: int, *done: tuple[str, int, int, float]) -> PrefillFinished:
    return PrefillFinished(
        rank=rank,
        incarnation="a",
        epoch=1,
        done=tuple(
            PrefillDone(rid=rid, input_tokens=tokens, cached_tokens=cached, compute_s=seconds)
            for rid, tokens, cached, seconds in done
        ),
    )


def steps(*reports: PrefillStarted | PrefillFinished) -> list[float]:
    times = StepTimes(CHUNK)
    for report in reports:
        times.feed(report)
    return times.steps_s


def test_what_begins_and_ends_together_is_one_step() -> None:
    assert steps(started(0, "a"), finished(0, ("a", 1024, 0, 0.5))) == [0.5]
    both = finished(0, ("a", 500, 0, 0.5), ("b", 1500, 1400, 0.5))
    assert steps(started(0, "a", "b"), both) == [0.5]


def test_a_long_prompt_alone_counts_with_its_mean_chunk() -> None:
    assert steps(started(0, "a"), finished(0, ("a", 4000, 500, 2.0))) == [0.5]


def test_prefills_that_share_steps_with_others_are_left_out() -> None:
    found = steps(
        started(0, "a", "b"),
        finished(0, ("a", 700, 0, 0.5)),  # b is split: it goes on in the next step
        started(0, "c"),
        finished(0, ("b", 700, 0, 0.8), ("c", 200, 0, 0.3)),
        finished(0, ("d", 700, 0, 0.8)),
    )
    assert found == []


def test_two_prompts_of_more_than_a_chunk_do_not_tell_their_steps() -> None:
    assert steps(started(0, "a", "b"), finished(0, ("a", 900, 0, 1), ("b", 900, 0, 1))) == []


def test_ranks_do_not_disturb_each_other() -> None:
    found = steps(
        started(0, "a"),
        started(1, "b"),
        finished(1, ("b", 1024, 0, 0.2)),
        finished(0, ("a", 1024, 0, 0.4)),
    )
    assert found == [0.2, 0.4]
