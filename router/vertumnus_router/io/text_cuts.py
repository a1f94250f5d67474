"""Where a text can be cut so that its parts, encoded one by one, give the tokens of the whole.

A tokenizer first looks for its added tokens in the raw text, leftmost and longest first, and
normalises, splits and merges only what is between them (``added_vocabulary.rs`` of the
tokenizers library). So nothing reaches across such a token, and a text may be cut right behind one.
The part that follows is encoded with that token before it, since some tokenizers treat what
stands at the very beginning of a text differently (Metaspace, ``prepend_scheme: first``).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

#: Cuts are at least this far apart: a part costs about as much to look up as so much to encode.
PART_CHARS = 512


class Part(NamedTuple):
    """``mark`` is the token that the text before it ends with, "" at the beginning."""

    mark: str
    text: str


class TextCuts:
    """Cuts and encodes texts for one tokenizer. ``of`` makes it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: re.Pattern[str],
        ends: frozenset[str],
        wrap: "_Wrap",
        part_chars: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._part_chars = part_chars
        self._marks = marks
        self._ends = ends
        self._wrap = wrap

    @classmethod
    def of(cls, tokenizer: Tokenizer, part_chars: int = PART_CHARS) -> "TextCuts | None":
        """None when it is not certain that any cut is safe. Parts have ``part_chars`` or more."""
        added = tokenizer.get_added_tokens_decoder().values()
        if any(token.single_word for token in added) or tokenizer.encode_special_tokens:
            return None  # depends on the neighbours; not looked for in the text at all
        if getattr(tokenizer.model, "dropout", None):
            return None  # the same text gives other tokens each time
        raw = [token for token in added if not token.normalized and token.content]
        strips = any(token.lstrip or token.rstrip for token in raw)
        if strips and any(token.content != token.content.strip() for token in raw):
            return None  # two tokens could claim the same space
        ends = [token.content for token in raw if not token.rstrip]
        found = tokenizer.encode_batch_fast(ends, add_special_tokens=False)
        ends = [
            end
            for end, one in zip(ends, found, strict=True)
            if one.ids == [tokenizer.token_to_id(end)]
        ]
        wrap = _wrap(tokenizer, ends[0]) if ends else None
        if wrap is None:
            return None
        # An alternation takes the first that fits, so the longest comes first.
        longest_first = sorted((token.content for token in raw), key=len, reverse=True)
        marks = re.compile("|".join(re.escape(content) for content in longest_first))
        return cls(tokenizer, marks, frozenset(ends), wrap, part_chars)

    def split(self, text: str) -> list[Part]:
        """The parts of a text, at least one; all but the last end in a mark.

        Where the cuts are depends on the text before them only, so that two texts with a long
        common prefix have their first parts in common.
        """
        parts: list[Part] = []
        begin, mark = 0, ""
        for match in self._marks.finditer(text):
            end = match.end()
            if end - begin >= self._part_chars and match[0] in self._ends:
                parts.append(Part(mark, text[begin:end]))
                begin, mark = end, match[0]
        parts.append(Part(mark, text[begin:]))
        return parts

    def encode(self, parts: Sequence[Part]) -> list[list[int]]:
        """The ids of each part where it stands, without what the tokenizer adds around a text."""
        found = self._tokenizer.encode_batch_fast(
            [part.mark + part.text for part in parts], add_special_tokens=False
        )
        return [
            one.ids[1:] if part.mark else one.ids for part, one in zip(parts, found, strict=True)
        ]

    def around(self, special: bool) -> tuple[list[int], list[int]]:
        """The ids that go before and behind a text that is encoded with special tokens or not."""
        return (self._wrap.before, self._wrap.behind) if special else ([], [])


@dataclass(frozen=True, slots=True)
class _Wrap:
    before: list[int]
    behind: list[int]


def _wrap(tokenizer: Tokenizer, end: str) -> _Wrap | None:
    """What the post-processor adds to any text, read off one of a known token."""
    found = tokenizer.encode(end)
    of_text = [at for at, sequence in enumerate(found.sequence_ids) if sequence is not None]
    if [found.ids[at] for at in of_text] != [tokenizer.token_to_id(end)]:
        return None
    return _Wrap(found.ids[: of_text[0]], found.ids[of_text[0] + 1 :])
