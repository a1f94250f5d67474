"""docs/support-matrix.md says what the code refuses and runs."""

import sys
from pathlib import Path

import pytest

from sgl_vertumnus import support_matrix
from sgl_vertumnus.preflight import CP_BACKENDS, MODEL_REFUSALS, REFUSALS, UNPROVEN_BACKENDS

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date() -> None:
    assert support_matrix.PAGE.read_text() == support_matrix.render()


def test_everything_that_is_decided_at_start_is_on_the_page() -> None:
    page = support_matrix.render()
    for reason in [*(r.reason for r in MODEL_REFUSALS), *(r.reason for r in REFUSALS)]:
        assert reason in page
    for backends in (*CP_BACKENDS.values(), *UNPROVEN_BACKENDS.values()):
        assert all(f"`{backend}`" in page for backend in backends)


def test_what_is_said_to_prove_something_exists() -> None:
    for model in support_matrix.PROVEN_MODELS:
        assert (ROOT / model.test).is_file()


def test_a_page_that_is_out_of_date_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "support-matrix.md"
    monkeypatch.setattr(support_matrix, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["support_matrix", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        support_matrix.main()
    page.write_text(support_matrix.render().replace("MLA", "everything"))
    with pytest.raises(SystemExit, match="out of date"):
        support_matrix.main()
    page.write_text(support_matrix.render())
    support_matrix.main()
