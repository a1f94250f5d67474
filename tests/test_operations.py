"""What docs/operations.md tells an operator to look at or to give exists."""

import re
from pathlib import Path

import pytest

from sgl_vertumnus import launch_router, launch_server

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ROUTER = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (ROOT / "router" / "vertumnus_router").rglob("*.py")
)
#: Of SGLang, kubectl and sgl-vertumnus status.
OTHERS = {
    "--max-total-tokens",
    "--kv-cache-dtype",
    "--dtype",
    "--served-model-name",
    "--as",
    "--url",
}


def test_the_metrics() -> None:
    named = set(re.findall(r"vertumnus_[a-z_]+[a-z]", TEXT)) - {"vertumnus_router"}
    assert len(named) > 15
    # The client library puts _total behind the name of a counter.
    unknown = {one for one in named if f'"{one.removesuffix("_total")}' not in ROUTER}
    assert not unknown


def test_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for show_help in (launch_router.main, launch_server.main):
        with pytest.raises(SystemExit):
            show_help(["--help"])
    known = OTHERS | set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", TEXT))
    assert len(named) > 25
    assert not named - known


def test_the_reasons() -> None:
    for reason in re.findall(r"`(no_[a-z_]+|queue_full|worker_[a-z]+|[a-z]+_exceeded)`", TEXT):
        assert f'"{reason}"' in ROUTER, reason


def test_the_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    headings = {
        line.lstrip("# ").lower().replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", TEXT):
        assert anchor in headings, anchor
