"""From token ids to text, piece by piece: one law for any way of cutting the stream.

    concatenation of everything emitted  ==  the whole answer decoded at once, cut before its stop string

Three steps in a row, each of which holds back what is not certain yet: token ids to bytes (a table), bytes to
characters (a character is never split), characters to what may be shown (a beginning of a stop string is never shown,
unless it turns out not to be one).
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of every token id; ids that stand for no text are not in it.

    With `strip_leading_space`, one space at the very start of the answer is not text: sentence-piece tokenizers put it
    before every text that they encode.
    """

    pieces: Mapping[int, bytes]
    strip_leading_space: bool = False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a whole answer; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(self.pieces.get(token, b"") for token in token_ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_leading_space else text


def byte_level_alphabet() -> dict[str, int]:
    """Returns which byte each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Returns the bytes of a byte-level token; one with a character outside the alphabet is plain text."""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def sentence_piece(token: str) -> bytes:
    """Returns the bytes of a sentence-piece token: `▁` is a space, `<0xE2>` is one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # an ordinary token that only looks like a byte
    return token.replace(SPACE_MARK, " ").encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: `text`, and the stop string that ended the answer, or empty."""

    text: str
    stop: str = ""


class StopFinder:
    """Finds the first stop string in a text that comes in parts.

    The answer ends where a stop string is complete for the first time; of several that are complete there, the longest
    counts. So the result does not depend on how the text was cut into parts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> Piece:
        """Takes the next part; returns what is certain now."""
        if not self._stops:
            return Piece(text)
        buffer = self._held + text
        # (end, start) of the first occurrence of each stop string; the least end wins, then the least start.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return Piece(buffer[:start], stop)
        keep = self._possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Piece(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """Returns what was held back: the answer has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Returns the length of the longest end of `buffer` that is the beginning of a stop string."""
        longest = min(len(buffer), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(buffer[-size:]) for stop in self._stops):
                return size
        return 0


class Detokenizer:
    """The text of one answer. Stop strings are looked for from token `min_tokens` on."""

    def __init__(self, table: TokenTable, *, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._table = table
        self._characters: Callable[..., str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = StopFinder(stops)
        self._min_tokens = min_tokens
        self._count = 0
        self._at_start = table.strip_leading_space

    @property
    def token_count(self) -> int:
        """Tokens taken so far."""
        return self._count

    def feed(self, token: int) -> Piece:
        """Takes the next token; returns what became certain. After a stop, nothing more may be fed."""
        self._count += 1
        text = self._strip(self._characters(self._table.pieces.get(token, b"")))
        return self._stops.feed(text) if self._count > self._min_tokens else Piece(text)

    def finish(self) -> Piece:
        """Ends the answer without a stop string; returns the rest."""
        text = self._strip(self._characters(b"", True))
        last = self._stops.feed(text) if self._count > self._min_tokens else Piece(text)
        return last if last.stop else Piece(last.text + self._stops.flush())

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
