from itertools import pairwise

from vertumnus_bench.workload import (
    Ask,
    Conversation,
    Leave,
    Mix,
    Phase,
    arrivals,
    documents,
)

MIX = Mix(clients=4, documents=3)


def talk(client: int, turns: int, *, mix: Mix = MIX, seed: int = 1, answered: int = 9) -> list[Ask]:
    """What the client asks when every answer is ``new_tokens`` times the same token."""
    conversation = Conversation(mix, documents(mix, seed), seed, client)
    asks = [conversation.next(())]
    while len(asks) < turns:
        asks.append(conversation.next([answered] * asks[-1].new_tokens))
    return asks


def test_a_seed_says_it_all() -> None:
    assert talk(0, 50) == talk(0, 50)
    assert talk(0, 5) != talk(1, 5)
    assert talk(0, 5) != talk(0, 5, seed=2)


def test_what_a_client_asks_does_not_depend_on_who_left_when() -> None:
    shared = documents(MIX, 1)
    patient, hurried = (Conversation(MIX, shared, 1, 0) for _ in range(2))
    ask = other = patient.next(()), hurried.next(())
    for _ in range(200):
        assert ask == other
        answer = [9] * ask[0].new_tokens
        # The one who means to leave sees the whole answer in one run, nothing in the next.
        seen = answer if ask[0].leave is None else []
        ask = patient.next(answer), ask[1]
        other = hurried.next(seen), other[1]


def test_prompts_keep_their_bounds_and_the_mix() -> None:
    asks = [ask for client in range(8) for ask in talk(client, 150)]
    shared = documents(MIX, 1)
    lengths = [len(ask.prompt) for ask in asks]
    assert min(lengths) >= 32 and max(lengths) <= 4000
    assert min(lengths) < 100 and max(lengths) > 2000
    assert all(8 <= ask.new_tokens <= 48 for ask in asks)
    leaving = sum(ask.leave is not None for ask in asks) / len(asks)
    assert 0.07 < leaving < 0.13
    about_documents = sum(
        any(ask.prompt[:200] == document[:200] for document in shared) for ask in asks
    )
    assert 0.4 < about_documents / len(asks) < 0.9


def test_a_follow_up_goes_on_from_the_whole_conversation() -> None:
    asks = talk(0, 100)
    follow_ups = [
        (before, after)
        for before, after in pairwise(asks)
        if after.prompt[: len(before.prompt)] == before.prompt
    ]
    assert len(follow_ups) > 10
    for before, after in follow_ups:
        answer = (9,) * before.new_tokens
        assert before.leave is None
        assert after.prompt[len(before.prompt) :][: len(answer)] == answer


def test_without_its_whole_answer_a_conversation_begins_anew() -> None:
    always = Mix(clients=1, documents=1, follow_ups=1.0, disconnects=0.0)
    conversation = Conversation(always, documents(always, 1), 1, 0)
    first = conversation.next(())
    second = conversation.next([9] * (first.new_tokens - 1))
    assert second.prompt[: len(first.prompt)] != first.prompt
    third = conversation.next([9] * second.new_tokens)
    assert third.prompt[: len(second.prompt)] == second.prompt


def test_leaving_is_by_time_or_by_events() -> None:
    leaves = [ask.leave for client in range(8) for ask in talk(client, 100) if ask.leave]
    timed = [leave for leave in leaves if leave.after_s is not None]
    assert timed and len(timed) < len(leaves)
    assert all(leave.after_events is None and leave.after_s <= 4.0 for leave in timed)
    assert all(
        leave == Leave(after_events=leave.after_events) for leave in leaves if leave not in timed
    )


def test_phases_follow_each_other_at_their_rates() -> None:
    phases = [
        Phase(seconds=100.0, rate_per_s=10.0, tokens=(32, 128)),
        Phase(seconds=100.0, rate_per_s=1.0, tokens=(1500, 3500)),
    ]
    found = arrivals(phases, seed=1)
    assert found == arrivals(phases, seed=1) != arrivals(phases, seed=2)
    assert [a.at_s for a in found] == sorted(a.at_s for a in found)
    burst = [a for a in found if a.at_s < 100.0]
    late = [a for a in found if a.at_s >= 100.0]
    assert 900 < len(burst) < 1100 and 70 < len(late) < 130
    assert all(32 <= len(a.ask.prompt) <= 128 for a in burst)
    assert all(1500 <= len(a.ask.prompt) <= 3500 for a in late)
