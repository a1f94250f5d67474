"""What is written on SGLang's requests about their prefixes.

Apart from ``prefixes`` because a router, which has no torch, loads the patches for their digest.
"""

from collections.abc import Mapping
from typing import Any

#: Attribute of SGLang's request object: the longest prefix that it may use in this step.
AGREED = "vertumnus_agreed_prefix"
#: Attribute of SGLang's allocator of KV, and of its requests, while a step is planned: the
#: ``Budget`` that all ranks of the block plan with.
BUDGET = "vertumnus_budget"
#: Attribute of SGLang's allocator of KV: the ``Loans`` of its rank, once it has any.
LOANS = "vertumnus_loans"
#: Eviction priority of a copy that another rank of the block keeps, too: below any that SGLang
#: or a client gives.
SURPLUS_PRIORITY = -(2**40)


class Budget:
    """The memory that every rank of a block has for a step.

    ``tokens`` and ``rows`` are the least that one of them has free. ``costs`` are, by request,
    the most that its cached prefix takes of a rank's tokens when it is put to use: it cannot be
    evicted any more, and on some ranks it could not before. Ranks that counted for themselves
    would plan different steps.
    """

    def __init__(self, tokens: int, rows: int, costs: Mapping[int, int]) -> None:
        self.tokens = tokens
        self.rows = rows
        self._costs = dict(costs)

    def use(self, request: Any) -> None:
        """The request's cached prefix is about to be put to use; counts once."""
        self.tokens -= self._costs.pop(id(request), 0)
