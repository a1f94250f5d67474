"""What the patches call: the worker runtime implements these and binds itself.

A process that bound nothing is an ordinary SGLang process; the patches are then not even
installed, so an unbound seam is a mistake and raises.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from vertumnus_patches.block_events import BlockEvent


class RankSeam(Protocol):
    """One rank (a scheduler process)."""

    @property
    def is_member(self) -> bool:
        """Whether this rank mirrors another one that leads its block."""

    @property
    def computes_on_cpu(self) -> bool:
        """Whether whatever spins takes cores from the model."""

    def sleep(self, sleep: Callable[[], None]) -> None:
        """The rank is idle: let it wait on its own sockets, if it may."""

    def on_parallel_ready(self) -> None:
        """SGLang's own process groups exist; build the lattice's."""

    def least_capacity(self, tokens: int) -> int:
        """Of the ranks that may be in one block with this one; KV tokens. Collective."""

    def exchange_requests(self, received: list[Any] | None) -> list[Any]:
        """Requests of this step: the leader's go to every member, which pass None."""

    def answers(self, home: int | None) -> bool:
        """Whether this rank tells the client about requests at home on that rank; None: of no
        request."""

    def admit_prefills(self, scheduler: Any, running_batch: Any, admit: Callable[[], Any]) -> Any:
        """The plan of the next prefill step: ``admit()``, or SGLang's plan without one."""

    def follow(self, scheduler: Any, knobs: Mapping[str, float]) -> None:
        """Follow a command of a move."""

    def shards(self, new_tokens: list[int], all_tokens: list[int], degree: int) -> bool:
        """Whether a prefill step of these sequences is computed in parts."""

    def compute_once(self, runner: Any, forward_batch: Any, compute: Callable[[], Any]) -> Any:
        """The output of a forward step: ``compute()``, or what the leader's makes of it."""

    def sync_token_ids(self, token_ids: Any) -> None:
        """Overwrite the sampled ids, shape [batch], with the leader's, in place."""

    def on_block_event(self, event: BlockEvent) -> None:
        """Blocks have entered or left the tree; about to be published."""

    def on_events_published(self) -> None:
        """The block events so far have been published, as one batch, or there were none."""

    def on_batch_started(self, scheduler: Any, batch: Any) -> None:
        """A forward step of the leader is about to run."""

    def on_batch_finished(self, scheduler: Any, batch: Any) -> None:
        """Its results have been handed out."""


class ControllerSeam(Protocol):
    """The process that hands requests to ranks (SGLang's data-parallel controller)."""

    def run(self, controller: Any) -> None:
        """The controller's main loop, for the life of the process."""


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
