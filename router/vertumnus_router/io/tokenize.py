"""Run the model's tokenizer off the event loop, under a deadline."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from vertumnus_router.io.client_request import ClientRequest
from vertumnus_router.io.prefix_cache import PrefixCache
from vertumnus_router.io.prompt import Prompt, PromptRules, estimate, tokenise
from vertumnus_router.io.served_model import Served
from vertumnus_router.io.tokenizer_files import ModelTokenizer, TokenizerError, load

#: Prompts are hashed in blocks of this size while nobody publishes KV events. Nothing is found by
#: the hashes then but prefixes that are being computed.
NO_EVENTS_BLOCK_TOKENS = 64

log = logging.getLogger(__name__)

#: A body of so many bytes is tokenised where it is, for it takes no longer than to hand it to a
#: thread and back, which stops the event loop as well.
_SHORT_BYTES = 512


class TokenizeService:
    """Turns requests into prompts on a few threads; a prompt that is late is estimated.

    What is found of its beginning is kept, also when it was late, in ``cache_bytes`` at most: the
    next turn of a conversation costs its new tokens only.
    """

    def __init__(self, *, threads: int, deadline_s: float, cache_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._deadline_s = deadline_s
        self._cache_bytes = cache_bytes
        #: of the model that is loaded
        self.cache = PrefixCache(cache_bytes)
        self._source: tuple[str, str | None] | None = None
        self._model: ModelTokenizer | None = None
        self._rules: PromptRules | None = None
        #: whether loading has come to an end, good or bad
        self.settled = False

    async def load(self, pool: Served, path: str | None) -> None:
        """Load the tokenizer of the pool's model, from ``path`` if given. Without a usable one
        every prompt is an estimate."""
        rules = self._rules = PromptRules(
            served_name=pool.model.served_name,
            block_tokens=pool.block_tokens or self._block_tokens(),
            context_tokens=pool.model.context_tokens,
        )
        source = path or pool.model.tokenizer_path, pool.model.chat_template
        if source == self._source:
            return
        self._source, self._model, self.settled = source, None, False
        try:
            model = await asyncio.get_running_loop().run_in_executor(self._pool, load, *source)
        except TokenizerError as exc:
            log.error("no tokenizer, so prompts are estimated and no prefix is recognised: %s", exc)
            if self._source != source:
                return
            self._source = None
        else:
            if self._source != source:
                return  # another model has come meanwhile
            if model.no_chat is not None:
                log.warning("chat prompts are estimated: %s", model.no_chat)
            self.use(model, self._rules or rules)
        self.settled = True

    def _block_tokens(self) -> int:
        """Of who publishes no KV events: as the others, if there are any."""
        return NO_EVENTS_BLOCK_TOKENS if self._rules is None else self._rules.block_tokens

    def use(self, model: ModelTokenizer, rules: PromptRules) -> None:
        """Tokenise with ``model`` from now on; what was known of prompts is not of that one."""
        self._model, self._rules, self.cache = model, rules, PrefixCache(self._cache_bytes)

    async def prompt(self, request: ClientRequest) -> Prompt:
        """The prompt, exact if that was possible in time."""
        model, rules = self._model, self._rules
        if model is None or rules is None:
            return estimate(request, "no_tokenizer")
        try:
            if request.body_bytes <= _SHORT_BYTES:
                return tokenise(request, model, rules, self.cache)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(self._deadline_s):
                return await loop.run_in_executor(
                    self._pool, tokenise, request, model, rules, self.cache
                )
        except TimeoutError:
            return estimate(request, "deadline")
        except Exception:  # a request must not fail for what only placement wants to know
            log.exception("a prompt could not be tokenised")
            return estimate(request, "error")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
