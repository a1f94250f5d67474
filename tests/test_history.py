"""Traces in Mooncake's format."""

from pathlib import Path

import pytest
from vertumnus_router.core.initial import PastRequest

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.history import past_requests, read_history

TRACE = """\
{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 3]}

{"timestamp": 3500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
"""


def test_what_was_seen_before_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    assert past_requests(read_history(path)) == [
        PastRequest(0.0, 1200, 0),
        PastRequest(2.0, 1500 - 1024, 1024),
        PastRequest(3.5, 1, 1023),  # its last token is always computed
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{}\n", "line 1.*timestamp"),
        (TRACE + "x\n", "line 5"),
        (TRACE.replace("1200", "0"), "line 1.*input_length"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        read_history(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        read_history(tmp_path / "nowhere")
