"""A baseline with a pool, and the short names for events that the control plane's tests use."""

from typing import Any

from vertumnus_router.core.events import HandedOver, RankLost, RequestCancelled
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId
from vertumnus_sim.baselines import make_baseline

from tests.router.core.scene import IDEAL, Scene


class BaselineScene(Scene):
    """``Scene`` with a baseline in place of the control plane."""

    def __init__(
        self,
        name: str,
        composition: str | None = "2x1",
        profile: Profile = IDEAL,
        seed: int = 0,
        **knobs: Any,
    ) -> None:
        self.control = make_baseline(name, knobs, profile, seed)
        self.now = 1000.0
        if composition is not None:
            self.launch(composition)

    def worker(self, name: str, tokens: int = 1000, **other: Any) -> str:
        """Where the request goes."""
        return str(self.dispatched(name, tokens, **other).worker)

    def serve(self, name: str, worker: str) -> None:
        """The request from its prefill to its end."""
        self.start(name, worker)
        self.first_token(name, worker)
        self.finish(name)

    def lose(self, rank: int, life: str | None = "life-1", pool: str = "p") -> list[Any]:
        return self.feed(RankLost(Rank(PoolId(pool), rank), "it died", life))

    def hand_over(self, name: str, worker: str) -> list[Any]:
        return self.feed(HandedOver(RequestId(name), WorkerId(worker)))

    def cancel(self, name: str) -> list[Any]:
        return self.feed(RequestCancelled(RequestId(name)))
