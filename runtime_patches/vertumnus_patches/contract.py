"""What an adapter relies on in code that it extends or calls, and does not patch.

A patch is checked when it is installed. A subclass of an SGLang backend, or a call of a kernel
library, is as sensitive to what a release changes, and is held to the same: other parameters or
another source stop the process.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vertumnus_patches.install import PatchError, resolve
from vertumnus_patches.record import source_fingerprint


@dataclass(frozen=True, slots=True)
class Reliance:
    """A function that an adapter was written against; fields as those of ``Patch``."""

    target: str
    signature: tuple[str, ...]
    fingerprint: str


def check(name: str, reliances: Iterable[Reliance]) -> None:
    """Look at the installed code of every reliance of the adapter ``name``.

    Raises:
        SystemExit: listing all that are not as the adapter expects.
    """
    problems = []
    for reliance in reliances:
        try:
            found = source_fingerprint(resolve(reliance))
        except PatchError as exc:
            problems.append(str(exc))
            continue
        if found != reliance.fingerprint:
            problems.append(
                f"the source of {reliance.target} is {found}, {name} was written against "
                f"{reliance.fingerprint}: review it, then update the fingerprint"
            )
    if problems:
        raise SystemExit(
            f"sgl-vertumnus cannot use {name} of this installation:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
