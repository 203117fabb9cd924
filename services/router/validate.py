"""What a request may ask for: every fault is found and named, before anything is queued."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from services.shared.errors import FaultList, LoraportError
from services.shared.sampling import (
    DEFAULT_MAX_TOKENS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    RANGES,
)

MAX_TURNS = 1024
MAX_TEXT_BYTES = 1 << 20
MAX_SESSION_CHARS = 128
# Tokens and alternatives in the answer to one Score: what a message of 4 MiB surely holds.
MAX_SCORE_ENTRIES = 131_072
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input in one of its forms; the others are None. All None: none was given."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; None stands for the default that protos/loraport/types/v1/types.proto states."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def answers(self) -> int:
        """Number of answers."""
        return 1 if self.n is None else self.n


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request on one base model. `context_tokens` are for prompt and answer together."""

    vocab_size: int
    context_tokens: int
    max_prompt_tokens: int
    max_tokens: int


def check_request(
    prompt: Prompt,
    sampling: Sampling,
    *,
    session_id: str,
    priority: int,
    first_token_timeout_s: float | None,
    limits: RequestLimits,
) -> None:
    """Checks everything that can be said before the prompt is tokenized.

    Raises:
        LoraportError: INVALID_REQUEST with every fault.
    """
    faults = FaultList()
    check_prompt(prompt, faults, vocab_size=limits.vocab_size)
    check_sampling(sampling, faults, limits=limits)
    faults.require(len(session_id) <= MAX_SESSION_CHARS, "session_id", f"has more than {MAX_SESSION_CHARS} characters")
    faults.require(-10 <= priority <= 10, "priority", f"must be in [-10, 10], not {priority}")
    if first_token_timeout_s is not None:
        faults.require(first_token_timeout_s > 0, "first_token_timeout", "must be above 0")
    faults.raise_if_any()


def check_score(
    prompt: tuple[int, ...], continuation: tuple[int, ...], *, top_logprobs: int, limits: RequestLimits
) -> None:
    """Checks a question for log-probabilities.

    Raises:
        LoraportError: INVALID_REQUEST with every fault; PROMPT_TOO_LONG.
    """
    faults = FaultList()
    for name, ids in (("prompt_token_ids", prompt), ("continuation_token_ids", continuation)):
        faults.require(bool(ids), name, "is empty")
        _check_ids(ids, name, faults, limits.vocab_size)
    if faults.require(top_logprobs in RANGES["logprobs"], "top_logprobs", f"must be {RANGES['logprobs']}"):
        entries = len(continuation) * (1 + top_logprobs)
        faults.require(
            entries <= MAX_SCORE_ENTRIES,
            "top_logprobs",
            f"{len(continuation)} tokens with {top_logprobs} alternatives each are {entries} entries, "
            f"at most {MAX_SCORE_ENTRIES} are answered",
        )
    faults.raise_if_any()
    longest = min(limits.max_prompt_tokens, limits.context_tokens)
    if len(prompt) + len(continuation) > longest:
        raise LoraportError(
            "PROMPT_TOO_LONG",
            f"prompt and continuation have {len(prompt) + len(continuation)} tokens, at most {longest} fit",
            subject="continuation_token_ids",
            metadata={"prompt_tokens": str(len(prompt) + len(continuation)), "limit": str(longest)},
        )


def check_prompt(prompt: Prompt, faults: FaultList, *, vocab_size: int) -> None:
    """Notes what is wrong with the input."""
    if prompt.text is not None:
        faults.require(bool(prompt.text), "prompt", "is empty")
    elif prompt.messages is not None:
        _check_messages(prompt.messages, faults)
    elif prompt.token_ids is not None:
        faults.require(bool(prompt.token_ids), "prompt_token_ids", "is empty")
        _check_ids(prompt.token_ids, "prompt_token_ids", faults, vocab_size)
    else:
        faults.add("input", "one of prompt, messages and prompt_token_ids must be set")


def _check_messages(messages: tuple[Message, ...], faults: FaultList) -> None:
    if not faults.require(1 <= len(messages) <= MAX_TURNS, "messages", f"must have 1 to {MAX_TURNS} turns"):
        return
    for index, message in enumerate(messages):
        known = message.role in ROLES
        faults.require(known, f"messages[{index}].role", f"must be one of {', '.join(ROLES)}, not {message.role!r:.40}")
    total = sum(len(message.content.encode()) for message in messages)
    faults.require(total <= MAX_TEXT_BYTES, "messages", f"hold {total} bytes, the limit is {MAX_TEXT_BYTES}")
    faults.require(any(message.content for message in messages), "messages", "have no content")


def check_sampling(sampling: Sampling, faults: FaultList, *, limits: RequestLimits) -> None:
    """Notes what is wrong with the sampling parameters."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and value not in allowed:
            faults.add(f"sampling.{name}", f"must be {allowed}, not {value}")
    most = limits.max_tokens
    if sampling.max_tokens is not None:
        faults.require(
            1 <= sampling.max_tokens <= most,
            "sampling.max_tokens",
            f"must be in [1, {most}], not {sampling.max_tokens}",
        )
    if sampling.min_tokens is not None:
        # Without max_tokens, the default applies, and what the context leaves may be even less.
        ceiling = sampling.max_tokens if sampling.max_tokens is not None else min(DEFAULT_MAX_TOKENS, most)
        faults.require(
            0 <= sampling.min_tokens <= ceiling,
            "sampling.min_tokens",
            f"must be in [0, max_tokens], here [0, {ceiling}], not {sampling.min_tokens}",
        )
    _check_stops(sampling, faults, limits.vocab_size)
    _check_bias(sampling.logit_bias, faults, limits.vocab_size)


def _check_stops(sampling: Sampling, faults: FaultList, vocab_size: int) -> None:
    faults.require(len(sampling.stop) <= MAX_STOPS, "sampling.stop", f"has more than {MAX_STOPS} entries")
    for index, text in enumerate(sampling.stop[:MAX_STOPS]):
        subject = f"sampling.stop[{index}]"
        faults.require(1 <= len(text) <= MAX_STOP_CHARS, subject, f"must have 1 to {MAX_STOP_CHARS} characters")
    ids = sampling.stop_token_ids
    faults.require(len(ids) <= MAX_STOP_IDS, "sampling.stop_token_ids", f"has more than {MAX_STOP_IDS} entries")
    _check_ids(ids, "sampling.stop_token_ids", faults, vocab_size)


def _check_bias(bias: Mapping[int, float], faults: FaultList, vocab_size: int) -> None:
    faults.require(len(bias) <= MAX_BIASES, "sampling.logit_bias", f"has more than {MAX_BIASES} entries")
    _check_ids(tuple(bias), "sampling.logit_bias", faults, vocab_size)
    for token, value in bias.items():
        if not -MAX_BIAS <= value <= MAX_BIAS:
            faults.add(f"sampling.logit_bias[{token}]", f"must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], not {value}")
            return  # one is enough to show what is wrong with them


def _check_ids(ids: tuple[int, ...], subject: str, faults: FaultList, vocab_size: int) -> None:
    """Notes the first bad id; a list of them all would be as long as the prompt."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return  # a loop takes twice as long, and prompts are long
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            faults.add(f"{subject}[{index}]", f"token id {token} is not in [0, {vocab_size})")
            return


def fit_context(sampling: Sampling, prompt_tokens: int, *, limits: RequestLimits) -> Sampling:
    """Returns the sampling parameters with `max_tokens` set, once the prompt's length is known.

    Raises:
        LoraportError: PROMPT_TOO_LONG when the prompt leaves no room, or less than `max_tokens` asks for;
            INVALID_REQUEST when the prompt has no token.
    """
    if prompt_tokens < 1:
        raise LoraportError("INVALID_REQUEST", "the prompt has no token", subject="prompt")
    room = limits.context_tokens - prompt_tokens
    longest = min(limits.max_prompt_tokens, limits.context_tokens - 1)
    if prompt_tokens > longest:
        raise LoraportError(
            "PROMPT_TOO_LONG",
            f"the prompt has {prompt_tokens} tokens, at most {longest} fit",
            subject="prompt",
            metadata={"prompt_tokens": str(prompt_tokens), "limit": str(longest)},
        )
    if sampling.max_tokens is None:
        fitted = replace(sampling, max_tokens=min(DEFAULT_MAX_TOKENS, limits.max_tokens, room))
    elif sampling.max_tokens > room:
        raise LoraportError(
            "PROMPT_TOO_LONG",
            f"the prompt has {prompt_tokens} tokens and leaves {room} of the {sampling.max_tokens} asked for",
            subject="sampling.max_tokens",
            metadata={"prompt_tokens": str(prompt_tokens), "limit": str(room)},
        )
    else:
        fitted = sampling
    if (fitted.min_tokens or 0) > (fitted.max_tokens or 0):
        raise LoraportError(
            "PROMPT_TOO_LONG",
            f"the prompt leaves {room} tokens, min_tokens asks for {fitted.min_tokens}",
            subject="sampling.min_tokens",
        )
    return fitted
