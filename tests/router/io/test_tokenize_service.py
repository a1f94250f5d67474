"""Which tokenizer is used while models come and go."""

import asyncio
import threading
from typing import Any

import pytest
from vertumnus_router.io import tokenize
from vertumnus_router.io.plain import PlainServer, ServerInfo
from vertumnus_router.io.tokenize import TokenizeService
from vertumnus_router.io.tokenizer_files import ModelTokenizer, TokenizerError


def server(path: str) -> PlainServer:
    info = ServerInfo(
        model_path=path, max_total_num_tokens=1000, max_req_input_len=900, tokenizer_path=path
    )
    return PlainServer("http://a:1", info)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_slow_to_load_replaces_nothing_newer(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def load(path: str, template: str | None) -> Any:
        if path == "old":
            go_on.wait(5.0)
            if fails:
                raise TokenizerError("gone")
        tokenizer: Any = path
        return ModelTokenizer(
            tokenizer=tokenizer,
            chat=None,
            no_chat=None,
            chat_adds_special=False,
            bos_id=None,
            most_chars_per_token=None,
            cuts=None,
        )

    monkeypatch.setattr(tokenize, "load", load)

    async def scenario() -> None:
        service = TokenizeService(threads=2, deadline_s=1.0, cache_bytes=1000)
        slow = asyncio.create_task(service.load(server("old"), None))
        await asyncio.sleep(0)
        await service.load(server("new"), None)
        go_on.set()
        await slow
        assert getattr(service._model, "tokenizer", None) == "new"
        assert service._source == ("new", None)
        service.close()

    asyncio.run(scenario())
