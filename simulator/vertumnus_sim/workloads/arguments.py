"""Types of command line arguments."""

import argparse


def positive(text: str) -> float:
    """A number above 0; raises ``argparse.ArgumentTypeError``."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def positive_int(text: str) -> int:
    """The same, a whole one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
