"""A base model's own text rules: its tokenizer and its chat template, read from its directory.

Only `tokenizers` and a sandboxed `jinja2` are used. Text of a user becomes data of the template, never a template.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from loraport.bundle.digest import sha256_digest
from services.router.detokenize import TokenTable, byte_level_alphabet, byte_level_piece, sentence_piece
from services.router.validate import Message
from services.shared.errors import LoraportError

MAX_RENDERED_CHARS = 4 << 20


class TextError(ValueError):
    """A directory whose tokenizer cannot be used; one line."""


class BaseText:
    """Encodes prompts and knows the bytes of every token. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, table: TokenTable, template: str | None, names: dict[str, str], digest: str
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._names = names
        self._template = _compile(template) if template is not None else None
        self.table = table
        # The digest of tokenizer.json, as loraport.bundle.base_dir computes it.
        self.digest = digest

    @classmethod
    def load(cls, directory: str | Path) -> "BaseText":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja; only the first must be there.

        Raises:
            TextError: a file cannot be read or used.
        """
        folder = Path(directory)
        try:
            data = (folder / "tokenizer.json").read_bytes()
            config = _config(folder / "tokenizer_config.json")
            separate = folder / "chat_template.jinja"
            template = separate.read_text("utf-8") if separate.is_file() else _template_of(config)
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"cannot read {folder}: {getattr(error, 'strerror', None) or error}") from None
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise TextError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from None
        names = {
            key: text for key in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _token(config, key))
        }
        try:
            return cls(tokenizer, table=_table(tokenizer), template=template, names=names, digest=sha256_digest(data))
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template in {folder} is faulty: {error}") from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a plain prompt, with the special tokens that the tokenizer itself adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the ids of a conversation under the chat template, ready for the assistant's turn.

        Raises:
            LoraportError: INVALID_REQUEST when there is no template or it refuses this conversation.
        """
        return self._encode(self.render(messages), add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # The library lets go of the interpreter in its batch calls only. `encode` on a megabyte of text would stop
        # the event loop, and with it every tenant's streams, for seconds.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the conversation as the chat template writes it. Raises as `encode_messages`."""
        if self._template is None:
            raise LoraportError("INVALID_REQUEST", "the base model has no chat template", subject="messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(messages=turns, add_generation_prompt=True, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            detail = str(error) if isinstance(error, _Refused) else "the chat template cannot take this conversation"
            raise LoraportError("INVALID_REQUEST", detail[:240], subject="messages") from None
        if len(text) > MAX_RENDERED_CHARS:
            raise LoraportError("INVALID_REQUEST", "the conversation is too long", subject="messages")
        return text


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _compile(template: str) -> jinja2.Template:
    # The options under which models' templates are written.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        # The operator's own file, read leniently: tokenizers without a length limit are saved with one of 31 digits.
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TextError(f"{path} is not usable: {error}") from None
    return value if isinstance(value, dict) else {}


def _template_of(config: dict[str, Any]) -> str | None:
    """Some models have one template, others a list of named ones, of which `default` is the one for plain chat."""
    value = config.get("chat_template")
    if isinstance(value, list):
        value = next((item.get("template") for item in value if item.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _token(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _table(tokenizer: Tokenizer) -> TokenTable:
    """Returns the bytes of every token that stands for text; special tokens stand for none."""
    kinds = list(_decoder_parts(json.loads(tokenizer.to_str()).get("decoder")))
    names = {part["type"] for part in kinds}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    if "ByteLevel" in names:
        alphabet = byte_level_alphabet()
        pieces = {index: byte_level_piece(token, alphabet) for index, token in vocabulary.items()}
        strip = False
    elif names & {"ByteFallback", "Metaspace"}:
        pieces = {index: sentence_piece(token) for index, token in vocabulary.items()}
        strip = any(_strips_start(part) for part in kinds)
    else:
        raise TextError(f"decoders of the kind {', '.join(sorted(names)) or 'none'} are not supported")
    for index, token in added.items():
        pieces[index] = b"" if token.special else pieces.get(index, token.content.encode())
    return TokenTable(pieces, strip_leading_space=strip)


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return (
        [part for item in decoder["decoders"] for part in _decoder_parts(item)] if "decoders" in decoder else [decoder]
    )


def _strips_start(part: dict[str, Any]) -> bool:
    if part["type"] == "Strip":
        return bool(part.get("start")) and part.get("content") == " "
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
