"""Which number format computes faster on the CPU at hand."""

from collections.abc import Callable
from functools import cache, partial

#: A prefill's product and a decode's, in rows x inner x columns: compute-bound, bandwidth-bound.
_SHAPES = ((256, 1024, 1024), (1, 1024, 4096))
_ROUNDS = 5


@cache
def faster_dtype() -> str:
    """``bfloat16`` where both products are faster in it on one thread, else ``float32``.

    Without AVX512-BF16 or AMX, torch emulates bfloat16 and loses several times over. Takes
    about 50 ms.
    """
    import torch
    from torch.nn.functional import linear

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows, inner, columns in _SHAPES:
            left, right = torch.randn(rows, inner), torch.randn(columns, inner)
            full_s = _fastest_s(partial(linear, left, right))
            if _fastest_s(partial(linear, left.bfloat16(), right.bfloat16())) >= full_s:
                return "float32"
    finally:
        torch.set_num_threads(threads)
    return "bfloat16"


def _fastest_s(product: Callable[[], object]) -> float:
    import time

    product()
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        product()
        times.append(time.perf_counter() - started)
    return min(times)
