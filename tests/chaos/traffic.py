"""Mixed traffic with an oracle: every answer's revision and tokens are known beforehand, every end is counted once."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from loraport import Client, LoraportError
from loraport.values import Finished, Started, Tokens

PROMPTS = ("a b", "line 3 of", "words, and", "the end")
LONGEST = 32
TIMEOUT_S, PATIENCE_S = 120.0, 90.0


@dataclass(frozen=True, slots=True)
class Target:
    """An adapter of a tenant, and what may answer for it: more than one revision while its alias moves."""

    tenant: str
    adapter: str
    revisions: tuple[str, ...]


@dataclass(slots=True)
class Counts:
    """What became of the requests."""

    begun: int = 0
    answered: int = 0
    cancelled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    broken_off: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    # Neither answered nor ended by a typed error within the timeout, or ended more than once.
    not_ended: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Requests that ended, however."""
        return self.answered + self.cancelled + self.refused.total() + self.broken_off.total()


class Oracle:
    """Revision and prompt → the greedy answer, learnt while nothing disturbs."""

    def __init__(self, data: Path, targets: tuple[Target, ...]) -> None:
        self.targets = targets
        self._tokens: dict[tuple[str, str], tuple[int, ...]] = {}
        for target in targets:
            with Client.local(data, tenant=target.tenant, timeout=TIMEOUT_S) as client:
                for revision in target.revisions:
                    for prompt in PROMPTS:
                        done = client.generate(
                            prompt, revision_id=revision, max_tokens=LONGEST, temperature=0.0, ignore_eos=True
                        )
                        self._tokens[revision, prompt] = tuple(done.token_ids)

    def fault(self, target: Target, prompt: str, revision: str, tokens: list[int]) -> str:
        """Returns what is wrong with an answer, or with the beginning of one; empty when nothing is."""
        if revision not in target.revisions:
            return f"{target.adapter} was answered by {revision}"
        expected = self._tokens[revision, prompt][: len(tokens)]
        if tuple(tokens) != expected:
            return f"{target.adapter} ({revision[:15]}) answered {prompt!r} with {tokens}, not {list(expected)}"
        return ""


class Traffic:
    """Threads that ask until they are stopped."""

    def __init__(self, data: Path, oracle: Oracle, *, threads: int, pause_s: float, seed: int) -> None:
        self.counts = Counts()
        self._data = data
        self._oracle = oracle
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),)) for number in range(threads)
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + PATIENCE_S)

    def _run(self, chance: random.Random) -> None:
        tenants = {target.tenant for target in self._oracle.targets}
        clients = {
            tenant: Client.local(self._data, tenant=tenant, timeout=TIMEOUT_S, patience=PATIENCE_S)
            for tenant in sorted(tenants)
        }
        while not self._stopping.wait(self._pause_s):
            target = chance.choice(self._oracle.targets)
            self._one(clients[target.tenant], target, chance)
        for client in clients.values():
            client.close()

    def _one(self, client: Client, target: Target, chance: random.Random) -> None:
        prompt, length = chance.choice(PROMPTS), chance.choice((4, 8, LONGEST))
        leaves_after = chance.randrange(1, 4) if chance.random() < 0.15 else 0
        with self._lock:
            self.counts.begun += 1
        revision, tokens, ends = "", list[int](), 0
        try:
            events = client.stream(prompt, adapter=target.adapter, max_tokens=length, temperature=0.0, ignore_eos=True)
            for number, event in enumerate(events):
                if isinstance(event, Started):
                    revision = event.revision_id
                elif isinstance(event, Tokens):
                    tokens += event.token_ids
                elif isinstance(event, Finished):
                    ends += 1
                if leaves_after and number >= leaves_after:
                    break
        except LoraportError as error:
            self._failed(error, target, prompt, revision, tokens)
            return
        except Exception as error:  # Anything else is a fault of the client; a thread that dies of it says nothing.
            with self._lock:
                self.counts.wrong.append(f"the client raised {error!r}")
                self.counts.refused[type(error).__name__] += 1
            return
        fault = self._oracle.fault(target, prompt, revision, tokens)
        whole = not leaves_after
        if not fault and whole and (ends != 1 or len(tokens) != length):
            fault = f"{len(tokens)} tokens of {length}, {ends} ends"
        with self._lock:
            if fault:
                self.counts.wrong.append(fault)
            if whole:
                self.counts.answered += 1
            else:
                self.counts.cancelled += 1

    def _failed(self, error: LoraportError, target: Target, prompt: str, revision: str, tokens: list[int]) -> None:
        with self._lock:
            if error.reason in ("TIMEOUT", "DEADLINE_EXCEEDED"):
                self.counts.not_ended.append(str(error))
            (self.counts.broken_off if revision else self.counts.refused)[error.reason] += 1
            # What was told before the failure must have been right all the same.
            if revision and (fault := self._oracle.fault(target, prompt, revision, tokens)):
                self.counts.wrong.append(fault)
