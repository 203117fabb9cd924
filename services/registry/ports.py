"""The outside world of the registry besides SQL and time."""

import secrets
from typing import Protocol


class Randomness(Protocol):
    """Where secrets and ids come from."""

    def text(self, alphabet: str, length: int) -> str:
        """Returns `length` characters, each drawn evenly from `alphabet`."""


class SystemRandomness:
    """The operating system's generator."""

    def text(self, alphabet: str, length: int) -> str:
        return "".join(secrets.choice(alphabet) for _ in range(length))


class EpochListener(Protocol):
    """Who hears of committed changes."""

    def __call__(self, epoch: int) -> None:
        """Called after a commit, from the thread that committed."""
