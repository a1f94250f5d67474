"""One rank: its place in the lattice, its exchange with the block, its reports."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vertumnus_patches import engine, new_kv
from vertumnus_patches.regroup_message import MalformedRegroup, is_regroup
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    PrefillFinished,
    PrefillStarted,
    RankState,
    Report,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.command import Regroup, read_command
from sgl_vertumnus.worker.exchange import Ingress, receive_step, send_step
from sgl_vertumnus.worker.groups import Links, build_links, connect_store
from sgl_vertumnus.worker.prefills import PrefillLog
from sgl_vertumnus.worker.reporter import Reporter
from sgl_vertumnus.worker.sharding import is_worth_sharding
from sgl_vertumnus.worker.stream import Content

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a rank serves, and since which epoch."""

    epoch: int
    block: Block


class RankRuntime:
    """Implements ``vertumnus_patches.seams.RankSeam``.

    Bound in every process of the pool, alive only in ranks: until ``on_parallel_ready`` it is
    a rank of its own, alone and silent.
    """

    def __init__(self, config: PoolConfig, manifest: str) -> None:
        self._config = config
        self._manifest = manifest
        self._on_cpu = config.device == "cpu"
        self._rank = 0
        # One object, since the reporter's thread reads it.
        self._serving = Serving(0, Block(0, 1))
        self._incarnation = ""
        self._lattice: Mapping[Block, Links] = {}
        self._links: Links | None = None
        self._ingress = Ingress(is_regroup)
        self._prefills = PrefillLog()
        self._scheduler: Any = None
        self._reporter: Reporter | None = None

    # -- start ---------------------------------------------------------------

    def on_parallel_ready(self) -> None:
        """Join the lattice. Raises when a group cannot be formed, which ends the rank."""
        self._rank = engine.data_parallel_rank()
        self._serving = Serving(0, Block(self._rank, 1))
        self._incarnation = secrets.token_hex(8)
        store = connect_store(self._config)
        store.set(pid_key(self._rank), str(os.getpid()))
        if self._on_cpu:
            # Upstream leaves this to kernels that exist on some CPUs only.
            torch.set_num_threads(self._config.threads)
        device = torch.device("cpu" if self._on_cpu else "cuda")
        self._lattice = build_links(self._config, self._rank, store, device)
        self._reporter = Reporter(
            self._config.host, self._config.ports.reports + self._rank, self._state
        )

    # -- the step ------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return self._links is not None and self._rank != self._serving.block.leader

    @property
    def may_sleep(self) -> bool:
        return not self.is_member and self._ingress.is_empty

    def exchange_requests(self, received: list[Any] | None) -> list[Any]:
        links = self._links
        if links is not None and self.is_member:
            return receive_step(links.stream)
        step = self._ingress.take(received or [])
        if links is not None:
            send_step(step, links.stream)
        return step

    def shards(self, new_tokens: list[int], all_tokens: list[int], degree: int) -> bool:
        return is_worth_sharding(
            new_tokens, all_tokens, degree, engine.hidden_size(self._scheduler)
        )

    def compute_once(self, runner: Any, forward_batch: Any, compute: Callable[[], Any]) -> Any:
        links = self._links
        if links is None or not self._on_cpu or not new_kv.is_repeated(forward_batch):
            return compute()
        if not self.is_member:
            output = compute()
            links.stream.send_tensor(Content.KV, new_kv.read_new_kv(runner, forward_batch))
            return output
        received = new_kv.empty_new_kv(runner, forward_batch)
        links.stream.receive_tensor(Content.KV, received)
        new_kv.write_new_kv(runner, forward_batch, received)
        return new_kv.blank_output(runner, forward_batch)

    def sync_token_ids(self, token_ids: torch.Tensor) -> None:
        links = self._links
        if links is None:
            return
        if not self._on_cpu:
            links.group.broadcast_from_leader(token_ids)
        elif self.is_member:
            links.stream.receive_tensor(Content.TOKENS, token_ids)
        else:
            links.stream.send_tensor(Content.TOKENS, token_ids)

    def on_batch_started(self, scheduler: Any, batch: Any) -> None:
        self._scheduler = scheduler
        if self.is_member or not engine.is_extend(batch):
            return
        rids = (request.rid for request in batch.reqs)
        if started := self._prefills.begin(rids, time.perf_counter()):
            self._send(
                PrefillStarted(
                    rank=self._rank,
                    incarnation=self._incarnation,
                    epoch=self._serving.epoch,
                    rids=started,
                )
            )

    def on_batch_finished(self, scheduler: Any, batch: Any) -> None:
        now_s = time.perf_counter()
        if not engine.is_extend(batch):
            self._prefills.other_step_ended(now_s)
            return
        rids = (request.rid for request in batch.reqs)
        if done := self._prefills.end(rids, now_s, engine.prefilled(batch)):
            self._send(
                PrefillFinished(
                    rank=self._rank,
                    incarnation=self._incarnation,
                    epoch=self._serving.epoch,
                    done=done,
                )
            )

    # -- regrouping ----------------------------------------------------------

    def reconfigure(self, scheduler: Any, knobs: Mapping[str, float]) -> bool:
        """Move to the block that the command gives this rank. False leaves everything as is."""
        try:
            command = read_command(self._config, knobs)
        except MalformedRegroup as exc:
            logger.warning("regroup refused: %s", exc)
            return False
        if (refusal := self.can_regroup(scheduler, command)) is not None:
            logger.warning("regroup refused: %s", refusal)
            return False
        block = command.block_of(self._rank)
        links = self._lattice.get(block)
        if links is not None and block != self._serving.block:
            # Ranks that served apart hold different prefixes; in lockstep they must hold the same.
            engine.flush(scheduler)
        engine.apply_geometry(scheduler, group=links.group if links else None)
        self._scheduler, self._links = scheduler, links
        self._serving = Serving(command.epoch, block)
        logger.info("epoch %d: rank %d serves in %s", command.epoch, self._rank, block)
        if self._reporter is not None:
            self._reporter.beat()
        return True

    def can_regroup(self, scheduler: Any, command: Regroup) -> str | None:
        """Why the command cannot be followed now, or None."""
        if command.epoch <= self._serving.epoch:
            return f"epoch {command.epoch} is not newer than {self._serving.epoch}"
        if not engine.is_idle(scheduler):
            return "requests are queued or running"
        return None

    # -- reports -------------------------------------------------------------

    def _send(self, report: Report) -> None:
        if self._reporter is not None:
            self._reporter.send(report)

    def _state(self) -> RankState:
        load = engine.load_of(self._scheduler) if self._scheduler is not None else None
        serving = self._serving
        return RankState(
            version=PROTOCOL_VERSION,
            pool_id=self._config.pool_id,
            rank=self._rank,
            incarnation=self._incarnation,
            epoch=serving.epoch,
            first=serving.block.first,
            degree=serving.block.degree,
            manifest=self._manifest,
            running_requests=load.running_requests if load else 0,
            waiting_requests=load.waiting_requests if load else 0,
            kv_used_tokens=load.kv_used_tokens if load else 0,
            kv_capacity_tokens=load.kv_capacity_tokens if load else 0,
        )


def pid_key(rank: int) -> str:
    """Where a rank leaves its process id in the pool's store."""
    return f"pid/{rank}"


__all__ = ["RankRuntime", "pid_key"]
