import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from vertumnus_sim.workloads.traces import (
    TraceError,
    TraceRequest,
    read_flexlb,
    read_mooncake,
    write_mooncake,
)

ROW = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 9]}
FLEXLB = {"ts": 56, "il": 2100, "ol": 0, "bh": ["292848572250575933", "5"], "priority": 50}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_a_mooncake_row(tmp_path: Path) -> None:
    (request,) = read_mooncake(lines(tmp_path / "t.jsonl", ROW))
    assert request == TraceRequest(27.482, 1100, 52, (46, 47, 9), 512)


def test_a_flexlb_row_has_ids_for_whole_blocks_only(tmp_path: Path) -> None:
    (request,) = read_flexlb(lines(tmp_path / "t.jsonl", FLEXLB))
    assert request == TraceRequest(0.056, 2100, 0, (292848572250575933, 5), 1024)


def test_other_block_sizes(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", ROW | {"hash_ids": [1] * 69})
    assert read_mooncake(path, block_tokens=16)[0].block_tokens == 16


def test_compressed_and_with_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(ROW)}\n\n{json.dumps(ROW)}\n".encode()))
    assert len(read_mooncake(path)) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "truncated"),
        ({"timestamp": 30000}, "input_length"),
        (ROW | {"timestamp": "soon"}, "timestamp"),
        (ROW | {"input_length": 0, "hash_ids": []}, ">= 1"),
        (ROW | {"output_length": -1}, ">= 0"),
        (ROW | {"hash_ids": [1, 2]}, "1100 tokens are 3 blocks of 512, and hash_ids has 2"),
        (ROW | {"hash_ids": [1, 2, "x"]}, "hash_ids"),
        (ROW | {"timestamp": 27481}, "before the line above; sort by time"),
    ],
)
def test_a_row_that_is_not_right_is_named(tmp_path: Path, row: Any, reason: str) -> None:
    path = lines(tmp_path / "t.jsonl", ROW, row)
    with pytest.raises(TraceError) as caught:
        read_mooncake(path)
    assert (caught.value.path, caught.value.line) == (path, 2)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("row", "reason"), [({"il": 2000}, "more than 2000 tokens"), ({"bh": ["a", "b"]}, "'a'")]
)
def test_a_flexlb_row_that_is_not_right(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        read_flexlb(lines(tmp_path / "t.jsonl", FLEXLB | row))


def test_the_other_format_is_suspected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--format"):
        read_mooncake(lines(tmp_path / "t.jsonl", FLEXLB))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="scripts/fetch_traces"):
        read_mooncake(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read_mooncake(lines(tmp_path / "t.jsonl", ""))
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(ROW).encode())[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        read_mooncake(broken)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    requests = [TraceRequest(0.5, 600, 3, (4, 2), 512), TraceRequest(1.125, 5, 1, (7,), 512)]
    write_mooncake(tmp_path / name, requests)
    assert read_mooncake(tmp_path / name) == requests


def test_compressed_files_do_not_tell_when_they_were_written(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "t.gz", [TraceRequest(0.5, 600, 3, (4, 2), 512)])
    # RFC 1952: bytes 4 to 7 are the time.
    assert (tmp_path / "t.gz").read_bytes()[4:8] == bytes(4)


def test_tokens_without_an_id_get_one_of_their_own(tmp_path: Path) -> None:
    requests = [TraceRequest(0.0, 1500, 3, (7,), 1024), TraceRequest(0.0, 10, 3, (), 1024)]
    write_mooncake(tmp_path / "t.jsonl", requests)
    found = read_mooncake(tmp_path / "t.jsonl", block_tokens=1024)
    assert [request.blocks for request in found] == [(7, 8), (9,)]
