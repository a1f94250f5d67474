"""When the control plane is told that time passes."""

import asyncio
import gc

from vertumnus_router.clock import VirtualClock
from vertumnus_router.core.effects import Effect
from vertumnus_router.core.events import Event, Tick
from vertumnus_router.io.control_loop import ControlLoop

from tests.router.io.harness import run, until


class Ticked:
    """A control plane that counts. A scan takes ``slices`` ticks."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.ticks: list[float] = []
        self.queued_count = 0

    @property
    def scanning(self) -> bool:
        return self.slices > 0

    def on_event(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Tick)
        self.ticks.append(now)
        self.slices -= 1
        return []


def nothing(_: object) -> None:
    pass


def test_a_scan_has_a_tick_every_10_ms_until_it_is_over() -> None:
    async def scenario() -> None:
        core, clock = Ticked(slices=5), VirtualClock()
        loop = ControlLoop(core, clock, command=nothing, pull=nothing)
        ticking = asyncio.create_task(loop.tick())
        await until(lambda: len(core.ticks) >= 5, "scanned")
        await asyncio.sleep(0.05)
        ticking.cancel()
        assert [round(at, 6) for at in core.ticks] == [0.01, 0.02, 0.03, 0.04, 0.05]

    run(scenario())


def test_no_garbage_is_looked_for_while_a_scan_goes_on() -> None:
    async def scenario() -> None:
        core, clock = Ticked(slices=1_000_000), VirtualClock()
        loop = ControlLoop(core, clock, command=nothing, pull=nothing)
        ticking = asyncio.create_task(loop.tick())
        await until(lambda: not gc.isenabled(), "off during the scan")
        core.slices = 0
        await until(gc.isenabled, "on again behind it")
        core.slices = 1_000_000
        await until(lambda: not gc.isenabled(), "off during the next")
        ticking.cancel()
        await until(ticking.done, "stopped")
        assert gc.isenabled()

    run(scenario())
