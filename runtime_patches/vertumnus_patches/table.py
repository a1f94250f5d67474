"""``python -m vertumnus_patches.table [--check]``: the patch table of README.md, generated.

``--fingerprints`` prints the digests of the installed SGLang's functions, for the moment a
patch is reviewed against a new release.
"""

import argparse
import sys
from pathlib import Path

from vertumnus_patches import SGLANG_VERSION
from vertumnus_patches.patches import ALL_PATCHES

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- patches -->", "<!-- /patches -->"


def render() -> str:
    """The table, as Markdown."""
    lines = [
        f"SGLang {SGLANG_VERSION}, {len(ALL_PATCHES)} patches.",
        "",
        "| patch | target (below `sglang.srt.`) | kind | where | why | upstream today "
        "| goes when |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for patch in ALL_PATCHES:
        where = ", ".join(process.value for process in patch.processes)
        target = patch.target.removeprefix("sglang.srt.")
        lines.append(
            f"| {patch.id} | `{target}` | {patch.kind.value} | {where} | {patch.why} "
            f"| {patch.upstream} | {patch.remove_when} |"
        )
    return "\n".join(lines)


def with_table(text: str) -> str:
    """``text`` with the part between the markers replaced by the current table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README} lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{render()}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="vertumnus_patches.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if README.md is out of date")
    parser.add_argument("--fingerprints", action="store_true", help="print installed digests")
    options = parser.parse_args()
    if options.fingerprints:
        from vertumnus_patches.install import resolve
        from vertumnus_patches.record import source_fingerprint

        for patch in ALL_PATCHES:
            print(patch.id, source_fingerprint(resolve(patch)))
        return
    text = README.read_text()
    updated = with_table(text)
    if not options.check:
        README.write_text(updated)
    elif text != updated:
        sys.exit("the patch table is out of date: run python -m vertumnus_patches.table")


if __name__ == "__main__":
    main()
