"""What can be said about every patch without SGLang, and the digest of all of them."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vertumnus_patches import table
from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.record import Kind, Patch, Process, source_fingerprint
from vertumnus_patches.seams import Seams, UnboundSeam

from tests.patches.conftest import ModuleMaker

each_patch = pytest.mark.parametrize("patch", ALL_PATCHES, ids=lambda patch: patch.id)


@each_patch
def test_record_is_complete(patch: Patch) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", patch.id)
    assert patch.target.startswith("sglang.srt.")
    assert re.fullmatch(r"[0-9a-f]{16}", patch.fingerprint)
    assert patch.processes and all(isinstance(where, Process) for where in patch.processes)
    assert all((patch.why, patch.upstream, patch.remove_when, patch.signature))
    assert "|" not in patch.why + patch.upstream + patch.remove_when, "it breaks the table"


@each_patch
def test_file_is_named_like_its_patch(patch: Patch) -> None:
    assert patch.hook.__module__.rpartition(".")[2] == patch.id.replace("-", "_")


@each_patch
def test_replacements_stay_small(patch: Patch) -> None:
    if patch.kind is Kind.REPLACE:
        assert len(inspect.getsource(patch.hook).splitlines()) <= 40, "a fork: look for a seam"


def test_ids_and_targets_are_unique() -> None:
    assert len({patch.id for patch in ALL_PATCHES}) == len(ALL_PATCHES)
    assert len({patch.target for patch in ALL_PATCHES}) == len(ALL_PATCHES)


def test_readme_table_is_current() -> None:
    text = table.README.read_text()
    assert table.with_table(text) == text, "run python -m vertumnus_patches.table"
    assert all(f"| {patch.id} |" in text for patch in ALL_PATCHES)


def test_table_check_fails_when_the_table_is_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "README.md"
    old.write_text(f"before\n{table.BEGIN}\nsomething\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "README", old)
    monkeypatch.setattr(sys, "argv", ["table", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        table.main()
    monkeypatch.setattr(sys, "argv", ["table"])
    table.main()
    monkeypatch.setattr(sys, "argv", ["table", "--check"])
    table.main()
    assert old.read_text().startswith("before\n") and old.read_text().endswith("\nafter\n")


def test_table_needs_its_markers() -> None:
    with pytest.raises(SystemExit, match="markers"):
        table.with_table("no markers here")


# -- the manifest ---------------------------------------------------------------------------------

COMPUTE = """
import sys
from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
print(manifest(ALL_PATCHES), *sorted({"torch", "sglang", "transformers"} & set(sys.modules)))
"""


def test_manifest_is_the_same_in_another_process_and_needs_neither_sglang_nor_torch() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", COMPUTE], capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed == [manifest(ALL_PATCHES)]


def test_manifest_does_not_depend_on_the_order() -> None:
    assert manifest(ALL_PATCHES[::-1]) == manifest(ALL_PATCHES)


@each_patch
def test_manifest_changes_with_every_patch(patch: Patch, module: ModuleMaker) -> None:
    whole = manifest(ALL_PATCHES)
    rest = [other for other in ALL_PATCHES if other is not patch]
    assert manifest(rest) != whole
    hook = module("def hook(*args):\n    return None\n").hook
    kind = Kind.AROUND if patch.kind is not Kind.AROUND else Kind.AFTER
    for changed in (
        dataclasses.replace(patch, hook=hook),
        dataclasses.replace(patch, kind=kind),
        dataclasses.replace(patch, target=patch.target + "_too"),
        dataclasses.replace(patch, id=patch.id + "-too"),
    ):
        assert manifest([*rest, changed]) != whole


def test_manifest_changes_with_what_a_hook_calls(module: ModuleMaker) -> None:
    text = "def hook():\n    return helper()\n\n\ndef helper():\n    return {}\n"
    first, second = (module(text.format(value)).hook for value in (1, 2))
    patch = ALL_PATCHES[0]
    assert source_fingerprint(first) == source_fingerprint(second)
    assert manifest([dataclasses.replace(patch, hook=first)]) != manifest(
        [dataclasses.replace(patch, hook=second)]
    )


def test_manifest_changes_with_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = manifest(ALL_PATCHES)
    monkeypatch.setattr("vertumnus_patches.install.SGLANG_VERSION", "0.5.24")
    assert manifest(ALL_PATCHES) != whole


# -- seams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rank", "controller", "front"])
def test_an_unbound_seam_raises_and_names_itself(name: str) -> None:
    seams = Seams()
    assert not seams.are_bound
    with pytest.raises(UnboundSeam, match=name):
        getattr(seams, name)
