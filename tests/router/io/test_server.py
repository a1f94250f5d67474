"""What the process itself sees to."""

import resource

import pytest
from vertumnus_router.io import server


@pytest.mark.parametrize(("hard", "warns"), [(1_048_576, False), (2048, True)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    hard: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    server._raise_file_limit()
    assert raised == [(hard, hard)]
    assert ("about 1024 streams" in caplog.text) == warns
