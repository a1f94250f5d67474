"""``python -m sgl_vertumnus.profile``: measure how long prefills take on a live pool.

Moves an idle pool through its degrees and times single prompts of many lengths and cached
prefixes; fits the prefill-time model that the router prices with; then raises the load on one
worker of each degree until it misses its deadlines (κ). The pool's prefix caches are emptied;
the composition is put back at the end, on failure and on Ctrl-C.
"""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from vertumnus_router.io.config import DEFAULT_PORT
from vertumnus_router.lattice import CompositionError, check_degrees

from sgl_vertumnus.errors import ConfigurationError, VertumnusError
from sgl_vertumnus.history import read_history
from sgl_vertumnus.profiling.capacity import DEADLINES_S, Slo
from sgl_vertumnus.profiling.live_pool import LivePool, find_pool
from sgl_vertumnus.profiling.plan import HIT_RATIOS, LENGTHS, Plan, composition_for, prompts
from sgl_vertumnus.profiling.run import Search, mix_lengths, profile_pool

_TIMES = ("auto", "leader", "ttft")
#: Byte-level vocabularies have 256 ids; larger ones have these, too.
_HIGHEST_ID = 249


def main(argv: Sequence[str] | None = None) -> None:
    """Exits 2 on a usage error, 1 when the pool or the fit fails, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vertumnus.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    run(parser.parse_args(argv))


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        help="a pool's front or its router (default %(default)s)",
    )
    add("--pool", metavar="ID", help="which pool, if the router has several")
    add("--control-key", help="admin key of the front, and control key of its router")
    add(
        "--out",
        type=Path,
        default=Path("profile.json"),
        help="the profile (default %(default)s); the samples are kept beside it, in "
        "*.samples.jsonl",
    )
    add("--resume", action="store_true", help="go on with the samples that are there")
    add("--plots", type=Path, metavar="FOLDER", help="draw speed-ups and errors (needs matplotlib)")
    what = parser.add_argument_group("what is measured").add_argument
    what("--degrees", type=_integers, help="degrees (default: all of the pool)")
    what(
        "--lengths",
        type=_integers,
        default=LENGTHS,
        help=f"uncached tokens R (default {_text(LENGTHS)}); what does not fit is left out",
    )
    what(
        "--hit-ratios",
        type=_numbers,
        help=f"cached prefixes as parts of the prompt, P/(P+R) (default {_text(HIT_RATIOS)})",
    )
    what("--cached-tokens", type=_integers, help="cached prefixes P in tokens")
    what("--repetitions", type=int, default=3, help="of each, in random order (%(default)s)")
    what("--seed", type=int, default=0, help="of tokens and order (%(default)s)")
    what(
        "--highest-token-id",
        type=int,
        default=_HIGHEST_ID,
        help="tokens are drawn from 5 to this (%(default)s)",
    )
    what(
        "--time",
        choices=_TIMES,
        default="auto",
        help="what is timed: the leader's computing as it reports it, or the time to the first "
        "token (auto: leader where its reports can be heard)",
    )
    kappa = parser.add_argument_group("kappa, the load that a worker bears").add_argument
    kappa("--no-kappa", action="store_true", help="leave it out")
    kappa(
        "--history",
        type=Path,
        metavar="TRACE",
        help="prompts as long as in this trace (JSON lines with timestamp, input_length); "
        "default: the --lengths, all with the same share of tokens",
    )
    kappa(
        "--slo-s",
        type=_numbers,
        default=DEADLINES_S,
        help="deadlines of the first token below 8K, below 32K and for longer prompts, or one for "
        f"all (default {_text(DEADLINES_S)})",
    )
    kappa(
        "--slo-target", type=float, default=0.9, help="part of tokens to be in time (%(default)s)"
    )
    kappa("--kappa-trial-s", type=float, default=60.0, help="length of one load (%(default)s)")
    kappa("--kappa-steps", type=int, default=6, help="loads for each degree (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """What ``main`` does, with parsed options."""
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that the composition is put back
    try:
        _run(options)
    except ConfigurationError as exc:
        print(f"profile: {exc}", file=sys.stderr)
        sys.exit(2)
    except VertumnusError as exc:
        sys.exit(f"profile: {exc}")
    except KeyboardInterrupt:
        _say("profile: interrupted; --resume goes on with what was measured")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> None:
    _check_installed(plots=options.plots is not None)
    _check_numbers(options)
    pool = find_pool(options.url, options.control_key, options.pool)
    plan = _plan(options, pool)
    search = None if options.no_kappa else _search(options, plan, pool)
    record = profile_pool(
        pool,
        plan,
        options.out,
        time=options.time,
        resume=options.resume,
        search=search,
        say=_say,
    )
    if options.plots is not None:
        from sgl_vertumnus.profiling.plots import plot

        for path in plot(record.samples, options.plots):
            _say(f"drawn: {path}")


def _plan(options: argparse.Namespace, pool: LivePool) -> Plan:
    description = pool.description
    degrees = tuple(sorted(set(options.degrees or description.degrees)))
    if strangers := set(degrees) - set(description.degrees):
        raise ConfigurationError(
            f"--degrees {_text(sorted(strangers))}: the pool has {_text(description.degrees)}"
        )
    try:
        check_degrees(description.pool_size, degrees)
    except CompositionError as exc:
        raise ConfigurationError(str(exc)) from exc
    for degree in degrees:
        composition_for(degree, description.pool_size, description.degrees)
    ratios = options.hit_ratios
    if ratios is None:
        ratios = () if options.cached_tokens else HIT_RATIOS
    found, left_out = prompts(
        options.lengths,
        hit_ratios=ratios,
        cached_tokens=options.cached_tokens or (),
        block_tokens=description.kv_events.block_tokens,
        most_tokens=pool.most_tokens,
    )
    if left_out:
        _say(
            f"left out, a prompt of this pool has {pool.most_tokens} tokens at most: "
            + ", ".join(f"{uncached} behind {cached}" for uncached, cached in left_out)
        )
    return Plan(
        degrees=degrees,
        prompts=found,
        repetitions=options.repetitions,
        seed=options.seed,
        highest_id=options.highest_token_id,
    )


def _search(options: argparse.Namespace, plan: Plan, pool: LivePool) -> Search:
    deadlines = options.slo_s * 3 if len(options.slo_s) == 1 else options.slo_s
    if len(deadlines) != len(DEADLINES_S):
        raise ConfigurationError(f"--slo-s {_text(options.slo_s)}: give one deadline, or three")
    if options.history is not None:
        asked = [request.input_tokens for request in read_history(options.history)]
        lengths = tuple(length for length in asked if length <= pool.most_tokens)
        if not lengths:
            raise ConfigurationError(f"--history {options.history}: no prompt fits this pool")
        if left_out := len(asked) - len(lengths):
            _say(f"{left_out} of the {len(asked)} prompts of the history are too long for the pool")
        mix = f"the lengths of {options.history.name}"
    else:
        longest = sorted({uncached for uncached, _ in plan.prompts})
        lengths = mix_lengths(longest, pool.most_tokens, plan.seed)
        mix = f"{_text(longest)} tokens, as many tokens of each"
    return Search(
        lengths=lengths,
        mix=mix,
        slo=Slo(tuple(deadlines), options.slo_target),
        seconds=options.kappa_trial_s,
        steps=options.kappa_steps,
    )


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("repetitions", "kappa_steps", "kappa_trial_s"):
        if not 0 < getattr(options, name) < float("inf"):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{flag} {getattr(options, name)}: must be above 0")
    if options.highest_token_id < 32:
        raise ConfigurationError("--highest-token-id: at least 32, or prompts repeat themselves")


def _check_installed(*, plots: bool) -> None:
    if plots and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plots needs matplotlib: pip install 'sgl-vertumnus[bench]'")
    missing = [name for name in ("numpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the fit needs {' and '.join(missing)}: pip install 'sgl-vertumnus[worker]', or them"
        )


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _text(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
