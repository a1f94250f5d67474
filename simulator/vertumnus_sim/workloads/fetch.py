"""Gets the public traces, once: checked against pinned digests, resumed where it broke off.

    scripts/fetch_traces [NAME ...] [--into FOLDER]

Needs nothing but Python's standard library.
"""

import argparse
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "VERTUMNUS_CACHE"
BASE_URL = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A file below ``BASE_URL``, Apache-2.0."""

    name: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name}_trace.jsonl"


TRACES = {
    trace.name: trace
    for trace in (
        PublicTrace(
            "conversation", "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
        ),
        PublicTrace(
            "synthetic", "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131"
        ),
        PublicTrace(
            "toolagent", "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71"
        ),
    )
}


class FetchError(Exception):
    """A trace that could not be had; the message says what to do."""


def traces_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``traces`` in ``$VERTUMNUS_CACHE``, else in ``sgl-vertumnus`` of the XDG cache directory."""
    chosen = environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser() / "traces"
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sgl-vertumnus" / "traces"


def fetched(trace: PublicTrace, folder: Path) -> Path | None:
    """The whole file, if it is there."""
    path = folder / trace.file
    return path if path.is_file() and _digest(path) == trace.sha256 else None


def fetch(trace: PublicTrace, folder: Path, base_url: str = BASE_URL) -> Path:
    """The file in ``folder``, fetched unless it is there. Raises ``FetchError``."""
    path = fetched(trace, folder)
    if path is not None:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{trace.file}.part"
    url = f"{base_url}/{trace.file}"
    try:
        _download(url, part)
    except (OSError, http.client.HTTPException) as exc:
        have = part.stat().st_size if part.exists() else 0
        kept = f"; {have:,} bytes are here, and it will go on behind them" if have else ""
        raise FetchError(
            f"{url}: {_reason(exc)}. Run this again{kept}, or put the file into {folder} yourself"
        ) from exc
    found = _digest(part)
    if found != trace.sha256:
        part.unlink()
        raise FetchError(
            f"{url}: sha256 is {found}, not {trace.sha256}. The download is removed: run this "
            "again; if it stays so, the file has changed upstream and this release does not know it"
        )
    path = folder / trace.file
    part.replace(path)
    return path


def _download(url: str, part: Path) -> None:
    """Append to ``part`` what it lacks."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
            with part.open("ab" if resumed else "wb") as file:
                while chunk := response.read(_CHUNK_BYTES):
                    file.write(chunk)
                    file.flush()
            left = response.length
    except urllib.error.HTTPError as exc:
        if not (have and exc.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            raise
        # Nothing is lacking: the digest says whether it is right.
        return
    if left:
        raise http.client.IncompleteRead(b"", left)


def _reason(exc: Exception) -> str:
    if isinstance(exc, urllib.error.HTTPError):
        return f"the server answers {exc.code} {exc.reason}"
    if isinstance(exc, urllib.error.URLError):
        return f"no connection ({exc.reason}); is there a network, does it need https_proxy?"
    return f"the connection broke off ({type(exc).__name__}: {exc})"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="fetch_traces", description="Get the public traces of kvcache-ai/Mooncake."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TRACES)}; all")
    parser.add_argument("--into", type=Path, default=traces_folder(), help="%(default)s")
    parser.add_argument("--base-url", default=BASE_URL, help="of a mirror")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - TRACES.keys()):
        parser.error(f"no trace {', '.join(unknown)}; there are {', '.join(TRACES)}")
    failed = False
    for name in options.names or TRACES:
        try:
            print(fetch(TRACES[name], options.into, options.base_url))
        except FetchError as exc:
            print(f"error: {exc}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
