"""The ranges of sampling parameters, one table for the users' door and for the engine.

They are those that protos/loraport/types/v1/types.proto states. The router lists every fault to the user; the executor
checks again what reaches it, since it believes no peer's arithmetic.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

MAX_ANSWERS = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIASES = 300
MAX_BIAS = 100.0
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers; its lower end belongs to it only where `closed`, its upper end always."""

    low: float
    high: float
    closed: bool = True

    def __contains__(self, value: float) -> bool:
        # Written so that NaN is never within.
        return (self.low <= value if self.closed else self.low < value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"in {'[' if self.closed else '('}{self.low:g}, {self.high:g}]"


RANGES = MappingProxyType(
    {
        "temperature": Range(0, 100),
        "top_p": Range(0, 1, closed=False),
        "top_k": Range(0, math.inf),
        "min_p": Range(0, 1),
        "repetition_penalty": Range(0, 100, closed=False),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "seed": Range(0, math.inf),
        "n": Range(1, MAX_ANSWERS),
        "logprobs": Range(0, MAX_LOGPROBS),
    }
)
