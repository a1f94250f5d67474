"""Parts of a text, encoded one by one, are the tokens of the whole, whatever the text is."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import BertProcessing, TemplateProcessing
from vertumnus_router.io.text_cuts import TextCuts

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>")
#: Halves of marks, what merges with its neighbours, what normalisers change, what is stripped.
PIECES = [
    *MARKS,
    *("<|im_", "end|>", "<", "|>", "<|im_end|", "><|im_end|>", "<|im_end|><|im_end|>"),
    *("\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u2581", "\u200d", "\u0301", "e\u0301", "é", "ﬁ"),
    *("the", " the", "them", "1", "12", "123", "'s", "'", "I'm", "東京", "🙂", "👩‍👩‍👧", "\x00"),
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=30).map("".join)


def encoded(cuts: TextCuts, text: str, special: bool) -> list[int]:
    before, behind = cuts.around(special)
    parts = cuts.split(text)
    assert "".join(part.text for part in parts) == text
    return before + [one for ids in cuts.encode(parts) for one in ids] + behind


@pytest.fixture(scope="module")
def embedded(embedded_model_path: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(embedded_model_path) / "tokenizer.json"))


@settings(max_examples=200)
@given(text=texts, part_chars=st.integers(1, 30))
def test_the_embedded_tokenizer(embedded: Tokenizer, text: str, part_chars: int) -> None:
    cuts = TextCuts.of(embedded, part_chars)
    assert cuts is not None
    expected = embedded.encode(text, add_special_tokens=False).ids
    assert encoded(cuts, text, special=False) == expected


@given(begin=texts, more=texts, part_chars=st.integers(1, 30))
def test_where_a_text_is_cut_depends_on_what_comes_before(
    embedded: Tokenizer, begin: str, more: str, part_chars: int
) -> None:
    """Else the next turn of a conversation would find nothing of the last one."""
    cuts = TextCuts.of(embedded, part_chars)
    assert cuts is not None
    parts = cuts.split(begin)
    assert cuts.split(begin + more)[: len(parts) - 1] == parts[:-1]


# -- tokenizers of other kinds --------------------------------------------------------------------


def bpe(*added: AddedToken) -> Tokenizer:
    """A BPE over whole texts, without a pre-tokenizer, that knows a few merges."""
    letters = sorted({*"the<|im_start|>\u2581 ", *"123"})
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("e", "\u2581"), (">", "t"), ("|", ">")]
    vocabulary = [*letters, *(a + b for a, b in merges), "<unk>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
        )
    )
    tokenizer.add_tokens(list(added) or [AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def prepending() -> Tokenizer:
    """As Llama 2: a normaliser that puts a space before each piece; a token at either end."""
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"), normalizers.NFKC()]
    )
    ends = [(mark, tokenizer.token_to_id(mark)) for mark in MARKS[:2]]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{MARKS[0]} $A {MARKS[1]}", special_tokens=ends
    )
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab={piece: at for at, piece in enumerate(["[UNK]", "the", "##m", "1", "##2", "<"])},
            unk_token="[UNK]",
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    first, last = ((mark, tokenizer.token_to_id(mark)) for mark in MARKS[:2])
    tokenizer.post_processor = BertProcessing(last, first)
    return tokenizer


TOKENIZERS = {
    "bert": bert(),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "prepending": prepending(),
    "overlapping": bpe(
        *(AddedToken(text, normalized=False) for text in (*MARKS, "><", "<|im_end|><", "|>1"))
    ),
    "stripping": bpe(
        AddedToken(MARKS[0], normalized=False, rstrip=True),
        AddedToken(MARKS[1], normalized=False),
        AddedToken(MARKS[2], normalized=False, lstrip=True),
    ),
    "normalised": bpe(
        AddedToken(MARKS[1], normalized=False),
        AddedToken("the", normalized=True),
        AddedToken(">1", normalized=True),
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(text=texts, part_chars=st.integers(1, 30), special=st.booleans())
def test_other_kinds(name: str, text: str, part_chars: int, special: bool) -> None:
    cuts = TextCuts.of(TOKENIZERS[name], part_chars)
    assert cuts is not None
    expected = TOKENIZERS[name].encode(text, add_special_tokens=special).ids
    assert encoded(cuts, text, special) == expected


@pytest.mark.parametrize(
    "added",
    [
        [AddedToken("a", normalized=False), AddedToken("b", normalized=False, single_word=True)],
        [AddedToken(" a", normalized=False), AddedToken("b", normalized=False, rstrip=True)],
        [AddedToken("a", normalized=True)],
        [AddedToken("a", normalized=False, rstrip=True)],
    ],
    ids=["looks at neighbours", "two claim a space", "after normalising", "none to cut behind"],
)
def test_tokenizers_that_cannot_be_cut_for_certain(added: list[AddedToken]) -> None:
    assert TextCuts.of(bpe(*added)) is None


def test_chance_cannot_be_cut() -> None:
    tokenizer = bpe()
    tokenizer.model = models.BPE(vocab={"t": 0, "<unk>": 1}, merges=[], dropout=0.5)
    assert TextCuts.of(tokenizer) is None
