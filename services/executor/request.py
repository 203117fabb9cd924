"""The life of one sequence, as a table, and the values that describe it.

A request is WAITING until the scheduler gives it a row and blocks (PREFILL while tokens of its own are still
uncomputed, DECODE after). Preemption sends it back to WAITING without its blocks but with its tokens. It ends
exactly once, from any state, with one typed reason. A pair that the table lacks is a bug and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from services.shared.sampling import MAX_BIAS, MAX_BIASES, RANGES


class State(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Move(StrEnum):
    ADMIT = "admit"
    PREFILLED = "prefilled"
    PREEMPT = "preempt"
    END = "end"


TRANSITIONS: Mapping[State, Mapping[Move, State]] = MappingProxyType(
    {
        State.WAITING: MappingProxyType({Move.ADMIT: State.PREFILL, Move.END: State.ENDED}),
        State.PREFILL: MappingProxyType(
            {Move.PREFILLED: State.DECODE, Move.PREEMPT: State.WAITING, Move.END: State.ENDED}
        ),
        State.DECODE: MappingProxyType({Move.PREEMPT: State.WAITING, Move.END: State.ENDED}),
        State.ENDED: MappingProxyType({}),
    }
)


class FinishReason(StrEnum):
    """Why a request ended. The first four are answers; the others are failures or withdrawals."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"  # noqa: S105 - a finish reason, no secret
    LENGTH = "length"
    SCORED = "scored"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REVOKED = "revoked"
    DRAINING = "draining"
    NON_FINITE_LOGITS = "non_finite_logits"
    ENGINE_FAULT = "engine_fault"

    @property
    def is_answer(self) -> bool:
        return self in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH, FinishReason.SCORED)


class RefusalReason(StrEnum):
    """Why a request or a load was not accepted at all."""

    EMPTY_PROMPT = "EMPTY_PROMPT"
    BAD_TOKEN = "BAD_TOKEN"  # noqa: S105 - a token of text
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MAX_TOKENS_TOO_LARGE = "MAX_TOKENS_TOO_LARGE"
    BAD_SAMPLING = "BAD_SAMPLING"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    QUEUE_FULL = "QUEUE_FULL"
    DRAINING = "DRAINING"
    NOT_RESIDENT = "NOT_RESIDENT"
    ADAPTER_TOO_LARGE = "ADAPTER_TOO_LARGE"
    ADAPTER_UNSUPPORTED = "ADAPTER_UNSUPPORTED"
    ADAPTER_NOT_FINITE = "ADAPTER_NOT_FINITE"
    ADAPTER_POOL_FULL = "ADAPTER_POOL_FULL"
    BYTES_DIGEST_MISMATCH = "BYTES_DIGEST_MISMATCH"
    BYTES_MALFORMED = "BYTES_MALFORMED"
    REVOKED = "REVOKED"
    MERGED_MODE = "MERGED_MODE"
    SHARED_EXECUTOR = "SHARED_EXECUTOR"


class Refused(Exception):
    """The engine did not take something; `reason` is typed and stable, `detail` is for people."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class IllegalMove(Exception):
    """A life-cycle move that the table lacks: a bug in the engine."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    `temperature` 0 is greedy. `top_p` in (0, 1]; `top_k` 0 means all; `min_p` in [0, 1]. `repetition_penalty` > 0
    divides or multiplies logits of prompt and output tokens; `presence_penalty` and `frequency_penalty` in
    [-2, 2] subtract from logits of output tokens. `seed` fixes the draw: the same seed, prompt and revision give the
    same tokens whatever else is in the batch. `min_tokens` keeps every stopping token out until so many were
    made. `logprobs` None gives none; K gives the chosen token's and the K best of the raw distribution.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Greedy over the raw logits: nothing but an argmax is needed (min_tokens is the caller's check)."""
        return self.temperature == 0.0 and not self.has_penalties and not self.logit_bias and self.logprobs is None

    def check(self, *, vocab_size: int) -> None:
        """Raises Refused(BAD_SAMPLING) naming the first field out of range."""
        ranges = [
            (value not in allowed, f"{name} is {allowed}")
            for name, allowed in RANGES.items()
            if name != "n" and (value := getattr(self, name)) is not None
        ]
        known = range(vocab_size)
        problems = (
            *ranges,
            (self.max_tokens < 1, "max_tokens is at least 1"),
            (not 0 <= self.min_tokens <= self.max_tokens, "min_tokens is in [0, max_tokens]"),
            (len(self.logit_bias) > MAX_BIASES, f"logit_bias has at most {MAX_BIASES} entries"),
            (any(token not in known for token, _ in self.logit_bias), "logit_bias names known tokens"),
            (
                not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias),
                f"logit_bias is in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
            ),
            (any(token not in known for token in self.stop_token_ids), "stop_token_ids names known tokens"),
        )
        for wrong, detail in problems:
            if wrong:
                raise Refused(RefusalReason.BAD_SAMPLING, detail)


@dataclass(frozen=True, slots=True)
class Score:
    """Asks how likely `targets` are after the prompt, and for the `top` likeliest tokens at each of them.

    Nothing is sampled: the request computes the prompt and all targets but the last, in chunks like any prompt.
    """

    targets: tuple[int, ...]
    top: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What one sequence asks for. `deadline` is on the engine's clock, in seconds; a larger `priority` goes
    first among the requests of one `tenant`. Blocks of keys and values are shared within one `salt`, which is the
    tenant's unless `owner` is.

    With `score`, given tokens are scored instead of new ones made; of `sampling` nothing counts then.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    revision_id: str | None = None
    salt: bytes = b""
    owner: bytes = b""
    priority: int = 0
    deadline: float | None = None
    score: Score | None = None

    @property
    def tenant(self) -> bytes:
        """Whose request it is, where tenants share what there is."""
        return self.owner or self.salt

    @property
    def given(self) -> tuple[int, ...]:
        """The tokens to compute before anything is sampled: the prompt, and all but the last of those to be scored."""
        return self.prompt if self.score is None else self.prompt + self.score.targets[:-1]


@dataclass(slots=True)
class Request:
    """The scheduler's record of one sequence. Only the scheduler writes it.

    `given` is the spec's, kept; `scored` counts the targets whose log-probabilities were told. `computed` is the
    number of leading tokens whose keys and values are in `blocks`: the half-open range [0, computed). `chain` caches
    the names of the leading full blocks of known tokens; the first `published` of them were offered to the prefix
    cache.
    """

    spec: RequestSpec
    sequence: int
    arrival: float
    state: State = State.WAITING
    given: tuple[int, ...] = field(init=False)
    output: list[int] = field(default_factory=list)
    scored: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    admitted_at: float | None = None
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    kernel_path: str = ""
    distinct_adapters: int = 0
    batch_rows: int = 0
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = self.spec.given

    def move(self, move: Move, *, cause: str) -> None:
        """Raises IllegalMove, with the request's story, when the table has no such move."""
        after = TRANSITIONS[self.state].get(move)
        if after is None:
            raise IllegalMove(f"{self.spec.request_id}: {move} in {self.state}; story: {'; '.join(self.story)}")
        if len(self.story) < 64:
            self.story.append(f"{self.state}->{after} ({cause})")
        self.state = after

    @property
    def length(self) -> int:
        """Tokens known so far, given and made."""
        return len(self.given) + len(self.output)

    @property
    def usage(self) -> Usage:
        """What it has used so far."""
        return Usage(
            prompt_tokens=len(self.spec.prompt),
            output_tokens=len(self.output),
            prefix_hit_tokens=self.prefix_hit_tokens,
            preemptions=self.preemptions,
        )

    @property
    def pending(self) -> int:
        """Known tokens whose keys and values are not computed yet; 1 in steady decoding."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens at positions [start, end)."""
        prompt = self.given
        split = len(prompt)
        if end <= split:
            return prompt[start:end]
        if start >= split:
            return tuple(self.output[start - split : end - split])
        return prompt[start:] + tuple(self.output[: end - split])

    @property
    def skippable(self) -> int:
        """Leading tokens that need not be computed again when their keys and values are at hand.

        The last known token always is: what comes next is read off it. So are positions that still give a score.
        """
        if self.spec.score is None:
            return self.length - 1
        return len(self.spec.prompt) - 1 + self.scored

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens that positions [start, end) are to score and have not scored yet."""
        score, before = self.spec.score, len(self.spec.prompt) - 1
        if score is None:
            return ()
        return score.targets[max(start - before, self.scored) : max(end - before, 0)]


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order in which they are served: first come first served.

    Priority orders the requests of one tenant among the places that the tenant has in that order, and never
    takes a place of another tenant's.
    """
    arrived = sorted(requests, key=lambda request: request.sequence)
    if all(request.spec.priority == 0 for request in arrived):
        return arrived
    ranked: dict[bytes, deque[Request]] = {}
    for request in sorted(arrived, key=lambda request: -request.spec.priority):
        ranked.setdefault(request.spec.tenant, deque()).append(request)
    return [ranked[request.spec.tenant].popleft() for request in arrived]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of one ended request. The token that stopped it is not counted."""

    prompt_tokens: int
    output_tokens: int
    prefix_hit_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Natural log of the raw model distribution: the chosen token's, and the best (token, value) pairs, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request got its first row. Sent once, before any tokens."""

    request_id: str
    queue_s: float
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens, in order; `logprobs` is parallel to them or empty. A token that stops the answer is never among them.
    Of a request with `score` they are its targets.

    `kernel_path` computed the adapter's part, "base" where there was none; `distinct_adapters` is the most that shared
    a step with the request so far, its own included.
    """

    request_id: str
    token_ids: tuple[int, ...]
    kernel_path: str
    distinct_adapters: int
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event of a request. `stop_token_id` is the token that stopped it, which is not among its tokens.
    `batch_rows` is the most rows that shared a step with it, its own included."""

    request_id: str
    reason: FinishReason
    usage: Usage
    kernel_path: str
    distinct_adapters: int
    batch_rows: int = 0
    stop_token_id: int | None = None


Event = Started | Tokens | Ended
