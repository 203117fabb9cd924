"""Which executor likely still has the keys and values of a prompt's beginning.

A prompt is a chain of block names, each committing to all before it (`services/shared/prefix_hash.py`), so one look-up
per block finds how much of it was sent where before. It is a guess: an executor forgets blocks on its own. When it
begins a request it says how many tokens it has, and that is what the tenant pays for. Where the guess was wrong for a
tenant it is doubted, and counts for nothing but the choice of the executor, until it is right again. What was sent and
never computed is not there.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

# Tokens of a block here; the executors' own blocks are smaller and divide it.
BLOCK_TOKENS = 64
# Longest beginning that is looked at.
MAX_BLOCKS = 512
MAX_KNOWN = 200_000
MAX_SESSIONS = 50_000

Chain = Sequence[Hashable]


class Locality:
    """See the module's text. Bounded: what was used least recently goes first."""

    def __init__(self, *, block_tokens: int = BLOCK_TOKENS, max_known: int = MAX_KNOWN) -> None:
        self.block_tokens = block_tokens
        self._max_known = max_known
        self._holders: OrderedDict[Hashable, set[str]] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        # Tenant → executors where the last guess was wrong.
        self._doubted: dict[str, set[str]] = {}

    def sent(self, executor: str, chain: Chain) -> None:
        """Notes that a prompt was sent to an executor, which then has its blocks."""
        for name in chain:
            self._holders.setdefault(name, set()).add(executor)
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_known:
            self._holders.popitem(last=False)

    def told(self, executor: str, tenant: str, *, guessed: int, had: int) -> None:
        """The executor says how many tokens of a prompt it had, of which so many were expected."""
        if had + self.block_tokens <= guessed:  # an executor may always compute the last tokens itself
            self._doubted.setdefault(tenant, set()).add(executor)
        elif guessed and tenant in self._doubted:
            self._doubted[tenant].discard(executor)

    def doubted(self, tenant: str) -> Collection[str]:
        """Returns the executors where a guess about this tenant's prompts is not to be counted on."""
        return self._doubted.get(tenant, ())

    def unsent(self, executor: str, chain: Chain, *, known: int) -> None:
        """Forgets what was sent beyond the first `known` tokens: the request ended before that was computed."""
        for name in chain[known // self.block_tokens :]:
            holders = self._holders.get(name, set())
            holders.discard(executor)
            if not holders:
                self._holders.pop(name, None)

    def match(self, chain: Chain) -> dict[str, int]:
        """Returns how many tokens of the beginning each executor likely has; executors without any are left out."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for number, name in enumerate(chain, start=1):
            holders = self._holders.get(name)
            alive = holders if alive is None else alive & (holders or set())
            if not alive:
                break
            for executor in alive:
                found[executor] = number * self.block_tokens
        return found

    def lost(self, executor: str) -> None:
        """Forgets everything about an executor whose process is another one now."""
        for name in [name for name, holders in self._holders.items() if executor in holders]:
            holders = self._holders[name]
            holders.discard(executor)
            if not holders:
                del self._holders[name]
        for key in [key for key, name in self._sessions.items() if name == executor]:
            del self._sessions[key]
        for executors in self._doubted.values():
            executors.discard(executor)

    def last(self, tenant: str, revision_id: str, session: str) -> str:
        """Returns where a session was served last, empty when that is not known."""
        return self._sessions.get((tenant, revision_id, session), "") if session else ""

    def served(self, tenant: str, revision_id: str, session: str, executor: str) -> None:
        """Notes where a session is served."""
        if session:
            key = (tenant, revision_id, session)
            self._sessions[key] = executor
            self._sessions.move_to_end(key)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
