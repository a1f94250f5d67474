"""What clients ask, drawn from a seed: the same seed asks the same, whatever the pool does.

Pure: nothing here sends anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

Tokens = tuple[int, ...]

#: Ordinary ids in the vocabulary of one token per byte, and in any larger one.
IDS = range(5, 250)


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client hangs up: after so many seconds, or once it has seen so many events."""

    after_s: float | None = None
    after_events: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy, exactly ``new_tokens``, streamed."""

    prompt: Tokens
    new_tokens: int
    leave: Leave | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The traffic of many chatting clients. Ranges are inclusive, shares between 0 and 1.

    A prompt continues the client's conversation (``follow_ups``), or asks about one of the
    ``documents`` that all clients share (``shared``), or stands alone.
    """

    clients: int = 64
    documents: int = 10
    document_tokens: tuple[int, int] = (200, 3500)
    question_tokens: tuple[int, int] = (32, 480)
    new_tokens: tuple[int, int] = (8, 48)
    follow_ups: float = 0.25
    shared: float = 0.5
    disconnects: float = 0.1
    leave_within_s: float = 4.0
    longest_tokens: int = 4000


def random_tokens(source: Random, count: int) -> Tokens:
    return tuple(source.choices(IDS, k=count))


def documents(mix: Mix, seed: int) -> list[Tokens]:
    """Lengths are spread evenly over their logarithm: most are short, a few long."""
    shortest, longest = mix.document_tokens
    return [
        random_tokens(
            source := Random(f"document {n} of {seed}"),
            round(shortest * (longest / shortest) ** source.random()),
        )
        for n in range(mix.documents)
    ]


class Conversation:
    """The endless sequence of one client's requests.

    Every turn draws from a source of its own, so that what a client asks depends on what it
    was answered before, and on nothing else: not on who left when.
    """

    def __init__(self, mix: Mix, shared: Sequence[Tokens], seed: int | str, client: int) -> None:
        self._mix = mix
        self._shared = shared
        self._name = f"client {client} of {seed}"
        self._turn = 0
        self._last: Ask | None = None

    def next(self, answer: Sequence[int]) -> Ask:
        """The next request, after ``answer`` to the last one (empty before the first)."""
        mix = self._mix
        source = Random(f"turn {self._turn} of {self._name}")
        question = random_tokens(source, source.randint(*mix.question_tokens))
        document = source.choice(self._shared)
        kind = source.random()
        ask = Ask(
            prompt=self._before(answer, kind, document, mix.longest_tokens - len(question))
            + question,
            new_tokens=source.randint(*mix.new_tokens),
            leave=_leave(mix, source) if source.random() < mix.disconnects else None,
        )
        self._turn += 1
        self._last = ask
        return ask

    def _before(
        self, answer: Sequence[int], kind: float, document: Tokens, room_tokens: int
    ) -> Tokens:
        """What stands before the question."""
        last, mix = self._last, self._mix
        if kind < mix.follow_ups:
            # Whoever meant to leave has no conversation to go on with, even if the answer won.
            if last is None or last.leave is not None or len(answer) != last.new_tokens:
                return ()
            history = last.prompt + tuple(answer)
            return history if len(history) <= room_tokens else ()
        return document[:room_tokens] if kind < mix.follow_ups + mix.shared else ()


def _leave(mix: Mix, source: Random) -> Leave:
    """Half of those who leave do so at a random moment, half in the middle of the answer."""
    if source.random() < 0.5:
        return Leave(after_s=source.uniform(0.0, mix.leave_within_s))
    return Leave(after_events=source.randint(1, mix.new_tokens[0] - 1))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at its time, however busy the pool is."""

    at_s: float
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Poisson arrivals of cold prompts; ``tokens`` is the inclusive range of their lengths."""

    seconds: float
    rate_per_s: float
    tokens: tuple[int, int]
    new_tokens: int = 1


def arrivals(phases: Sequence[Phase], seed: int) -> list[Arrival]:
    """The phases one after the other, times counted from the start of the first."""
    found: list[Arrival] = []
    begin_s = 0.0
    for number, phase in enumerate(phases):
        source = Random(f"phase {number} of {seed}")
        at_s = source.expovariate(phase.rate_per_s)
        while at_s < phase.seconds:
            prompt = random_tokens(source, source.randint(*phase.tokens))
            found.append(Arrival(begin_s + at_s, Ask(prompt, phase.new_tokens)))
            at_s += source.expovariate(phase.rate_per_s)
        begin_s += phase.seconds
    return found
