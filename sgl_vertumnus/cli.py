"""``sgl-vertumnus``: ask a running router, or profile a pool, from a terminal."""

import argparse
import sys
from collections.abc import Sequence

from vertumnus_router.clock import WallClock
from vertumnus_router.io.config import DEFAULT_PORT

from sgl_vertumnus import profile
from sgl_vertumnus.errors import VertumnusError
from sgl_vertumnus.status import show, watch

_WATCH_S = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Exits 2 on a usage error, 1 when the router cannot be asked."""
    options = _parser().parse_args(argv)
    if options.command == "profile":
        profile.run(options)
        return
    try:
        if options.watch is None:
            print(show(options.url, key=options.api_key, as_json=options.json))
        else:
            clock, key = WallClock(), options.api_key
            watch(options.url, options.watch, clock, sys.stdout, key=key, as_json=options.json)
    except VertumnusError as exc:
        sys.exit(f"sgl-vertumnus: {exc}")
    except KeyboardInterrupt:
        pass  # the way to leave --watch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sgl-vertumnus", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status",
        help="pools, workers, last moves and the controller's decisions",
        description="What GET /vertumnus/composition on the router says, as a table.",
        allow_abbrev=False,
    )
    add = status.add_argument
    add(
        "--url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        help="the router (default %(default)s)",
    )
    add(
        "--watch",
        nargs="?",
        type=_seconds,
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"show it again every SECONDS ({_WATCH_S:g}) until Ctrl-C",
    )
    add("--json", action="store_true", help="the router's own answer, one line")
    add("--api-key", metavar="KEY", help="an API or control key, if the router asks for one")
    profiler = commands.add_parser(
        "profile",
        help="measure prefill times and the load that workers of each degree bear",
        description=profile.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    profile.add_flags(profiler)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be 0.1 s or more")
    return seconds


if __name__ == "__main__":
    main()
