"""The command a newcomer runs, with the real model on real ranks."""

import json
import subprocess
from pathlib import Path

import pytest

from sgl_vertumnus.demo.embedded_model import NAME
from sgl_vertumnus.demo.quickstart import Result
from sgl_vertumnus.processes import family

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart"


@pytest.mark.e2e
def test_one_command_gives_an_answer(embedded_model_path: str, tmp_path: Path) -> None:
    assert Path(embedded_model_path).name == NAME
    with (tmp_path / "stdout").open("wb") as output, (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [str(SCRIPT), "--once", "--json"],
            stdout=output,
            stderr=errors,
            cwd=tmp_path,  # works from anywhere
            start_new_session=True,
        )
        status = process.wait()
    said = (tmp_path / "stderr").read_text()
    assert status == 0, said
    result = json.loads((tmp_path / "stdout").read_text().splitlines()[-1])
    assert result.keys() == set(Result.__struct_fields__)
    assert result["answer"] == "The capital of France is Paris."
    assert result["composition"] == "2x1,1x2"
    assert result["cp_degree"] in (1, 2)
    assert result["worker"].endswith(f"x{result['cp_degree']}")
    assert 0 < result["ttft_s"] < result["ready_s"]
    assert family(process.pid) == []
    for rank in range(4):
        assert f"rank {rank}: " in said
