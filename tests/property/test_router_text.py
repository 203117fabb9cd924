"""One law of the router's text: what is emitted is the whole answer decoded at once, cut before its stop string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.router.detokenize import Detokenizer, StopFinder, TokenTable
from services.router.text import BaseText

ALPHABET = "ab é😀\n"
# Single bytes, whole characters, parts of characters, several characters, nothing.
PIECES = [
    *(bytes([b]) for b in "é😀".encode()),
    b"a",
    b"b",
    b"ab",
    "é".encode(),
    b"a\xf0\x9f",
    b"",
    b" b",
]
TABLE = TokenTable(dict(enumerate(PIECES)))

stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)
answers = st.lists(st.integers(0, len(PIECES) + 1), max_size=40)


def cut(text: str, stops: list[str]) -> tuple[str, str]:
    """The slow twin: reads character by character; the first complete stop string ends it, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def emitted(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str]:
    parts = []
    for token in tokens:
        piece = detokenizer.feed(token)
        parts.append(piece.text)
        if piece.stop:
            return parts, piece.stop
    rest = detokenizer.finish()
    return [*parts, rest.text], rest.stop


@given(tokens=answers, stops=stops)
@settings(max_examples=400)
def test_emitted_text_is_the_decoded_answer_cut_at_its_stop(tokens: list[int], stops: list[str]) -> None:
    parts, stop = emitted(Detokenizer(TABLE, stops=stops), tokens)
    assert ("".join(parts), stop) == cut(TABLE.decode(tokens), stops)


@given(tokens=answers)
def test_no_part_ends_within_a_character(tokens: list[int]) -> None:
    parts, _ = emitted(Detokenizer(TABLE), tokens)
    whole = TABLE.decode(tokens)
    assert sum(part.count("�") for part in parts) == whole.count("�")
    at = 0
    for part in parts:
        assert whole[at : at + len(part)] == part
        at += len(part)


@given(text=st.text(ALPHABET, max_size=30), cuts=st.lists(st.integers(0, 30)), stops=stops)
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, cuts: list[int], stops: list[str]) -> None:
    finder, shown = StopFinder(stops), ""
    edges = sorted({0, len(text), *(edge for edge in cuts if edge <= len(text))})
    for start, end in pairwise(edges):
        piece = finder.feed(text[start:end])
        shown += piece.text
        if piece.stop:
            assert (shown, piece.stop) == cut(text, stops)
            return
        # Whatever could still become a stop string is held back.
        held = end - len(shown)
        assert all(held >= size for stop in stops for size in range(1, len(stop)) if text[:end].endswith(stop[:size]))
    assert (shown + finder.flush(), "") == cut(text, stops)


@given(tokens=answers, stops=stops, min_tokens=st.integers(0, 10))
def test_min_tokens_come_before_any_stop(tokens: list[int], stops: list[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(TABLE, stops=stops, min_tokens=min_tokens)
    _, stop = emitted(detokenizer, tokens)
    assert not stop or detokenizer.token_count > min_tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["ça va bien, très bien 😀😀 ok", "the quick brown fox"] * 8, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    folder = tmp_path_factory.mktemp("base")
    tokenizer.save(str(folder / "tokenizer.json"))
    return BaseText.load(folder)


@given(tokens=st.lists(st.integers(0, 319), max_size=60))
@settings(max_examples=200)
def test_the_table_says_what_the_tokenizer_says(tokenizer: Tokenizer, base: BaseText, tokens: list[int]) -> None:
    assert base.table.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(text=st.text(max_size=60))
def test_text_survives_the_round_trip(base: BaseText, text: str) -> None:
    if "<|end|>" not in text:
        assert base.table.decode(base.encode(text)) == text
