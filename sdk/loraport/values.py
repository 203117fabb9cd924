"""What the client returns: plain frozen values."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "unknown"]
# Why a router sends an executor nothing that drains by its own word: an operator told it, or its process ends.
DRAINING = "is DRAINING"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that an answer used; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of a position, and the most likely ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First event of a stream: what makes the tokens. Empty `revision_id` and `version`: the base model.

    `request_id` names the call in the services' logs and traces.
    """

    revision_id: str
    version: str
    base_id: str
    executor: str
    queue_ms: float
    load_ms: float
    prompt_token_ids: tuple[int, ...]
    rollout_arm: str
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of answer `index`, and the text that became certain by them."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of answer `index`. `stop_match` is the stop string or token id that ended it, or empty."""

    index: int
    finish_reason: FinishReason
    usage: Usage
    kernel_path: str
    max_batch_adapter_count: int
    stop_match: str


Event = Started | Tokens | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole answer. `logprobs` is empty unless they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[PositionLogprobs, ...]
    kernel_path: str
    max_batch_adapter_count: int
    stop_match: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answers to one prompt and what made them. With n = 1, read the one answer straight from here."""

    revision_id: str
    version: str
    base_id: str
    executor: str
    queue_ms: float
    load_ms: float
    prompt_token_ids: tuple[int, ...]
    rollout_arm: str
    answers: tuple[Answer, ...]
    request_id: str = ""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first answer."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.answers[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens that the first answer used."""
        return self.answers[0].usage

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of the first answer, one entry per token, empty unless they were asked for."""
        return self.answers[0].logprobs

    @property
    def kernel_path(self) -> str:
        """The kernel path that computed the adapter's part of the first answer."""
        return self.answers[0].kernel_path

    @property
    def max_batch_adapter_count(self) -> int:
        """The most distinct adapters that shared a batch with the first answer, its own included."""
        return self.answers[0].max_batch_adapter_count

    @property
    def stop_match(self) -> str:
        """The stop string or token id that ended the first answer, or empty."""
        return self.answers[0].stop_match


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a given continuation is, and what said so. `logprobs` has one entry per token of it."""

    logprobs: tuple[PositionLogprobs, ...]
    revision_id: str
    version: str
    base_id: str
    executor: str
    kernel_path: str
    usage: Usage
    queue_ms: float
    load_ms: float

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum of its tokens'."""
        return sum(position.chosen.logprob for position in self.logprobs)


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """Where an alias points now."""

    alias: str
    revision_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of the caller's tenant. `name` is its resource name, `tenants/{tenant}/adapters/{adapter}`."""

    name: str
    base_model: str
    aliases: tuple[AliasTarget, ...]

    @property
    def adapter(self) -> str:
        """The adapter's id, the last part of its name: what `generate(adapter=…)` takes."""
        return self.name.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The tokens that a prompt takes."""

    token_count: int
    token_ids: tuple[int, ...]
