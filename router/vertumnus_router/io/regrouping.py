"""Carry out what the control plane wants of pools: commands to their fronts, answers to askers."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import msgspec

from vertumnus_router.core.effects import PlanEnded, Regroup
from vertumnus_router.core.events import (
    Event,
    MoveOutcome,
    PoolComposed,
    ReconfigureRequested,
    RegroupEnded,
)
from vertumnus_router.core.fluid import PLAN_PREFIX as FLUID
from vertumnus_router.core.types import PlanId, PoolId
from vertumnus_router.io.fronts import Fronts, NoReport, command, reason_in
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.lattice import Block, format_composition
from vertumnus_router.protocol import MoveCommand, MoveReport, PoolComposition

log = logging.getLogger(__name__)

#: A pool's own deadlines end a move sooner.
_REGROUP_TIMEOUT_S = 30.0
_DESCRIBE_TIMEOUT_S = 2.0


class Regrouping:
    """Commands moves as tasks of their own: nothing waits for them but those who asked."""

    def __init__(
        self,
        *,
        feed: Callable[[Event], None],
        fronts: Fronts,
        metrics: RouterMetrics,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        source: random.Random,
    ) -> None:
        self._feed = feed
        self._fronts = fronts
        self._metrics = metrics
        self._spawn = spawn
        self._source = source
        self._asked: dict[PlanId, asyncio.Future[PlanEnded]] = {}

    async def reconfigure(self, pool: PoolId, blocks: tuple[Block, ...]) -> PlanEnded:
        """Bring the pool to a composition; returns when that has ended, well or badly. It goes on
        if the caller does not wait for it."""
        plan = PlanId(f"{self._source.getrandbits(64):016x}")
        answer: asyncio.Future[PlanEnded] = asyncio.get_running_loop().create_future()
        self._asked[plan] = answer
        try:
            self._feed(ReconfigureRequested(plan, pool, blocks))
            return await answer
        finally:
            del self._asked[plan]

    def carry_out(self, effect: Regroup | PlanEnded) -> None:
        """Returns at once."""
        match effect:
            case Regroup():
                self._spawn(self._regroup(effect))
            case PlanEnded():
                if effect.reason is not None:
                    log.warning("pool %s was not reconfigured: %s", effect.pool, effect.reason)
                answer = self._asked.get(effect.plan)
                if answer is not None and not answer.done():
                    answer.set_result(effect)

    async def _regroup(self, order: Regroup) -> None:
        before, after = format_composition(order.before), format_composition(order.after)
        # A fluid pool moves all the time.
        level = logging.DEBUG if order.plan.startswith(FLUID) else logging.INFO
        log.log(level, "pool %s: %s to %s, from epoch %d", order.pool, before, after, order.epoch)
        try:
            ended = await self._command(order, after)
        except Exception as exc:
            log.exception("pool %s: the command to regroup failed", order.pool)
            ended = _unknown(order, str(exc) or type(exc).__name__)
        told = ended.reason or ended.stages
        log.log(level, "pool %s: %s, %s", order.pool, ended.outcome.value, told)
        self._feed(ended)
        self._metrics.moved(len(order.after) < len(order.before), ended)
        if ended.outcome in (MoveOutcome.FAILED, MoveOutcome.UNKNOWN):
            await self.learn(order.pool)

    async def _command(self, order: Regroup, composition: str) -> RegroupEnded:
        body = MoveCommand(composition=composition, epoch=order.epoch)
        told = await command(
            self._fronts, order.pool, "/vertumnus/regroup", body, MoveReport, _REGROUP_TIMEOUT_S
        )
        if isinstance(told, NoReport):
            outcome = MoveOutcome.REFUSED if told.refused else MoveOutcome.UNKNOWN
            return RegroupEnded(order.plan, order.pool, outcome, reason=told.reason)
        try:
            return RegroupEnded(
                order.plan,
                order.pool,
                MoveOutcome(told.outcome),
                told.epoch,
                told.reason,
                tuple(Block(first, degree) for first, degree in told.failed),
                told.stages,
            )
        except ValueError as exc:
            return _unknown(order, f"its answer is not a report: {exc}")

    async def learn(self, pool: PoolId) -> None:
        """Tell the control plane what the pool says of its composition, if it says anything:
        the ranks of a block that has failed report no more."""
        url = self._fronts.front_url(pool)
        told = "it has left" if url is None else await self.describe(url)
        try:
            if isinstance(told, str):
                raise ValueError(told)
            blocks = {Block(one.first, one.degree): one.state for one in told.blocks}
        except ValueError as exc:  # a block that cannot be is one, too
            log.warning("pool %s: its composition is not known: %s", pool, exc)
            return
        failed = tuple(block for block, state in blocks.items() if state == "failed")
        self._feed(PoolComposed(pool, told.epoch, tuple(blocks), failed))

    async def describe(self, url: str) -> PoolComposition | str:
        """What the pool at ``url`` says of its composition, or why it says nothing."""
        try:
            async with self._fronts.session.get(
                f"{url}/vertumnus/composition",
                headers=self._fronts.key_header(),
                timeout=aiohttp.ClientTimeout(total=_DESCRIBE_TIMEOUT_S),
            ) as answer:
                body = await answer.read()
                if answer.status != 200:
                    return f"it answers {answer.status}: {reason_in(body)}"
            return msgspec.json.decode(body, type=PoolComposition)
        except msgspec.MsgspecError as exc:
            return f"its answer is not a composition: {exc}"
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            return f"no answer: {type(exc).__name__} {exc}".rstrip()


def _unknown(order: Regroup, reason: str) -> RegroupEnded:
    return RegroupEnded(order.plan, order.pool, MoveOutcome.UNKNOWN, reason=reason)
