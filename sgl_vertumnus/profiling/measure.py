"""Goes through the plan on a live pool, one prefill at a time."""

from collections.abc import Sequence
from random import Random

from sgl_vertumnus.profiling.live_pool import LivePool, PoolError
from sgl_vertumnus.profiling.plan import Cell, Plan, composition_for
from sgl_vertumnus.profiling.progress import Progress
from sgl_vertumnus.profiling.record import Record, Sample
from sgl_vertumnus.profiling.reports import PrefillReports

#: How often a prefill is tried that was not what was asked.
ATTEMPTS = 4
#: So many prefills in a row that could not be had mean that none can.
_GIVE_UP = 3
#: The report is sent before the answer, but by another way.
_REPORT_S = 5.0
#: Of a rank's memory that may be filled before the caches are emptied.
_FILL = 0.5
_WARM_TOKENS = 512
_LOWEST_ID = 5


class Measuring:
    """Uses ``pool`` alone. ``reports`` None: the time is that until the first token."""

    def __init__(
        self,
        pool: LivePool,
        plan: Plan,
        record: Record,
        progress: Progress,
        reports: PrefillReports | None,
        prefix: str,
    ) -> None:
        self._pool, self._plan, self._record = pool, plan, record
        self._progress, self._reports, self._prefix = progress, reports, prefix
        self._document = self._tokens("document", plan.longest_prefix)
        self._asked = 0
        self._given_up = 0
        self._degree: int | None = None
        self._has_document = False
        self._stored_tokens = 0

    def run(self) -> None:
        """Every measurement of the plan that the record lacks; one that cannot be had is left out,
        which is said.

        Raises:
            PoolError: when the pool fails, or several in a row cannot be had.
        """
        self._flush()
        for repetition in range(self._plan.repetitions):
            for cell in self._plan.cells(repetition):
                if not self._record.has(cell, repetition):
                    self._measure(cell, repetition)

    def estimate_s(self) -> float:
        """How long that will take, judged by two prompts at the smallest degree: a line through
        them, as if larger degrees were no faster, without the attention of longer ones."""
        short, mid = self._probe_lengths()
        self._to(min(self._plan.degrees))
        short_s, mid_s = (self._cold(f"probe {n}", n) for n in (short, mid))
        token_s = max(0.0, mid_s - short_s) / (mid - short)
        start_s = max(0.0, short_s - token_s * short)
        left = [
            cell
            for repetition in range(self._plan.repetitions)
            for cell in self._plan.cells(repetition)
            if not self._record.has(cell, repetition)
        ]
        visits = self._plan.repetitions * len(self._plan.degrees)
        tokens = sum(cell.uncached_tokens for cell in left) + visits * self._plan.longest_prefix
        return start_s * (len(left) + 2 * visits) + token_s * tokens

    def _probe_lengths(self) -> tuple[int, int]:
        lengths = sorted({uncached for uncached, _ in self._plan.prompts})
        return lengths[0], next((n for n in lengths[1:] if n >= _WARM_TOKENS), lengths[-1])

    def _measure(self, cell: Cell, repetition: int) -> None:
        self._to(cell.degree)
        for attempt in range(ATTEMPTS):
            sample = self._sample(cell, repetition, attempt)
            self._record.add(sample)
            if sample.fault is None:
                self._progress.step(f"{_name(cell)}: {sample.seconds:.4f} s")
                self._given_up = 0
                return
            self._progress.say(f"dropped: {_name(cell)}: {sample.fault}")
        self._given_up += 1
        if self._given_up == _GIVE_UP:
            raise PoolError(
                f"the last {_GIVE_UP} prefills could not be measured in {ATTEMPTS} attempts each; "
                f"the last was {_name(cell)}: {sample.fault}"
            )
        self._progress.step(f"left out: {_name(cell)}")

    def _sample(self, cell: Cell, repetition: int, attempt: int) -> Sample:
        self._make_room(cell.tokens)
        if cell.cached_tokens and not self._has_document:
            self._ask(self._document)
            self._has_document = True
        suffix = self._tokens(f"{cell} {repetition} {attempt}", cell.uncached_tokens)
        foreign = 0 if self._reports is None else self._reports.foreign
        seconds, cached, fault = self._ask([*self._document[: cell.cached_tokens], *suffix])
        if cached != cell.cached_tokens:
            fault = f"{cached} tokens were cached"
            self._has_document = False
        if self._reports is not None and self._reports.foreign > foreign:
            fault = "somebody else's request was prefilled meanwhile"
        return Sample(cell=cell, repetition=repetition, seconds=seconds, fault=fault)

    def _ask(self, tokens: Sequence[int]) -> tuple[float, int, str | None]:
        """Seconds, cached tokens, and what was wrong."""
        self._asked += 1
        rid = f"{self._prefix}{self._asked}"
        answer = self._pool.prefill(tokens, rid)
        self._stored_tokens += len(tokens)
        if self._reports is None:
            return answer.seconds, answer.cached_tokens, None
        done = self._reports.take(rid, _REPORT_S)
        if done is None:
            return answer.seconds, answer.cached_tokens, "its leader did not report it"
        return done.compute_s, done.cached_tokens, None

    def _to(self, degree: int) -> None:
        if degree == self._degree:
            return
        description = self._pool.description
        self._pool.move(composition_for(degree, description.pool_size, description.degrees))
        self._degree = degree
        # Asked for once more, so that all ranks of the new block have it before it is timed.
        self._has_document = False
        self._cold(f"warm-up {self._asked}", min(_WARM_TOKENS, self._longest))

    @property
    def _longest(self) -> int:
        return max(uncached for uncached, _ in self._plan.prompts)

    def _cold(self, name: str, tokens: int) -> float:
        self._make_room(tokens)
        seconds, _, _ = self._ask(self._tokens(name, tokens))
        return seconds

    def _make_room(self, tokens: int) -> None:
        """Empty the caches before ranks have to evict, which takes time, or evict the document."""
        room = self._pool.description.model.kv_capacity_tokens * _FILL
        if self._stored_tokens + tokens > room:
            self._flush()

    def _flush(self) -> None:
        self._pool.flush()
        self._stored_tokens = 0
        self._has_document = False

    def _tokens(self, name: str, count: int) -> list[int]:
        source = Random(f"{name} of {self._plan.seed}")
        return source.choices(range(_LOWEST_ID, self._plan.highest_id + 1), k=count)


def _name(cell: Cell) -> str:
    return f"degree {cell.degree}, {cell.uncached_tokens} behind {cell.cached_tokens} tokens"
