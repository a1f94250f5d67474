"""One rank: its place in the lattice, its exchange with the block, its reports."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import current_device
from vertumnus_patches import engine, in_hand, new_kv, prefixes, transfers
from vertumnus_patches.block_events import BlockEvent
from vertumnus_patches.in_hand import decode_tickets, encode_tickets
from vertumnus_patches.prefix_marks import SURPLUS_PRIORITY
from vertumnus_patches.regroup_message import (
    MalformedRegroup,
    Phase,
    is_regroup,
    regroup_message,
)
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    PrefillFinished,
    PrefillStarted,
    RankState,
    Report,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.environment import chaos_specification, forces_mooncake, pool_secret
from sgl_vertumnus.worker.admission import agree, agree_on_budget
from sgl_vertumnus.worker.chaos import Chaos, Stage
from sgl_vertumnus.worker.command import Regroup, read_command
from sgl_vertumnus.worker.control import Alive, Entered, RankMessage, Ready, Refused, Switched
from sgl_vertumnus.worker.exchange import Ingress, receive_step, send_step
from sgl_vertumnus.worker.groups import Links, build_links, connect_store
from sgl_vertumnus.worker.hold import Hold
from sgl_vertumnus.worker.kv_service.baton import Baton
from sgl_vertumnus.worker.kv_service.service import KvService
from sgl_vertumnus.worker.line import SupervisorLine
from sgl_vertumnus.worker.prefills import PrefillLog
from sgl_vertumnus.worker.reporter import Reporter
from sgl_vertumnus.worker.sharding import is_worth_sharding
from sgl_vertumnus.worker.stream import Content

logger = logging.getLogger(__name__)

#: How long a leader that holds and has nothing to do waits for the next message.
HOLD_POLL_MS = 5
#: How often handshakes and transfers are looked at when there is nothing else to do.
TRANSFER_POLL_MS = 2


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
        self._hold = Hold()
        self._chaos = Chaos("", 0)
        self._prefills = PrefillLog()
        self._scheduler: Any = None
        self._reporter: Reporter | None = None
        self._line: SupervisorLine | None = None
        self._baton = Baton()
        self._kv: KvService | None = None

    # -- start ---------------------------------------------------------------

    def on_parallel_ready(self) -> None:
        """Join the lattice. Raises when a group cannot be formed, which ends the rank."""
        self._rank = engine.data_parallel_rank()
        self._serving = Serving(0, Block(self._rank, 1))
        self._incarnation = secrets.token_hex(8)
        self._chaos = Chaos(chaos_specification(), self._rank)
        store = connect_store(self._config)
        store.set(pid_key(self._rank), str(os.getpid()))
        if self._on_cpu:
            # Upstream leaves this to kernels that exist on some CPUs only.
            torch.set_num_threads(self._config.threads)
        # SGLang has chosen this rank's GPU by now: the one of its number.
        device = torch.device("cpu") if self._on_cpu else torch.device("cuda", current_device())
        self._lattice = build_links(self._config, self._rank, store, device)
        line = self._line = SupervisorLine(self._config.ports.control)
        self._reporter = Reporter(
            self._config.host,
            self._config.ports.reports + self._rank,
            self._state,
            alive=lambda: line.send(Alive(self._rank)),
        )
        if self._on_cpu:
            self._kv = KvService(
                f"{self._config.host}:{self._config.ports.kv_service + self._rank}",
                rank=self._rank,
                incarnation=self._incarnation,
                secret=pool_secret(),
                baton=self._baton,
                scheduler=lambda: self._scheduler,
                force_mooncake=forces_mooncake(),
            )

    def least_capacity(self, tokens: int) -> int:
        """Collective over the rank's widest block, which holds all others that it can be in."""
        if not self._lattice:
            return tokens
        widest = max(self._lattice, key=lambda block: block.degree)
        told = self._lattice[widest].group.gather_numbers([tokens])
        least = min(number for (number,) in told)
        if least < tokens:
            logger.info("KV capacity %d, of %d: the least in %s", least, tokens, widest)
        return least

    # -- the step ------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return self._links is not None and self._rank != self._serving.block.leader

    @property
    def computes_on_cpu(self) -> bool:
        return self._on_cpu

    @property
    def may_sleep(self) -> bool:
        return not self.is_member and self._ingress.is_empty

    def answers(self, home: int | None) -> bool:
        if home is None or home not in self._serving.block:
            return not self.is_member
        return home == self._rank

    def sleep(self, sleep: Callable[[], None]) -> None:
        if self.may_sleep:
            with self._baton.away():
                sleep()

    def exchange_requests(self, received: list[Any] | None) -> list[Any]:
        self._baton.begin()
        self._baton.pass_on()
        links = self._links
        if links is not None and self.is_member:
            return self._follow_leader(links)
        received = received or []
        if self._hold.has_expired(time.perf_counter()):
            received = [self._forgotten(), *received]
        step = self._ingress.take(received)
        if links is not None:
            send_step(step, links.stream)
        return step

    def _follow_leader(self, links: Links) -> list[Any]:
        while self._sends():
            with self._baton.away():
                has_begun = links.stream.has_next(TRANSFER_POLL_MS)
            if has_begun:
                break
        with self._baton.away():
            return receive_step(links.stream)

    def _await_message(self, scheduler: Any, timeout_ms: int) -> None:
        with self._baton.away():
            engine.await_message(scheduler, timeout_ms)

    def _sends(self) -> bool:
        """Whether this rank is sending KV to decode servers; what has been sent ends here."""
        scheduler = self._scheduler
        if scheduler is None or not transfers.is_prefill_side(scheduler):
            return False
        return transfers.advance(scheduler)

    def admit_prefills(self, scheduler: Any, running_batch: Any, admit: Callable[[], Any]) -> Any:
        if transfers.is_prefill_side(scheduler):
            transfers.release_guards(scheduler)
            if not self.is_member and transfers.only_waits(scheduler):
                self._await_message(scheduler, TRANSFER_POLL_MS)
        if self._hold.epoch is not None:
            if running_batch.is_empty() and not self.is_member:
                # With nothing to do, leave the cores to the blocks that are waited for.
                self._await_message(scheduler, HOLD_POLL_MS)
            return engine.no_prefill(running_batch)
        links = self._links
        if links is None:
            return admit()
        waiting = prefixes.candidates(scheduler, running_batch)
        agreement = agree(scheduler, waiting, links.group, SURPLUS_PRIORITY)
        if agreement.copied_tokens:
            logger.info("rank %d took over %d cached tokens", self._rank, agreement.copied_tokens)
        requests = waiting[: len(agreement.lengths)]
        budget = None
        # Where decodes run too, the ranks of a block hold the same for the same requests.
        if transfers.is_prefill_side(scheduler) and (requests or scheduler.chunked_req is not None):
            budget = agree_on_budget(scheduler, requests, agreement.lengths, links.group)
        # Also without requests: a grammar that is ready by now must wait for the next step.
        with prefixes.agreed_prefixes(scheduler, requests, agreement.lengths, budget):
            return admit()

    def shards(self, new_tokens: list[int], all_tokens: list[int], degree: int) -> bool:
        return is_worth_sharding(
            new_tokens, all_tokens, degree, engine.hidden_size(self._scheduler)
        )

    def compute_once(self, runner: Any, forward_batch: Any, compute: Callable[[], Any]) -> Any:
        # The slots of a step are its requests': it touches neither the tree nor the allocator.
        with self._baton.away():
            return self._compute_once(runner, forward_batch, compute)

    def _compute_once(self, runner: Any, forward_batch: Any, compute: Callable[[], Any]) -> Any:
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

    def on_block_event(self, event: BlockEvent) -> None:
        if self._kv is not None:
            self._kv.on_block_event(event)

    def on_events_published(self) -> None:
        if self._kv is not None:
            self._kv.on_events_published()

    def on_batch_started(self, scheduler: Any, batch: Any) -> None:
        self._scheduler = scheduler
        if self.is_member or not engine.is_extend(batch):
            return
        if started := self._prefills.begin(engine.prefilling(batch), time.perf_counter()):
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
        if transfers.is_prefill_side(scheduler):
            transfers.let_go(scheduler, lambda request: self.answers(in_hand.home_of(request)))
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

    # -- moves ---------------------------------------------------------------

    def follow(self, scheduler: Any, knobs: Mapping[str, float]) -> None:
        try:
            command = read_command(self._config, knobs)
        except MalformedRegroup as exc:
            logger.warning("command not followed: %s", exc)
            return
        self._scheduler = scheduler
        match command.phase:
            case Phase.PREPARE:
                self._prepare(scheduler, command)
            case Phase.COMMIT:
                self._commit(scheduler, command)
            case Phase.ABANDON:
                self._hold.end(command.epoch)

    def _prepare(self, scheduler: Any, command: Regroup) -> None:
        """No step runs now; from here on the block begins no prefill."""
        if command.epoch <= self._serving.epoch:
            reason = f"epoch {command.epoch} is not newer than {self._serving.epoch}"
            logger.warning("move refused: %s", reason)
            if not self.is_member:
                self._tell(Refused(self._rank, command.epoch, reason))
            return
        if self._chaos.at(command.epoch, Stage.PREPARE):
            return
        self._hold.begin(command.epoch, time.perf_counter())
        if not self.is_member:
            self._tell(Ready(self._rank, command.epoch, time.perf_counter()))
        self._chaos.at(command.epoch, Stage.READY)

    def _commit(self, scheduler: Any, command: Regroup) -> None:
        epoch, before = command.epoch, self._serving.block
        if epoch < self._serving.epoch:
            logger.warning("epoch %d is over, the pool is in %d", epoch, self._serving.epoch)
            return
        if self._chaos.at(epoch, Stage.COMMIT):
            return
        self._hold.end(epoch)
        if epoch > self._serving.epoch:
            self._tell(Entered(self._rank, epoch, time.perf_counter()))
            block = command.block_of(self._rank)
            if block == before:
                self._serving = Serving(epoch, block)
            elif before.degree > block.degree:
                self._split(scheduler, epoch, block)
            else:
                self._merge(scheduler, epoch, block)
            if self._reporter is not None:
                self._reporter.beat()
        self._chaos.at(epoch, Stage.SERVING)
        # Told again where the command came again: the first answer may have been lost.
        self._tell(Switched(self._rank, epoch, time.perf_counter()))

    def _split(self, scheduler: Any, epoch: int, block: Block) -> None:
        """Every rank of the old block has all requests and all KV: each child goes on with the
        requests at home in it."""
        leads = self._serving.block.leader in block
        let_go = in_hand.keep(scheduler, lambda home: leads if home is None else home in block)
        self._serve(scheduler, epoch, block)
        logger.info(
            "epoch %d: rank %d serves in %s, %d requests elsewhere",
            epoch,
            self._rank,
            block,
            let_go,
        )

    def _merge(self, scheduler: Any, epoch: int, block: Block) -> None:
        """The ranks have had different requests: all take over those of all."""
        led = not self.is_member
        suspended = in_hand.suspend(scheduler)
        self._chaos.at(epoch, Stage.SUSPENDED)
        links = self._serve(scheduler, epoch, block)
        if links is None:
            raise ValueError(f"{block} has no links to merge over")
        mine = suspended.tickets() if led else []
        tickets = [
            ticket
            for payload in links.group.gather_bytes(encode_tickets(mine))
            for ticket in decode_tickets(payload)
        ]
        in_hand.resume(scheduler, tickets, suspended.known())
        logger.info(
            "epoch %d: rank %d serves in %s, %d requests", epoch, self._rank, block, len(tickets)
        )

    def _serve(self, scheduler: Any, epoch: int, block: Block) -> Links | None:
        links = self._lattice.get(block)
        engine.apply_geometry(scheduler, group=links.group if links else None)
        self._links, self._serving = links, Serving(epoch, block)
        self._prefills = PrefillLog()
        return links

    def _forgotten(self) -> Any:
        """The command that ends a hold that nobody has ended."""
        epoch = self._hold.epoch or 0
        logger.error("the move to epoch %d was neither committed nor abandoned", epoch)
        any_blocks = [(block.first, block.degree) for block in self._config.blocks]
        return regroup_message(Phase.ABANDON, epoch, any_blocks)

    def _tell(self, message: RankMessage) -> None:
        if self._line is not None:
            self._line.send(message)

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
