"""One prefill at a simulated worker."""

from dataclasses import dataclass, field

from vertumnus_router.core.types import Request, WorkerId


@dataclass(slots=True, eq=False)
class Job:
    """A request as the ranks of a worker have it.

    ``home`` is the rank of the pool that it belongs to, where KV is partitioned the leader of its
    worker; ``worker`` and ``attempt`` name the attempt to the router. ``done`` tokens of the prompt
    are computed or were cached, ``cached`` when it first began. ``filled`` says of each rank, by
    its number, how many blocks of the prompt are pinned there; ``spare`` how many more it has
    reserved.
    """

    request: Request
    home: int
    worker: WorkerId
    attempt: int
    sequence: int
    done: int = 0
    cached: int | None = None
    compute_s: float = 0.0
    began_s: float | None = None
    begun: bool = False
    filled: dict[int, int] = field(default_factory=dict)
    spare: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Tokens that are yet to be computed."""
        return self.request.input_tokens - self.done
