"""What happens to one request, as values: what an executor says, and what the caller is told.

Log-probabilities are passed through unread, so they are opaque here.
"""

from dataclasses import dataclass
from typing import Any, Literal

from services.router.validate import Sampling

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an executor is asked to run. `sampling.max_tokens` is set."""

    request_id: str
    ticket: bytes
    revision_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOrder:
    """What an executor is asked to score."""

    request_id: str
    ticket: bytes
    revision_id: str
    prompt_token_ids: tuple[int, ...]
    continuation_token_ids: tuple[int, ...]
    top_logprobs: int
    # Compute it a second way as well.
    reference: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorStarted:
    """The request is in a batch. Times in milliseconds; `cached_tokens` of the prompt were there."""

    revision_id: str
    base_id: str
    load_ms: float
    queue_ms: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorTokens:
    """New tokens of answer `index`; `logprobs` has one entry per token or is empty."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...] = ()
    kernel_path: str = ""
    max_batch_adapter_count: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorFinished:
    """Answer `index` has ended."""

    index: int
    reason: Reason
    usage: Usage
    kernel_path: str
    max_batch_adapter_count: int
    stop_token_id: int | None = None


ExecutorEvent = ExecutorStarted | ExecutorTokens | ExecutorFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Sent once, before the first token: what makes the tokens that follow. Times in milliseconds."""

    revision_id: str
    base_id: str
    executor: str
    queue_ms: float
    load_ms: float
    prompt_token_ids: tuple[int, ...]
    version: int
    rollout_arm: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of answer `index`, and the text that became certain."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Answer `index` has ended."""

    index: int
    reason: Reason
    usage: Usage
    kernel_path: str
    max_batch_adapter_count: int
    stop_match: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorScored:
    """A whole score; `logprobs` has one entry per continuation token."""

    logprobs: tuple[Any, ...]
    revision_id: str
    base_id: str
    load_ms: float
    kernel_path: str
    usage: Usage
    # The log-probabilities of the continuation alone, and those of the second way if that was asked for.
    chosen: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A whole score as the caller is told it. Times in milliseconds."""

    logprobs: tuple[Any, ...]
    revision_id: str
    base_id: str
    executor: str
    queue_ms: float
    load_ms: float
    version: int
    kernel_path: str
    usage: Usage


Event = Started | Tokens | Finished
