"""A workload like L-Eval: long documents, several questions about each."""

from dataclasses import dataclass
from random import Random

from vertumnus_sim.workloads.lengths import Quantiles, sample
from vertumnus_sim.workloads.statistics import PAPER
from vertumnus_sim.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

_BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS
#: Requests per second when nobody asks for another rate.
RATE_PER_S = 1.0
#: A fit to the paper's mean input.
_CHARACTERS_PER_TOKEN = 4.8


@dataclass(frozen=True, slots=True)
class _Task:
    """Characters: of the documents the shortest, the median and the longest; of a question the
    mean; of an answer the median and the longest."""

    documents: int
    questions: int
    document: tuple[int, int, int]
    question: int
    answer: tuple[int, int]


#: Counted in the files of OpenLMLab/LEval; of gsm100 all questions follow the same examples. The
#: last two are estimates from what is said of them, with as many questions as the paper's total
#: leaves.
_TASKS = {
    "coursera": _Task(15, 172, (23_348, 34_530, 71_344), 302, (1, 4)),
    "financial_qa": _Task(8, 68, (21_897, 22_708, 31_244), 219, (369, 996)),
    "gov_report_summ": _Task(14, 14, (13_467, 22_164, 87_650), 48, (1_755, 2_538)),
    "gsm100": _Task(1, 100, (16_795, 16_795, 16_795), 267, (2, 5)),
    "legal_contract_qa": _Task(23, 154, (32_321, 93_395, 272_018), 230, (324, 2_332)),
    "meeting_summ": _Task(23, 177, (15_607, 50_272, 120_229), 68, (344, 769)),
    "multidoc_qa": _Task(23, 158, (12_313, 14_310, 32_922), 76, (106, 285)),
    "natural_question": _Task(21, 109, (22_915, 59_584, 140_097), 51, (15, 276)),
    "news_summ": _Task(12, 12, (12_786, 18_265, 80_470), 37, (1_621, 1_988)),
    "paper_assistant": _Task(23, 69, (19_275, 26_919, 85_279), 483, (1_764, 3_583)),
    "patent_summ": _Task(14, 14, (12_503, 23_201, 50_956), 65, (715, 1_338)),
    "quality": _Task(15, 202, (12_573, 26_851, 29_163), 340, (66, 181)),
    "review_summ": _Task(24, 144, (72_892, 79_632, 90_661), 88, (465, 1_567)),
    "sci_fi": _Task(7, 64, (20_595, 62_375, 101_349), 169, (18, 19)),
    "scientific_qa": _Task(23, 184, (11_930, 21_775, 28_884), 46, (62, 579)),
    "topic_retrieval_longchat": _Task(50, 150, (40_664, 56_487, 72_128), 93, (38, 53)),
    "tpo": _Task(15, 269, (15_165, 16_263, 17_374), 307, (1, 1)),
    "tv_show_summ": _Task(14, 14, (19_395, 30_259, 45_376), 30, (601, 1_178)),
    "codeU": _Task(90, 90, (100_000, 125_000, 150_000), 200, (12, 40)),
    "narrative_qa": _Task(20, 205, (220_000, 280_000, 350_000), 60, (30, 120)),
}


def l_eval_like(seed: int) -> list[TraceRequest]:
    """Independent questions in random order. Nothing is known of the paper's; were those about
    one document close together, a higher rate would make them come all at once."""
    source = Random(f"l-eval {seed}")
    found: list[TraceRequest] = []
    fresh = 0
    span_s = PAPER["l-eval"].requests / RATE_PER_S
    for task in _TASKS.values():
        documents = sample(_lengths(task.document), task.documents, source)
        answers = iter(sample(_answers(task), task.questions, source))
        for number, document_tokens in enumerate(documents):
            whole = document_tokens // _BLOCK_TOKENS
            document = tuple(range(fresh, fresh + whole))
            fresh += whole
            # As evenly as it goes.
            questions = (task.questions * (number + 1)) // task.documents - (
                task.questions * number
            ) // task.documents
            for _ in range(questions):
                tokens = document_tokens + _question_tokens(task, source)
                own = -(-tokens // _BLOCK_TOKENS) - whole
                blocks = (*document, *range(fresh, fresh + own))
                fresh += own
                at_s = source.uniform(0, span_s)
                found.append(TraceRequest(at_s, tokens, next(answers), blocks, _BLOCK_TOKENS))
    return sorted(found, key=lambda request: request.arrival_s)


def _lengths(characters: tuple[int, int, int]) -> Quantiles:
    return Quantiles((0, 50, 100), [count / _CHARACTERS_PER_TOKEN for count in characters])


def _answers(task: _Task) -> Quantiles:
    median, longest = (max(1.0, count / _CHARACTERS_PER_TOKEN) for count in task.answer)
    likely = min(1.8 * median, longest)
    return Quantiles((0, 50, 95, 100), (max(1.0, median / 2), median, likely, longest))


def _question_tokens(task: _Task, source: Random) -> int:
    mean = task.question / _CHARACTERS_PER_TOKEN
    return max(1, round(source.uniform(0.5 * mean, 1.5 * mean)))
