"""What the hooks of the front and the controller do."""

import copy
import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vertumnus_patches.patches import shared_tokenizer
from vertumnus_patches.patches.completion_headers import take_header_overrides
from vertumnus_patches.patches.controller_loop import run_controller
from vertumnus_patches.patches.process_start import set_start_method
from vertumnus_patches.patches.shared_tokenizer import load_once

from tests.patches.conftest import Bound

# -- process_start --------------------------------------------------------------------------------


@pytest.fixture
def start_method() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_are_made_as_the_runtime_says(
    bound: Bound, start_method: None, method: str
) -> None:
    multiprocessing.set_start_method("spawn", force=True)  # what SGLang has just done
    bound.front.process_start_method.return_value = method
    set_start_method(None, object())
    assert multiprocessing.get_start_method() == method


# -- controller -----------------------------------------------------------------------------------


def test_the_controller_is_the_runtimes(bound: Bound) -> None:
    controller = object()
    run_controller(controller)
    bound.controller.run.assert_called_once_with(controller)


# -- shared_tokenizer -----------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.made_of = (name, args, kwargs)
        self.vocabulary = {"a": 1}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Mock:
    monkeypatch.setattr(shared_tokenizer, "_loaded", {})
    return Mock(side_effect=Tokenizer)


def test_equal_calls_load_once_and_share_what_is_large(load: Mock) -> None:
    first = load_once(load, "model", tokenizer_mode="auto", tokenizer_revision=None)
    second = load_once(load, "model", tokenizer_revision=None, tokenizer_mode="auto")
    assert load.call_count == 1
    assert first is not second and first.vocabulary is second.vocabulary


def test_what_one_caller_sets_no_other_sees(load: Mock) -> None:
    first = load_once(load, "model")
    first.chat_template = "mine"
    assert not hasattr(load_once(load, "model"), "chat_template")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("other",), {}),
        (("model", "positional"), {}),
        (("model",), {"tokenizer_mode": "slow"}),
        (("model",), {"trust_remote_code": True}),
    ],
)
def test_other_calls_load_their_own(load: Mock, args: Any, kwargs: Any) -> None:
    load_once(load, "model")
    assert load_once(load, *args, **kwargs).made_of == (args[0], args[1:], kwargs)
    assert load.call_count == 2


def test_arguments_that_cannot_be_compared_are_not_shared(load: Mock) -> None:
    for _ in range(2):
        assert load_once(load, "model", extra={"a": []}).made_of[2] == {"extra": {"a": []}}
    assert load.call_count == 2


def test_a_failure_is_not_remembered(load: Mock) -> None:
    load.side_effect = [OSError("not there yet"), Tokenizer("model")]
    with pytest.raises(OSError, match="not there yet"):
        load_once(load, "model")
    assert load_once(load, "model").vocabulary


def test_a_copied_tokenizer_is_a_whole_one(random_model_path: str) -> None:
    """copy.copy of a real tokenizer gives one that encodes and decodes by itself."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    original = transformers.AutoTokenizer.from_pretrained(random_model_path)
    one, other = copy.copy(original), copy.copy(original)
    one.chat_template = "{{ 'changed' }}"
    one.padding_side = "left"
    assert other.chat_template == original.chat_template
    assert other.encode("abc äöü") == original.encode("abc äöü")
    assert other.decode(other.encode("abc äöü")) == original.decode(original.encode("abc äöü"))


# -- completion_headers ---------------------------------------------------------------------------

HEADERS = {"x-override-rid": "abc", "x-override-routed-dp-rank": "3", "x-other": "1"}


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pytest.importorskip("sglang.srt.entrypoints.request_headers", reason="needs sglang")
    monkeypatch.setenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "1")
    return monkeypatch


def converted(headers: dict[str, str] | None) -> Any:
    adapted = SimpleNamespace(rid="body", routed_dp_rank=None)
    raw = None if headers is None else SimpleNamespace(headers=headers)
    take_header_overrides((adapted, object()), object(), object(), raw)
    return adapted


def test_headers_name_rank_and_request(overrides: pytest.MonkeyPatch) -> None:
    adapted = converted(HEADERS)
    assert (adapted.rid, adapted.routed_dp_rank) == ("abc", 3)


def test_without_headers_the_body_counts(overrides: pytest.MonkeyPatch) -> None:
    for headers in (None, {}):
        adapted = converted(headers)
        assert (adapted.rid, adapted.routed_dp_rank) == ("body", None)


def test_headers_are_ignored_where_sglang_ignores_them(overrides: pytest.MonkeyPatch) -> None:
    overrides.setenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "0")
    assert converted(HEADERS).rid == "body"


def test_a_bad_header_is_the_clients_mistake(overrides: pytest.MonkeyPatch) -> None:
    from fastapi import HTTPException

    with pytest.raises(HTTPException) as refused:
        converted({"x-override-routed-dp-rank": "three"})
    assert refused.value.status_code == 400
