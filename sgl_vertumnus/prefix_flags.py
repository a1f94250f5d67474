"""The prefix manager's flags, which the router and the pool that starts one both take."""

import argparse

from vertumnus_router.core.config import PREFIX_MODES, PolicyConfig, PrefixConfig

_DEFAULT = PrefixConfig()
_INDEX_MIB = PolicyConfig().index_mib


def add_prefix_flags(parser: argparse.ArgumentParser) -> None:
    """A group of their own."""
    add = parser.add_argument_group("prefixes").add_argument
    add(
        "--prefix-manager",
        choices=PREFIX_MODES,
        default=_DEFAULT.mode,
        help="copy cached prefixes to where requests want to run, delete them where they are not "
        f"used: on does it, observe says what it would do ({_DEFAULT.mode})",
    )
    add(
        "--pull",
        action=argparse.BooleanOptionalAction,
        default=_DEFAULT.pull,
        help="have a request's prefix copied to its worker first where that is faster than "
        f"computing it ({'on' if _DEFAULT.pull else 'off'})",
    )
    add(
        "--index-mib",
        type=float,
        default=_INDEX_MIB,
        help=f"memory for the index of cached blocks, MiB ({_INDEX_MIB:g})",
    )
    add(
        "--prefix-scan-s",
        type=float,
        default=_DEFAULT.scan_s,
        help=f"seconds between two scans of the index ({_DEFAULT.scan_s:g})",
    )
    add(
        "--theta-inter-s",
        type=float,
        default=_DEFAULT.theta_inter_s,
        help="seconds of prefill that a prefix would have saved at a degree where no worker holds "
        f"it, above which it is copied there ({_DEFAULT.theta_inter_s:g})",
    )
    add(
        "--theta-intra",
        type=float,
        default=_DEFAULT.theta_intra,
        help="accesses per replica above which one more worker of the degree gets it "
        f"({_DEFAULT.theta_intra:g})",
    )
    add(
        "--theta-reclaim",
        type=float,
        default=_DEFAULT.theta_reclaim,
        help="accesses per replica below which one worker of the degree loses it, less than "
        f"--theta-intra ({_DEFAULT.theta_reclaim:g})",
    )
    add(
        "--prefix-decay",
        type=float,
        default=_DEFAULT.decay,
        help=f"what is left of all counts after a scan, between 0 and 1 ({_DEFAULT.decay:g})",
    )
    add(
        "--prefix-per-scan",
        type=int,
        default=_DEFAULT.per_scan,
        help=f"most transfers of each kind that a scan orders ({_DEFAULT.per_scan})",
    )
    add(
        "--copy-timeout-s",
        type=float,
        default=_DEFAULT.timeout_s,
        help=f"after this a copy is given up ({_DEFAULT.timeout_s:g})",
    )


def prefix_config(options: argparse.Namespace) -> PrefixConfig:
    """What the options say. Raises ``ConfigError``."""
    return PrefixConfig(
        mode=options.prefix_manager,
        pull=options.pull,
        scan_s=options.prefix_scan_s,
        theta_inter_s=options.theta_inter_s,
        theta_intra=options.theta_intra,
        theta_reclaim=options.theta_reclaim,
        decay=options.prefix_decay,
        per_scan=options.prefix_per_scan,
        timeout_s=options.copy_timeout_s,
    )


def prefix_flags(options: argparse.Namespace) -> list[str]:
    """The same as arguments for a router."""
    return [
        *("--prefix-manager", options.prefix_manager),
        "--pull" if options.pull else "--no-pull",
        *("--index-mib", str(options.index_mib)),
        *("--prefix-scan-s", str(options.prefix_scan_s)),
        *("--theta-inter-s", str(options.theta_inter_s)),
        *("--theta-intra", str(options.theta_intra)),
        *("--theta-reclaim", str(options.theta_reclaim)),
        *("--prefix-decay", str(options.prefix_decay)),
        *("--prefix-per-scan", str(options.prefix_per_scan)),
        *("--copy-timeout-s", str(options.copy_timeout_s)),
    ]
