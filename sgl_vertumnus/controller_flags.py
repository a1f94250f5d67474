"""The controller's flags, which the router and the pool that starts one both take."""

import argparse

from vertumnus_router.core.config import CONTROLLER_MODES, ControllerConfig

_DEFAULT = ControllerConfig()


def add_controller_flags(parser: argparse.ArgumentParser) -> None:
    """A group of their own."""
    add = parser.add_argument_group("controller").add_argument
    add(
        "--controller",
        choices=CONTROLLER_MODES,
        default=_DEFAULT.mode,
        help="split and merge as the demand asks for: on does it, observe says what it would do "
        f"({_DEFAULT.mode})",
    )
    add(
        "--controller-window-s",
        type=float,
        default=_DEFAULT.window_s,
        help=f"seconds of arrivals that make one decision ({_DEFAULT.window_s:g})",
    )
    add(
        "--controller-upper",
        type=float,
        default=_DEFAULT.upper,
        help=f"demand above this part of capacity splits ({_DEFAULT.upper:g})",
    )
    add(
        "--controller-lower",
        type=float,
        default=_DEFAULT.lower,
        help=f"demand below this part of capacity merges ({_DEFAULT.lower:g})",
    )
    add(
        "--long-tokens",
        type=int,
        default=_DEFAULT.long_tokens,
        help=f"prompts of more tokens count as long ({_DEFAULT.long_tokens})",
    )


def controller_config(options: argparse.Namespace) -> ControllerConfig:
    """What the options say. Raises ``ConfigError``."""
    return ControllerConfig(
        mode=options.controller,
        window_s=options.controller_window_s,
        upper=options.controller_upper,
        lower=options.controller_lower,
        long_tokens=options.long_tokens,
    )


def controller_flags(options: argparse.Namespace) -> list[str]:
    """The same as arguments for a router."""
    return [
        *("--controller", options.controller),
        *("--controller-window-s", str(options.controller_window_s)),
        *("--controller-upper", str(options.controller_upper)),
        *("--controller-lower", str(options.controller_lower)),
        *("--long-tokens", str(options.long_tokens)),
    ]
