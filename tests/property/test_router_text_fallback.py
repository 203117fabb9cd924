"""The same law for vocabularies with byte fallback: characters that they lack come byte by byte and are never split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from services.router.detokenize import Detokenizer
from services.router.text import BaseText

# Emoji with joiners and skin tones, flags, combining marks, several scripts, and letters that the vocabulary has.
CHARACTERS = ["👩🏽‍🚀", "🇪🇺", "e\u0301", "क्षि", "한", "漢", "ß", "\u200d", "a", "b", " ", "\n", "é", "�"]
texts = st.lists(st.sampled_from(CHARACTERS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    """A sentence-piece-like vocabulary: `▁`, a, b, é, some merges, and one token for every byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "ab"]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(folder / "tokenizer.json"))
    return BaseText.load(folder)


@given(text=texts)
@settings(max_examples=300)
def test_every_piece_is_whole_characters_and_together_they_are_the_text(base: BaseText, text: str) -> None:
    tokens = base.encode(text)
    assert base.table.decode(tokens) == text
    detokenizer = Detokenizer(base.table)
    pieces = [detokenizer.feed(token).text for token in tokens]
    assert "".join(pieces) + detokenizer.finish().text == text
    assert sum(piece.count("�") for piece in pieces) == text.count("�"), "no byte of a character goes out alone"
    assert all(piece == piece.encode().decode() for piece in pieces)


@given(text=texts, stop=st.sampled_from(CHARACTERS[:8]))
def test_a_stop_string_of_several_bytes_is_found_and_never_shown(base: BaseText, text: str, stop: str) -> None:
    detokenizer, shown, ended = Detokenizer(base.table, stops=[stop]), "", ""
    for token in base.encode(text + stop + "a"):
        piece = detokenizer.feed(token)
        shown += piece.text
        if piece.stop:
            ended = piece.stop
            break
    assert ended == stop
    assert shown == (text + stop)[: (text + stop).index(stop)]
