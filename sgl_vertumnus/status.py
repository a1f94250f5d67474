"""A router's pools, workers and moves, as text for people."""

import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, TextIO

import msgspec
from vertumnus_router.clock import WallClock

from sgl_vertumnus.errors import VertumnusError

_TIMEOUT_S = 10.0
_LAST = 5  # moves and decisions that are shown
_CLEAR = "\x1b[H\x1b[2J"
_STAGES = ("drain", "vote", "switch", "publish")

Row = Sequence[str]


def show(url: str, *, key: str | None = None, as_json: bool = False) -> str:
    """What the router at ``url`` says, asked with an API or control ``key`` if it needs one.
    Raises ``VertumnusError`` when it cannot be asked."""
    status = fetch(url, key)
    if as_json:
        return msgspec.json.encode(status).decode()
    try:
        return render(status)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise VertumnusError(
            f"the router at {url} speaks of pools in another way than this version knows "
            f"({exc!r}): use --json, or the sgl-vertumnus that the router runs"
        ) from exc


def watch(
    url: str,
    seconds: float,
    clock: WallClock,
    out: TextIO,
    *,
    key: str | None = None,
    as_json: bool = False,
) -> None:
    """Show it every ``seconds``, for ever; a router that is away may come back."""
    while True:
        try:
            text = show(url, key=key, as_json=as_json)
        except VertumnusError as exc:
            text = msgspec.json.encode({"error": str(exc)}).decode() if as_json else str(exc)
        redraw = out.isatty() and not as_json
        print(f"{_CLEAR}{text}" if redraw else text, file=out, flush=True)
        clock.pause(seconds)


def fetch(url: str, key: str | None = None) -> dict[str, Any]:
    """The router's ``GET /vertumnus/composition``."""
    target = f"{url.rstrip('/')}/vertumnus/composition"
    keyed = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(target, headers=keyed)
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
            status = msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as exc:
        if exc.code in (401, 403):
            raise VertumnusError(
                f"{target} answers {exc.code}: give it one of the router's keys with --api-key"
            ) from exc
        raise VertumnusError(f"{target} answers {exc.code}: is this a vertumnus router?") from exc
    except (OSError, HTTPException, ValueError) as exc:
        if isinstance(exc, msgspec.MsgspecError):
            raise VertumnusError(f"{target} gives no JSON: is this a vertumnus router?") from exc
        reason = getattr(exc, "reason", None) or exc
        raise VertumnusError(
            f"no router answers at {url} ({reason}): start one, or name it with --url"
        ) from exc
    if not isinstance(status, dict) or "pools" not in status:
        raise VertumnusError(f"{target} does not describe pools: is this a vertumnus router?")
    return status


def render(status: dict[str, Any]) -> str:
    """The answer as text: a paragraph per pool, then the controller."""
    parts = [_pool(pool) for pool in status["pools"]]
    controller = status.get("controller")
    if controller:
        parts.append(_controller(controller))
    return "\n\n".join(parts)


def _pool(pool: dict[str, Any]) -> str:
    if pool["pool"] is None:
        return f"pool at {pool['url']}: {pool['trouble']}"
    head = f"pool {pool['pool']} at {pool['url']}: {pool['composition'] or 'nothing serves'}"
    if pool["epoch"] is not None:
        head += f", epoch {pool['epoch']}"
    if pool["moving"]:
        head += f", moving to {pool['moving']}"
    lines = [head]
    if pool["trouble"]:
        lines.append(f"  its moves are not known: {pool['trouble']}")
    lines += _table(
        ("worker", "degree", "state", "queue s", "requests", "reason"),
        [_worker(worker) for worker in pool["workers"]],
        right=(1, 3, 4),
    )
    moves = pool["moves"][-_LAST:]
    if moves:
        lines += _table(
            ("epoch", "move", "outcome", *(f"{stage} ms" for stage in _STAGES), "total ms", "why"),
            [_move(move) for move in moves],
            right=(0, 3, 4, 5, 6, 7),
        )
    return "\n".join(lines)


def _worker(worker: dict[str, Any]) -> Row:
    return (
        worker["id"],
        str(worker["degree"]),
        worker["state"],
        f"{worker['queue_s']:.2f}",
        str(worker["requests"]),
        worker["reason"] or "",
    )


def _move(move: dict[str, Any]) -> Row:
    stages = move["stages_ms"] or {}
    return (
        str(move["epoch"]),
        f"{move['from']} to {move['to']}",
        move["outcome"],
        *(_ms(stages.get(stage)) for stage in _STAGES),
        _ms(move["total_ms"]),
        move["reason"] or "",
    )


def _controller(controller: dict[str, Any]) -> str:
    lines = [f"controller {controller['mode']}"]
    decisions = controller["last_decisions"][-_LAST:]
    if decisions:
        lines += _table(
            ("seconds ago", "action", "reason", "move", "detail"),
            [_decision(decision) for decision in decisions],
            right=(0,),
        )
    return "\n".join(lines)


def _decision(decision: dict[str, Any]) -> Row:
    chosen = decision.get("chosen")
    return (
        f"{decision['age_s']:.0f}",
        decision["action"],
        decision["reason"],
        f"{chosen['pool']}: {chosen['from']} to {chosen['to']}" if chosen else "",
        decision["detail"],
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(names: Row, rows: Sequence[Row], right: Sequence[int]) -> list[str]:
    """Columns as wide as they need to be; ``right`` are the numeric ones."""
    widths = [max(len(row[column]) for row in (names, *rows)) for column in range(len(names))]

    def line(row: Row) -> str:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return ("  " + "  ".join(cells)).rstrip()

    return [line(names), *map(line, rows)]
