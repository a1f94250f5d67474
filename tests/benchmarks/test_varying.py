from vertumnus_bench.stream import Stream
from vertumnus_bench.varying import CONTROLLED, Replay, Sample, VaryingPlan, figures
from vertumnus_bench.workload import Ask


def replay(name: str, first_s: list[float | None], compositions: list[str]) -> Replay:
    return Replay(
        name=name,
        streams=[Stream(Ask((1,), 1), first_s=s) for s in first_s],
        composition=[Sample(float(at), c) for at, c in enumerate(compositions)],
        verdicts=[
            {"action": "keep", "reason": "enough", "utilisation": 0.5},
            {"action": "split", "reason": "overload", "utilisation": 0.9},
        ],
    )


def test_the_controller_is_held_against_each_fixed_composition() -> None:
    found = figures(
        [
            replay("4x1", [1.0, 3.0], ["4x1"]),
            replay("1x4", [4.0, None], ["1x4"]),
            replay(CONTROLLED, [1.0, 2.0], ["4x1", "4x1", "2x1,1x2", "2x2", "2x2", "4x1"]),
        ]
    )
    assert found["controller_mean_ttft_s"] == 1.5
    assert found["fixed"] == {"4x1": 2.0, "1x4": 4.0}
    assert found["compositions"] == ["4x1", "2x1,1x2", "2x2", "4x1"]
    assert found["verdicts"] == {"keep: enough": 1, "split: overload": 1}
    assert found["utilisation"] == [0.5, 0.9]
    assert found["p90_ttft_s"][CONTROLLED] == 2.0


def test_phases_repeat_in_turn() -> None:
    plan = VaryingPlan(rounds=3)
    assert plan.phases == [plan.burst, plan.long] * 3
    assert plan.seconds == 3 * (plan.burst.seconds + plan.long.seconds)
