"""The patches through SGLang's own plugin loader: inert outside a pool, live inside, never half."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.record import Patch

from sgl_vertumnus.environment import POOL_VARIABLE

pytest.importorskip("sglang", reason="needs sglang")

each_patch = pytest.mark.parametrize("patch", ALL_PATCHES, ids=lambda patch: patch.id)
NOT_SET = (POOL_VARIABLE, "SGLANG_PLUGINS", "SGLANG_PLATFORM")


def clean_environment(**variables: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in NOT_SET} | variables


@pytest.fixture(scope="session")
def report() -> Any:
    """What ``live_check`` saw; importing SGLang's scheduler there takes most of the time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.live_check"],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_finds_the_plugin(report: Any) -> None:
    assert report["outside"]["discovered"]


@each_patch
def test_inert_outside_a_pool(report: Any, patch: Patch) -> None:
    assert patch.id not in report["outside"]["changed"]
    assert patch.target not in report["outside"]["hooked"]


def test_nothing_else_happens_outside_a_pool(report: Any) -> None:
    assert report["outside"]["hooked"] == []
    assert not report["outside"]["bound"]
    assert not report["outside"]["backend_changed"]


@each_patch
def test_live_inside_a_pool(report: Any, patch: Patch) -> None:
    assert report["inside"]["hooked"].count(patch.target) == 1
    assert patch.id in report["inside"]["live"]
    assert patch.id in report["inside"]["wraps_original"]


@each_patch
def test_live_for_those_who_had_imported_the_target(report: Any, patch: Patch) -> None:
    assert patch.id in report["inside"]["alias_live"]


def test_a_pool_process_has_its_runtime(report: Any) -> None:
    assert report["inside"]["bound"] and report["inside"]["rank_manifest"]
    assert report["inside"]["backend_changed"]


def test_hooks_are_not_stacked_by_a_second_load(report: Any) -> None:
    assert report["changed_by_second_load"] == []


# -- never half -----------------------------------------------------------------------------------

LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
print("served unpatched")
"""


def test_a_process_whose_plugin_fails_does_not_serve() -> None:
    """SGLang logs an exception of a plugin and goes on; the plugin must not let that happen."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        capture_output=True,
        text=True,
        env=clean_environment(**{POOL_VARIABLE: '{"pool_id": "p"}'}),
    )
    assert done.returncode == 1
    assert "served unpatched" not in done.stdout
    assert POOL_VARIABLE in done.stderr and "not meant to be written by hand" in done.stderr
