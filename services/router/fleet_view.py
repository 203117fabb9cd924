"""The fleet at one moment, as placement and the admin plane see it: frozen values only.

What an executor holds comes from its own reports, never from what was sent to it. What was sent to it is shown beside
that, as `expected`: it says where a load is likely under way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.shared.residency import Notice, Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorView:
    """One executor.

    `serving` says whether it may be sent requests, `why_not` why it may not. `in_flight` counts the answers that this
    router awaits there; nothing more is sent once they are `window`. `max_rank` and `max_context` are 0 until the
    executor has reported them.
    """

    name: str
    base_model: str
    serving: bool
    why_not: str
    in_flight: int
    window: int
    resident: Mapping[str, Resident]
    expected: frozenset[str]
    max_rank: int = 0
    max_context: int = 0
    report: Notice | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent to it."""
        return self.serving and self.in_flight < self.window


@dataclass(frozen=True, slots=True)
class FleetView:
    """All executors, in order of name."""

    executors: tuple[ExecutorView, ...]

    def of_base(self, base_model: str) -> tuple[ExecutorView, ...]:
        """Returns the executors of a base model."""
        return tuple(executor for executor in self.executors if executor.base_model == base_model)

    def serves(self, base_model: str) -> bool:
        """Says whether an executor of this base model serves, with room or without."""
        return any(executor.serving for executor in self.of_base(base_model))

    def bases_with_room(self) -> frozenset[str]:
        """Returns the base models that an executor has room for."""
        return frozenset(executor.base_model for executor in self.executors if executor.has_room)

    def context_tokens(self, base_model: str, declared: int) -> int:
        """Returns how many tokens a prompt and its answer may take together on the roomiest executor.

        `declared` is what the model itself allows; executors that did not report count as that.
        """
        reported = [e.max_context or declared for e in self.of_base(base_model) if e.serving]
        return min(declared, max(reported, default=declared))


def newer(known: Notice | None, heard: Notice) -> Notice:
    """Returns the report that counts: the later of one process, or any of a later process. A tie goes to `heard`."""
    return heard if known is None or heard.order >= known.order else known
