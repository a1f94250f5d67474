"""A control plane with a pool or two, and short names for the events that tests feed it."""

from dataclasses import replace
from typing import Any, TypeVar

from vertumnus_router.core.config import ControllerConfig, PolicyConfig, PrefixConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import (
    Abort,
    Dispatch,
    Effect,
    PlanEnded,
    Regroup,
    Reject,
)
from vertumnus_router.core.events import (
    BlocksStored,
    Event,
    Failure,
    PoolJoined,
    PrefillFinished,
    PrefillStarted,
    RankReported,
    RequestArrived,
    RequestFailed,
    RequestFinished,
)
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.profile import Coefficients, Profile
from vertumnus_router.core.types import BlockHash, PoolId, Rank, Request, RequestId, WorkerId
from vertumnus_router.lattice import Block, parse_composition

#: Ê_C(R, P) = R/1000/C seconds: no overhead, perfect speed-up, cached tokens free.
IDEAL = Profile(
    version=1,
    device="paper and pencil",
    model="none",
    sglang_version="0.5.23",
    date="2026-01-01",
    measured=False,
    note="numbers that can be computed by hand",
    degrees={c: Coefficients(d_s=0.0, a_s_per_token=0.0) for c in (1, 2, 4)},
    b_s_per_token=0.0,
    c_s_per_token=0.001,
    alpha_s_per_pair=0.0,
)

BLOCK_TOKENS = 100
NO_CORRECTION = CorrectionConfig(gain=0.0)


def with_overhead(d_2_s: float) -> Profile:
    """IDEAL, but a prefill at degree 2 costs ``d_2_s`` on top."""
    degrees = dict(IDEAL.degrees)
    degrees[2] = Coefficients(d_s=d_2_s, a_s_per_token=0.0)
    return Profile(**{f: getattr(IDEAL, f) for f in IDEAL.__struct_fields__} | {"degrees": degrees})


def joined(pool: str = "p", size: int = 4, **other: Any) -> PoolJoined:
    base = PoolJoined(
        pool=PoolId(pool),
        size=size,
        degrees=(1, 2, 4),
        block_tokens=BLOCK_TOKENS,
        context_tokens=100_000,
        kv_capacity_tokens=1_000_000,
        chunk_tokens=2_000,
        manifest="m",
    )
    return replace(base, **other)


def reported(
    rank: int,
    block: Block,
    *,
    pool: str = "p",
    life: str = "life-1",
    epoch: int = 1,
    manifest: str = "m",
) -> RankReported:
    return RankReported(Rank(PoolId(pool), rank), life, epoch, block, manifest)


def chain(name: int, length: int) -> tuple[BlockHash, ...]:
    """``length`` block hashes of one prompt; another name shares none of them."""
    return tuple(BlockHash(name * 1_000_000 + i) for i in range(length))


def request(name: str, tokens: int = 1000, **other: Any) -> Request:
    return Request(RequestId(name), tokens, other.pop("output_tokens", 10), **other)


class Scene:
    """``feed`` returns the effects of one event; ``now`` moves by ``wait``."""

    def __init__(
        self, composition: str | None = "2x1", profile: Profile = IDEAL, **config: Any
    ) -> None:
        # Each scene is of one policy; who wants another, or pulls, says so.
        config.setdefault("policy", "paper")
        config.setdefault("prefix", PrefixConfig(pull=False))
        config.setdefault("tie_s", 0.0)
        config.setdefault("correction", NO_CORRECTION)
        config.setdefault("controller", ControllerConfig(mode="off"))
        self.control = ControlPlane(PolicyConfig(**config), profile)
        self.now = 1000.0
        if composition is not None:
            self.launch(composition)

    def launch(self, composition: str, pool: str = "p", **other: Any) -> list[Effect]:
        """Join a pool and let every rank report."""
        size = sum(int(n) * int(d) for n, d in (t.split("x") for t in composition.split(",")))
        effects = self.feed(joined(pool, size, **other))
        for block in parse_composition(composition, size, (1, 2, 4)):
            for rank in block.ranks:
                effects += self.feed(reported(rank, block, pool=pool))
        return effects

    def feed(self, event: Event) -> list[Effect]:
        return self.control.on_event(event, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def arrive(self, name: str, tokens: int = 1000, **other: Any) -> list[Effect]:
        return self.feed(RequestArrived(request(name, tokens, **other)))

    def dispatched(self, name: str, tokens: int = 1000, **other: Any) -> Dispatch:
        """The request arrives and is dispatched at once."""
        return only(Dispatch, self.arrive(name, tokens, **other))

    def start(self, name: str, worker: str) -> list[Effect]:
        return self.feed(PrefillStarted(RequestId(name), WorkerId(worker)))

    def first_token(self, name: str, worker: str, **other: Any) -> list[Effect]:
        return self.feed(PrefillFinished(RequestId(name), WorkerId(worker), **other))

    def finish(self, name: str) -> list[Effect]:
        return self.feed(RequestFinished(RequestId(name)))

    def fail(
        self, name: str, failure: Failure = Failure.DISCONNECTED, streamed: bool = False
    ) -> list[Effect]:
        return self.feed(RequestFailed(RequestId(name), failure, "it broke", streamed))

    def store(self, rank: int, blocks: tuple[BlockHash, ...], pool: str = "p") -> None:
        self.feed(BlocksStored(Rank(PoolId(pool), rank), None, blocks))

    def queue_s(self, worker: str) -> float:
        return next(w.queue_s for w in self.control.workers(self.now) if w.id == worker)

    def serving(self) -> list[str]:
        return [w.id for w in self.control.workers(self.now) if w.reason is None]


E = TypeVar("E", Dispatch, Reject, Abort, Regroup, PlanEnded)


def only(kind: type[E], effects: list[Effect]) -> E:
    """The one effect there is, which is of this kind."""
    assert len(effects) == 1, effects
    assert isinstance(effects[0], kind), effects
    return effects[0]
