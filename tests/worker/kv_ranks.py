"""Ranks in this process with SGLang's own scheduler, tree and pool, and the KV service on real
sockets. What happens to a tree is recorded as its subscribers hear it."""

import secrets
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from vertumnus_patches.loans import loans_of
from vertumnus_patches.patches.block_events import tell_block
from vertumnus_patches.patches.events_published import tell_published
from vertumnus_patches.patches.least_room import as_agreed
from vertumnus_patches.patches.loans_flushed import recall
from vertumnus_patches.patches.loans_recalled import recall_if_short
from vertumnus_patches.seams import seams
from vertumnus_router.protocol import (
    CopyCommand,
    CopyReport,
    ReclaimCommand,
    ReclaimReport,
    SnapshotCommand,
    SnapshotReport,
)

from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker.kv_service.baton import Baton
from sgl_vertumnus.worker.kv_service.messages import Copy, Reclaim, Snapshot
from sgl_vertumnus.worker.kv_service.service import KvService
from sgl_vertumnus.worker.kv_service.sockets import Peer, keys_of
from tests.patches.conftest import around
from tests.patches.schedulers import (
    Size,
    kv_of,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)

SECRET = "the pool's"
SAMPLING = {"max_new_tokens": 1, "ignore_eos": True}
PAGE = 16
_publishing = threading.Lock()


class Subscriber:
    """In the place of the publisher's thread and a router: what a rank has published."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.held: dict[int, Any] = {}

    def publish(self, batch: Any) -> None:
        batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.held, "a child came before its parent"
                    for block_hash in event.block_hashes:
                        self.held[block_hash] = parent
                        parent = block_hash
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.held[block_hash]
                case AllBlocksCleared():
                    self.held.clear()


class Rank:
    """One rank; outside ``stepping`` its scheduler does nothing and lets everybody at its tree."""

    def __init__(self, size: Size, number: int = 0, secret: str = SECRET, **options: Any) -> None:
        self.number = number
        self.incarnation = secrets.token_hex(4)
        self.scheduler = scheduler_with_pools(size, events=True)
        self.subscriber = Subscriber()
        publisher = SchedulerKvEventsPublisher.__new__(SchedulerKvEventsPublisher)
        publisher.enable_kv_cache_events = True
        publisher.tree_cache = self.scheduler.tree_cache
        publisher.kv_event_publisher = self.subscriber
        self.scheduler.kv_events_publisher = publisher
        self.scheduler.kv_event_lora_names = KvEventLoraNames()
        self.baton = Baton()
        self.address = f"127.0.0.1:{free_range('127.0.0.1', 1)}"
        self.service = KvService(
            self.address,
            rank=number,
            incarnation=self.incarnation,
            secret=secret,
            baton=self.baton,
            scheduler=lambda: self.scheduler,
            **options,
        )
        _services[id(publisher)] = self.service
        self.keys = keys_of(secret)
        self.baton.begin()
        self._away = self.baton.away()
        self._away.__enter__()
        self.capacity = self.free
        self.is_closed = False

    def close(self) -> None:
        if not self.is_closed:
            self.service.close()
            self.is_closed = True

    @contextmanager
    def stepping(self) -> Iterator[Any]:
        """The scheduler's thread is at work."""
        with self.baton.held(10):
            yield self.scheduler

    def serve(self, tokens: Sequence[int], **fields: Any) -> list[int]:
        """Prefill these tokens; the hashes of the whole blocks that are held then."""
        with self.stepping() as scheduler:
            rid = f"served{len(self.subscriber.batches)}"
            request = receive(scheduler, rid, tokens, **{"sampling": SAMPLING} | fields)
            while not request.finished():
                step(scheduler)
            scheduler.kv_events_publisher.publish_kv_events()
        return self.chain(tokens, fields.get("extra_key"), fields.get("cache_salt"))

    def chain(self, tokens: Sequence[int], extra_key: Any = None, salt: Any = None) -> list[int]:
        """The blocks that the subscriber knows of these tokens."""
        pages = [tuple(tokens[at : at + PAGE]) for at in range(0, len(tokens) // PAGE * PAGE, PAGE)]
        index = self.service._index._blocks
        chain: list[int] = []
        for page in pages:
            parent = chain[-1] if chain else None
            here = [
                name
                for name, block in index.items()
                if (block.parent, block.namespace) == (parent, (extra_key, salt))
                and block.page == array("q", page).tobytes()
            ]
            if not here:
                break
            chain.append(here[0])
        return chain

    def held(self, tokens: Sequence[int], extra_key: Any = None, salt: Any = None) -> int:
        """How many of the tokens are cached; the KV of all of them is checked."""
        from vertumnus_patches.new_kv import read_slots

        key = RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=salt)
        with self.stepping() as scheduler:
            tree = scheduler.tree_cache
            found = tree.match_prefix(MatchPrefixParams(key=key.page_aligned(PAGE)))
            count = int(found.device_prefix_len)
            if count:
                slots = tree.path_device_indices(found.last_device_node)
                kv = read_slots(scheduler.token_to_kv_pool_allocator.get_kvcache(), slots)
                name = (extra_key, salt) if extra_key else salt
                assert kv.equal(kv_of(tokens, 0, count, name)), "the KV is another one"
        return count

    @property
    def free(self) -> int:
        """Room for requests; all of it when nothing is in hand and nothing has leaked."""
        allocator = self.scheduler.token_to_kv_pool_allocator
        tree = self.scheduler.tree_cache
        return int(allocator.available_size() + tree.evictable_size())

    def ask(self, question: Any, timeout_s: float = 20) -> Any:
        with Peer(self.address, self.keys) as peer:
            return peer.ask(question, timeout_s)

    def copy(self, other: "Rank", chain: Sequence[int], /, **changes: Any) -> CopyReport:
        fields = {
            "rank": self.number,
            "incarnation": self.incarnation,
            "source": other.address,
            "source_incarnation": other.incarnation,
            "blocks": tuple(chain),
            "timeout_s": 10.0,
        } | changes
        report: CopyReport = self.ask(Copy(command=CopyCommand(**fields)))
        return report

    def reclaim(self, blocks: Sequence[int], keep: int, **changes: Any) -> ReclaimReport:
        fields = {
            "rank": self.number,
            "incarnation": self.incarnation,
            "blocks": tuple(blocks),
            "keep": keep,
            "as_of": len(self.subscriber.batches),
        } | changes
        report: ReclaimReport = self.ask(Reclaim(command=ReclaimCommand(**fields)))
        return report

    def snapshot(self, **changes: Any) -> SnapshotReport:
        fields = {"rank": self.number, "incarnation": self.incarnation} | changes
        report: SnapshotReport = self.ask(Snapshot(command=SnapshotCommand(**fields)))
        return report

    def is_clean(self) -> bool:
        """Nothing is on loan, nothing has leaked, and index, subscriber and tree agree."""
        with self.stepping() as scheduler:
            scheduler.kv_events_publisher.publish_kv_events()
            index = self.service._index
            assert index.version == len(self.subscriber.batches)
            assert set(index._blocks) == set(self.subscriber.held)
            assert len(index._blocks) * PAGE == scheduler.tree_cache.evictable_size()
            loans = loans_of(scheduler)
            assert not loans._loans and self.free == self.capacity
        return True


_services: dict[int, KvService] = {}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patches that the service needs; each rank of this process hears of its own tree."""

    def publish(original: Callable[..., None], publisher: Any) -> None:
        service = _services.get(id(publisher))
        with _publishing:
            monkeypatch.setattr(
                seams,
                "_rank",
                service
                or SimpleNamespace(
                    on_block_event=lambda event: None, on_events_published=lambda: None
                ),
            )
            original(publisher)
            tell_published(None, publisher)

    def convert(original: Callable[..., Any], event: Any, *args: Any) -> Any:
        made = original(event, *args)
        tell_block(made, event, *args)
        return made

    def reset(original: Callable[..., None], tree: Any) -> None:
        recall(tree)
        original(tree)

    for owner, name, hook in (
        (SchedulerKvEventsPublisher, "publish_kv_events", publish),
        (adapter, "_kv_event_from_tagged", convert),
        (BaseTokenToKVPoolAllocator, "evict_to_free_tokens", recall_if_short),
        (UnifiedRadixCache, "reset", reset),
        (PrefillBudget, "_available_and_evictable", as_agreed),
    ):
        monkeypatch.setattr(owner, name, around(getattr(owner, name), hook))


def serve_elsewhere(connection: Any, size: Size, tokens: list[int]) -> None:
    """A process of one rank that holds these tokens; says where, and lives until it is killed."""
    with pytest.MonkeyPatch.context() as monkeypatch, sglang_context(size):
        install(monkeypatch)
        rank = Rank(size)
        connection.send((rank.address, rank.incarnation, rank.serve(tokens)))
        connection.recv()
