"""The pool's configuration and how it reaches SGLang's children."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_router.lattice import Block

from sgl_vertumnus import environment
from sgl_vertumnus.config import (
    MAX_POOL_ID_BYTES,
    PoolConfig,
    check_geometry,
    check_host,
    check_pool_id,
    new_pool_id,
)
from sgl_vertumnus.environment import (
    POOL_VARIABLE,
    TRANSPORT_VARIABLE,
    forces_mooncake,
    pool_config,
    pool_secret,
    publish_pool_config,
    publish_pool_secret,
    set_defaults,
)
from sgl_vertumnus.errors import ConfigurationError
from tests.worker.configs import config_of

# -- geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "degrees", "composition", "expected"),
    [
        (4, (1, 2, 4), None, ((1, 2, 4), "4x1")),
        (4, (4, 2), None, ((2, 4), "2x2")),
        (4, (1, 2, 4), "2x1,1x2", ((1, 2, 4), "2x1,1x2")),
        (4, (1, 2), " 1X2 , 1x1,1x1", ((1, 2), "1x2,2x1")),
        (2, (1,), None, ((1,), "2x1")),
    ],
)
def test_geometry_is_brought_to_one_form(
    size: int,
    degrees: tuple[int, ...],
    composition: str | None,
    expected: tuple[tuple[int, ...], str],
) -> None:
    assert check_geometry(size, degrees, composition) == expected


@pytest.mark.parametrize(
    ("size", "degrees", "composition", "reason"),
    [
        (0, (1,), None, "--pool-size 0"),
        (1, (1,), None, "--pool-size 1.*at least two ranks.*sglang serve"),
        (-1, (1,), None, "--pool-size -1"),
        (3, (2,), None, "cannot be filled with degree 2.*--composition or add degree 1"),
        (2, (1, 4), None, "larger than the pool of 2.*raise --pool-size or drop the degree"),
        (4, (3,), None, "power of two"),
        (4, (1, 2), "1x4", "not among --cp-degrees"),
        (4, (1, 2), "1x1,1x2,1x1", "write larger degrees first"),
        (4, (1, 2), "nonsense", "not COUNTxDEGREE"),
        (4, (1, 2), "3x1", r"uses 3 rank\(s\)"),
    ],
)
def test_what_cannot_be_laid_out_says_what_to_do(
    size: int, degrees: tuple[int, ...], composition: str | None, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_geometry(size, degrees, composition)


@given(
    size=st.integers(-2, 9),
    degrees=st.lists(st.integers(-1, 9), max_size=4).map(tuple),
    composition=st.none() | st.text(alphabet="12348x,", max_size=8),
)
def test_any_geometry_is_whole_or_refused(
    size: int, degrees: tuple[int, ...], composition: str | None
) -> None:
    try:
        ladder, written = check_geometry(size, degrees, composition)
    except ConfigurationError:
        return
    blocks = config_of(size, ladder, composition=written).blocks
    assert [rank for block in blocks for rank in block.ranks] == list(range(size))
    assert check_geometry(size, ladder, written) == (ladder, written)


def test_blocks_are_those_of_the_composition() -> None:
    config = config_of(4, (1, 2), composition="2x1,1x2")
    assert config.blocks == (Block(0, 1), Block(1, 1), Block(2, 2))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "10.1.2.3"])
def test_hosts_that_can_be_bound(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize("host", ["localhost", "::1", "", "my-server", "1.2.3", "127.0.0.1:80"])
def test_hosts_that_cannot_be_bound_by_every_socket(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"give an IPv4 address .*127\.0\.0\.1"):
        check_host(host)


def test_pool_ids_tell_lives_apart() -> None:
    assert len({new_pool_id() for _ in range(50)}) == 50


# -- environment ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL_VARIABLE, raising=False)


def test_an_ordinary_process_has_no_pool() -> None:
    assert pool_config() is None


def test_a_configuration_reaches_a_child_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(8, (1, 2, 4), composition="1x4,2x2", pool_id="pöol", threads=3)
    monkeypatch.setenv(POOL_VARIABLE, "")  # undone at the end of the test
    publish_pool_config(config)
    assert pool_config() == config
    code = "from sgl_vertumnus.environment import pool_config as c; print(c())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(config)


@pytest.mark.parametrize(
    "text", ["", "{}", "not json", '{"pool_id": 3}', json.dumps({"pool_id": "p", "size": 1})]
)
def test_a_broken_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(POOL_VARIABLE, text)
    with pytest.raises(ConfigurationError, match=f"{POOL_VARIABLE} is set by launch_server"):
        pool_config()


def test_no_secret_travels() -> None:
    names = set(msgspec.structs.asdict(config_of()))
    assert not [name for name in names if "key" in name or "secret" in name or "token" in name]


def test_defaults_give_way_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_TEST_A", "operator")
    monkeypatch.setenv("VERTUMNUS_TEST_B", "")
    monkeypatch.delenv("VERTUMNUS_TEST_B")
    set_defaults({"VERTUMNUS_TEST_A": "ours", "VERTUMNUS_TEST_B": "ours"})
    assert os.environ["VERTUMNUS_TEST_A"] == "operator"
    assert os.environ["VERTUMNUS_TEST_B"] == "ours"


def test_the_secret_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERTUMNUS_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match="set by launch_server"):
        pool_secret()
    monkeypatch.setenv("VERTUMNUS_SECRET", "")
    publish_pool_secret("s3cret")
    assert pool_secret() == "s3cret"


def test_how_prefixes_are_copied_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRANSPORT_VARIABLE, raising=False)
    assert not forces_mooncake()
    for asked, forced in (("auto", False), ("mooncake", True)):
        monkeypatch.setenv(TRANSPORT_VARIABLE, asked)
        assert forces_mooncake() is forced
    monkeypatch.setenv(TRANSPORT_VARIABLE, "pigeon")
    with pytest.raises(ConfigurationError, match="pigeon: auto or mooncake"):
        forces_mooncake()


def test_the_environment_is_read_in_one_module() -> None:
    """Of what runs in a pool; the demo starts processes with environments of their own."""
    package = Path(environment.__file__).parent
    readers = {
        path.name
        for path in (*package.glob("*.py"), *package.glob("worker/*.py"))
        if "os.environ" in (text := path.read_text()) or "os.getenv" in text
    }
    assert readers == {"environment.py"}


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        config_of().size = 3  # type: ignore[misc]
    assert isinstance(config_of(), PoolConfig)


@pytest.mark.parametrize("name", ["", "x" * (MAX_POOL_ID_BYTES + 1), "ü" * MAX_POOL_ID_BYTES])
def test_a_pool_id_fits_into_a_socket_address(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--pool-id"):
        check_pool_id(name)


def test_ordinary_pool_ids_and_none_are_fine() -> None:
    check_pool_id(None)
    check_pool_id("x" * MAX_POOL_ID_BYTES)
