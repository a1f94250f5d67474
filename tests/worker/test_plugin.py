"""The entry point of SGLang's plugins: inert, or whole, or the end of the process."""

import subprocess
import sys

import pytest
from vertumnus_patches.seams import seams

from sgl_vertumnus.environment import POOL_VARIABLE
from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.worker import plugin as plugin_module
from sgl_vertumnus.worker.plugin import plugin
from tests.worker.configs import config_of


def test_outside_a_pool_nothing_is_even_imported() -> None:
    code = (
        "import sys\n"
        "from sgl_vertumnus.worker.plugin import plugin\n"
        "plugin()\n"
        "heavy = {'torch', 'sglang', 'zmq', 'sgl_vertumnus.worker.rank'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "error", [ImportError("no such kernel"), RuntimeError("port"), ConfigurationError("broken")]
)
def test_whatever_goes_wrong_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr(plugin_module, "pool_config", config_of)
    monkeypatch.setattr(plugin_module, "_join", fail)
    with pytest.raises(SystemExit, match="cannot join its pool") as stop:
        plugin()
    assert str(error) in str(stop.value)
    assert stop.value.__cause__ is error


def test_what_the_patches_say_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> None:
        raise SystemExit("sgl-vertumnus cannot run on this SGLang:\n  - token-sync: renamed")

    monkeypatch.setattr(plugin_module, "pool_config", config_of)
    monkeypatch.setattr(plugin_module, "_join", fail)
    with pytest.raises(SystemExit, match="token-sync: renamed"):
        plugin()


def test_a_broken_variable_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_VARIABLE, "{")
    with pytest.raises(SystemExit, match=POOL_VARIABLE):
        plugin()
    assert not seams.are_bound
