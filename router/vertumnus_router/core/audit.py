"""The invariants of the requests' books, for tests."""

from collections import Counter

from vertumnus_router.core.breakers import Breakers
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.ledger import Ledger, Reservation
from vertumnus_router.core.membership import Lost, Membership
from vertumnus_router.core.requests import Entry, Phase, RequestTable
from vertumnus_router.core.types import DecodeId, Rank


def violations(
    table: RequestTable, ledger: Ledger, membership: Membership, decodes: Decodes
) -> list[str]:
    """Every broken invariant; empty when all hold."""
    found = []
    homes: Counter[Rank] = Counter()
    rooms: Counter[DecodeId] = Counter()
    for entry in table.entries():
        reservation = ledger.get(entry.id)
        if (entry.phase is Phase.PREFILL) != (reservation is not None):
            found.append(f"{entry.id} is {entry.phase.value}, reserved: {reservation is not None}")
        if entry.phase in (Phase.PREFILL, Phase.DECODE):
            found += _misplaced(entry, reservation, membership)
            if entry.home is not None:
                homes[entry.home] += 1
            if entry.attempt in entry.failed_at:
                found.append(f"{entry.id} is back at {entry.attempt}, where it failed")
        paired = entry.candidate is not None and entry.candidate.pool.prefill_only
        running = entry.phase in (Phase.PREFILL, Phase.DECODE, Phase.HANDED_OVER)
        if (entry.decode is not None) != (paired and running):
            found.append(f"{entry.id} is {entry.phase.value}, has rooms at {entry.decode}")
        if entry.decode is not None:
            rooms[entry.decode] += entry.request.prompts
    for pool in membership.pools:
        for rank in (Rank(pool.pool, index) for index in range(pool.size)):
            if table.homed(rank) != homes[rank]:
                found.append(f"{homes[rank]} at home at {rank}, {table.homed(rank)} told")
    known = {terms.decode: terms.rooms for terms in decodes.terms()}
    if {decode: taken for decode, taken in known.items() if taken} != rooms:
        found.append(f"rooms are taken as {dict(rooms)}, counted as {known}")
    queued = Counter(entry.request.client for entry in table.queue())
    if table.waiting() != queued:
        found.append(f"{dict(queued)} are queued, counted as {table.waiting()}")
    if not len(table) and len(ledger):
        found.append(f"no request is live and {len(ledger)} reservation(s) remain")
    if not len(table) and table.repeated:
        found.append(f"no request is live and {table.repeated} count as repeated")
    return found


def stray_probes(table: RequestTable, breakers: Breakers) -> list[str]:
    """Every probe of a circuit breaker that nobody waits for, so that it would never end."""
    found = []
    for worker, request in breakers.probes():
        entry = table.get(request)
        if entry is None or entry.phase is not Phase.PREFILL or entry.attempt != worker:
            found.append(f"{request} counts as the probe of {worker}, where it is not")
    return found


def _misplaced(entry: Entry, reservation: Reservation | None, membership: Membership) -> list[str]:
    """What is wrong with the place of a request that was dispatched."""
    home, candidate = entry.home, entry.candidate
    if home is None or candidate is None or home.index not in candidate.block:
        return [f"{entry.id} is at {candidate}, its home is {home}"]
    found = []
    if reservation is not None and reservation.worker != candidate.id:
        found.append(f"{entry.id} is at {candidate.id}, reserved at {reservation.worker}")
    fate = membership.fate(home, candidate)
    if isinstance(fate, Lost):
        found.append(f"{entry.id} is at {candidate.id}, which is lost: {fate.cause}")
    elif fate is not None and fate.id != candidate.id:
        found.append(f"{entry.id} is at {candidate.id}, its home {home} serves in {fate.id}")
    return found
