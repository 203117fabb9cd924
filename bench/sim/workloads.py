"""Request sequences for the simulator: public traces read by path, synthetic popularity, and the attackers' own.

A trace directory holds the files of `TRACES`; without it the workloads made of them are left out, and said so. Every
sequence is a function of its seed.
"""

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np

SERVEGEN = "servegen_m_large_3days.csv.gz"
MOONCAKE = "mooncake_conversation.jsonl.gz"
AZURE = ("azure_llm_2023_conv.csv.gz", "azure_llm_2023_code.csv.gz")
TRACES = (SERVEGEN, MOONCAKE, *AZURE)

WINDOW_S = 600
HOUR_S = 3600.0
# Ranks as they are published: mostly small, some very large.
RANKS, RANK_SHARES = (8, 16, 32, 64, 128), (0.25, 0.35, 0.2, 0.15, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a workload. `at` in seconds; `prefix` names the prompt's shared blocks, first block first."""

    at: float
    tenant: str
    adapter: str
    rank: int
    prompt: int = 64
    output: int = 32
    prefix: tuple[int, ...] = ()
    # The caller leaves after so many seconds, answered or not; 0 for never.
    leaves_after: float = 0.0
    session: str = ""


def shares(calls: Iterable[Call]) -> tuple[float, float]:
    """Returns the part of all calls that goes to the most popular adapter, and to the ten most popular."""
    counts = sorted(Counter(call.adapter for call in calls).values(), reverse=True)
    return counts[0] / sum(counts), sum(counts[:10]) / sum(counts)


@cache
def rank_of(adapter: str) -> int:
    """Returns the rank that an adapter always has, drawn once by its name."""
    draw = np.random.default_rng(list(adapter.encode())).random()
    return RANKS[int(np.searchsorted(np.cumsum(RANK_SHARES), draw, side="right").clip(0, len(RANKS) - 1))]


# --- public traces


@cache
def _servegen(directory: Path) -> dict[int, list[tuple[int, float, str, float]]]:
    """Returns each client's windows: start, calls per second, shape of the gaps, its parameter."""
    clients: dict[int, list[tuple[int, float, str, float]]] = {}
    with gzip.open(directory / SERVEGEN, "rt") as file:
        for row in csv.DictReader(file):
            window = (int(row["t_s"]), float(row["rate_per_s"]), row["pattern"], float(row["p1"]))
            clients.setdefault(int(row["client"]), []).append(window)
    return clients


def servegen(directory: Path, *, seed: int, rate: float = 3.0, adapters: bool = False) -> list[Call]:
    """Returns one hour of ServeGen's clients as tenants, thinned to `rate` calls per second.

    A tenant has one adapter, or with `adapters` a Zipf number of them, of which it uses some more than others.
    """
    random = np.random.default_rng(seed)
    start = int(random.integers(0, 70)) * int(HOUR_S)
    hour = [
        (client, window)
        for client, windows in _servegen(directory).items()
        for window in windows
        if start <= window[0] < start + HOUR_S and window[1] > 0 and window[3] > 0
    ]
    keep = rate / sum(window[1] * WINDOW_S / HOUR_S for _, window in hour)
    calls = []
    for client, (at, per_s, pattern, shape) in hour:
        times = at - start + np.cumsum(_gaps(random, pattern, shape, per_s))
        times = times[(times < at - start + WINDOW_S) & (random.random(len(times)) < keep)]
        for time in times:
            adapter = f"t{client}/a{_draw(random, _count(client)) if adapters else 0}"
            calls.append(Call(at=float(time), tenant=f"t{client}", adapter=adapter, rank=rank_of(adapter)))
    return sorted(calls, key=lambda call: call.at)


def _gaps(random: np.random.Generator, pattern: str, shape: float, per_s: float) -> np.ndarray:
    count = int(2 * per_s * WINDOW_S) + 20
    gaps = random.weibull(shape, count) if pattern == "Weibull" else random.gamma(shape, 1.0, count)
    return gaps / max(float(gaps.mean()), 1e-12) / per_s


@cache
def _count(client: int) -> int:
    return min(40, int(np.random.default_rng(client).zipf(1.6)))


def _draw(random: np.random.Generator, count: int) -> int:
    weights = 1.0 / np.arange(1, count + 1)
    return int(random.choice(count, p=weights / weights.sum()))


def mooncake(directory: Path, *, seed: int, tenants: int = 12, calls: int = 3000) -> list[Call]:
    """Returns the conversation trace with its shared prefixes; a conversation's first own block says whose it is."""
    random = np.random.default_rng(seed)
    found = []
    with gzip.open(directory / MOONCAKE, "rt") as file:
        for line in file:
            row = json.loads(line)
            owner = row["hash_ids"][1 if len(row["hash_ids"]) > 1 else 0]
            tenant = int(np.random.default_rng([owner, seed]).integers(tenants))
            adapter = f"t{tenant}/a{owner % (1 + tenant % 3)}"
            found.append(
                Call(
                    at=row["timestamp"] / 1000, tenant=f"t{tenant}", adapter=adapter, rank=rank_of(adapter),
                    prompt=row["input_length"], output=row["output_length"], prefix=tuple(row["hash_ids"]),
                    session=str(owner),
                )
            )  # fmt: skip
    first = int(random.integers(0, max(1, len(found) - calls)))
    begin = found[first].at
    return [replace(call, at=call.at - begin) for call in found[first : first + calls]]


@cache
def azure_lengths(directory: Path) -> tuple[tuple[int, int], ...]:
    """Returns prompt and answer lengths, in tokens, of the Azure conversation and code traces."""
    lengths = []
    for name in AZURE:
        with gzip.open(directory / name, "rt") as file:
            for row in csv.DictReader(file):
                lengths.append((int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))))
    return tuple(lengths)


def azure(directory: Path, *, seed: int, tenants: int = 8, calls: int = 3000, rate: float = 6.0) -> list[Call]:
    """Returns calls with the lengths and the gaps of the Azure traces, of a Zipf choice of adapters."""
    random = np.random.default_rng(seed)
    lengths = azure_lengths(directory)
    gaps = _azure_gaps(directory)
    offset = int(random.integers(0, len(gaps) - calls))
    times = np.cumsum(gaps[offset : offset + calls])
    times *= calls / rate / times[-1]
    weights = _zipf(40, 1.0)
    out = []
    for at in times:
        number = int(random.choice(40, p=weights))
        prompt, output = lengths[int(random.integers(len(lengths)))]
        adapter = f"t{number % tenants}/a{number}"
        out.append(
            Call(at=float(at), tenant=f"t{number % tenants}", adapter=adapter, rank=rank_of(adapter),
                 prompt=prompt, output=output)
        )  # fmt: skip
    return out


@cache
def _azure_gaps(directory: Path) -> np.ndarray:
    with gzip.open(directory / AZURE[0], "rt") as file:
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in csv.DictReader(file)]
    return np.diff(np.sort(np.array(times)))


# --- synthetic popularity. A parameter's name is no skew: `shares` says what came out.


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1) ** -exponent
    return weights / weights.sum()


def _geometric(count: int, ratio: float) -> np.ndarray:
    weights = ratio ** -np.arange(count, dtype=float)
    return weights / weights.sum()


def _power(count: int, exponent: float) -> np.ndarray:
    edges = (np.arange(count + 1) / count) ** exponent
    return np.diff(edges)


POPULARITY: dict[str, Callable[[int], np.ndarray]] = {
    "zipf-0.8": lambda count: _zipf(count, 0.8),
    "zipf-1.0": lambda count: _zipf(count, 1.0),
    "zipf-1.2": lambda count: _zipf(count, 1.2),
    "power-0.3": lambda count: _power(count, 0.3),
    "geometric-1.5": lambda count: _geometric(count, 1.5),
}


def synthetic(name: str, *, seed: int, adapters: int = 200, tenants: int = 20, calls: int = 6000) -> list[Call]:
    """Returns Poisson calls, three a second, to adapters of a popularity of `POPULARITY`."""
    random = np.random.default_rng(seed)
    order = random.permutation(adapters)
    picks = order[random.choice(adapters, size=calls, p=POPULARITY[name](adapters))]
    times = np.cumsum(random.exponential(1 / 3, calls))
    return [_call(float(at), int(number), tenants) for at, number in zip(times, picks, strict=True)]


def _call(at: float, number: int, tenants: int) -> Call:
    adapter = f"t{number % tenants}/a{number}"
    return Call(at=at, tenant=f"t{number % tenants}", adapter=adapter, rank=rank_of(adapter))


def cyclic(slots: int, *, seed: int, calls: int = 6000) -> list[Call]:
    """Returns calls to `slots` + 1 adapters in turn: whatever was used least recently is wanted next."""
    first = int(np.random.default_rng(seed).integers(slots + 1))
    numbers = (first + np.arange(calls)) % (slots + 1)
    return [_call(index / 3, int(number), 4) for index, number in enumerate(numbers)]


def drift(*, seed: int, calls: int = 6000) -> list[Call]:
    """Returns Zipf calls whose favourites change every 1,500 calls."""
    parts: list[Call] = []
    for part in range(calls // 1500):
        at = parts[-1].at if parts else 0.0
        new = synthetic("zipf-1.0", seed=seed * 31 + part, calls=1500)
        parts += [replace(call, at=call.at + at) for call in new]
    return parts


def growing(*, seed: int, calls: int = 6000) -> list[Call]:
    """Returns Zipf calls to a library that grows from 200 to 20,000 adapters."""
    random = np.random.default_rng(seed)
    out = []
    for index in range(calls):
        size = int(200 * 100 ** (index / calls))
        number = int(random.zipf(1.2)) % size if random.random() < 0.9 else size - 1 - int(random.integers(20))
        out.append(_call(index / 3, number, 20))
    return out


def rollout(*, seed: int, calls: int = 6000) -> list[Call]:
    """Returns Zipf calls; from the middle on every adapter has a second revision that takes half of them."""
    random = np.random.default_rng(seed)
    out = []
    for index, call in enumerate(synthetic("zipf-1.0", seed=seed, adapters=60, calls=calls)):
        new = calls // 3 <= index < 2 * calls // 3 and random.random() < 0.5
        out.append(replace(call, adapter=call.adapter + "-next") if new else call)
    return out


def residency_workloads(directory: Path | None, *, seed: int, slots: int) -> dict[str, Sequence[Call]]:
    """Returns the sequences that eviction is judged on, by name."""
    found: dict[str, Sequence[Call]] = {}
    if directory is not None:
        found["servegen"] = servegen(directory, seed=seed)
        found["servegen-many"] = servegen(directory, seed=seed, adapters=True)
        found["mooncake"] = mooncake(directory, seed=seed)
        found["azure"] = azure(directory, seed=seed)
    for name in POPULARITY:
        found[name] = synthetic(name, seed=seed)
    found["cyclic K+1"] = cyclic(slots, seed=seed)
    found["drift"] = drift(seed=seed)
    found["growing library"] = growing(seed=seed)
    found["rollout"] = rollout(seed=seed)
    return found


def find_traces(directory: Path | None) -> tuple[Path | None, str]:
    """Returns the directory when it has every trace, else None and why."""
    if directory is None:
        return None, "no trace directory was given (--traces or LORAPORT_TRACES)"
    missing = [name for name in TRACES if not (directory / name).is_file()]
    return (None, f"{directory} lacks {', '.join(missing)}") if missing else (directory, "")
