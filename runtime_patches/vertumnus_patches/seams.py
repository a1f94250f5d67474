"""What the patches call: the worker runtime implements these and binds itself.

A process that bound nothing is an ordinary SGLang process; the patches are then not even
installed, so an unbound seam is a mistake and raises.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar


class RankSeam(Protocol):
    """One rank (a scheduler process)."""

    @property
    def is_member(self) -> bool:
        """Whether this rank mirrors another one that leads its block."""

    @property
    def may_sleep(self) -> bool:
        """Whether an idle rank may wait on its own sockets."""

    def on_parallel_ready(self) -> None:
        """SGLang's own process groups exist; build the lattice's."""

    def exchange_requests(self, received: list[Any] | None) -> list[Any]:
        """Requests of this step: the leader's go to every member, which pass None."""

    def reconfigure(self, scheduler: Any, knobs: Mapping[str, float]) -> bool:
        """Apply a regroup command; False when it was refused."""

    def shards(self, new_tokens: list[int], all_tokens: list[int], degree: int) -> bool:
        """Whether a prefill step of these sequences is computed in parts."""

    def compute_once(self, runner: Any, forward_batch: Any, compute: Callable[[], Any]) -> Any:
        """The output of a forward step: ``compute()``, or what the leader's makes of it."""

    def sync_token_ids(self, token_ids: Any) -> None:
        """Overwrite the sampled ids, shape [batch], with the leader's, in place."""

    def on_batch_started(self, scheduler: Any, batch: Any) -> None:
        """A forward step of the leader is about to run."""

    def on_batch_finished(self, scheduler: Any, batch: Any) -> None:
        """Its results have been handed out."""


class ControllerSeam(Protocol):
    """The process that hands requests to ranks (SGLang's data-parallel controller)."""

    def run(self, controller: Any) -> None:
        """The controller's main loop, for the life of the process."""

    def on_control(self, controller: Any, message: Any) -> None:
        """A control message has been handed to the ranks that lead now."""


class FrontSeam(Protocol):
    """The launching process, which becomes the HTTP front."""

    def process_start_method(self) -> str:
        """``fork`` or ``spawn``: how SGLang's children are made."""


class UnboundSeam(RuntimeError):
    """A patch ran in a process where no runtime was bound."""


class Seams:
    """The bound runtime of this process."""

    def __init__(self) -> None:
        self._rank: RankSeam | None = None
        self._controller: ControllerSeam | None = None
        self._front: FrontSeam | None = None

    def bind(self, *, rank: RankSeam, controller: ControllerSeam, front: FrontSeam) -> None:
        self._rank, self._controller, self._front = rank, controller, front

    @property
    def are_bound(self) -> bool:
        """Whether this process runs as part of a pool, patches and all."""
        return self._rank is not None

    @property
    def rank(self) -> RankSeam:
        return _bound(self._rank, "rank")

    @property
    def controller(self) -> ControllerSeam:
        return _bound(self._controller, "controller")

    @property
    def front(self) -> FrontSeam:
        return _bound(self._front, "front")


T = TypeVar("T")


def _bound(seam: T | None, name: str) -> T:
    if seam is None:
        raise UnboundSeam(f"the {name} seam is not bound in this process")
    return seam


seams = Seams()

__all__ = ["ControllerSeam", "FrontSeam", "RankSeam", "Seams", "UnboundSeam", "seams"]
