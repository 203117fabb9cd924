"""Tables of the documents have the figures of the run that is kept in `bench/results`: they do not part at the next."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/policies.md").read_text()
FIGURES = {item["name"]: item for item in json.loads((ROOT / "bench/results/policies.json").read_text())["figures"]}

EVICTION = {
    "ServeGen, an adapter a tenant": "servegen",
    "ServeGen, several": "servegen-many",
    "Mooncake": "mooncake",
    "Azure lengths": "azure",
    "Zipf 1.0": "zipf-1.0",
    "power 0.3": "power-0.3",
    "geometric 1.5": "geometric-1.5",
    "cyclic K + 1": "cyclic K+1",
    "drift": "drift",
    "library 200 to 20,000": "growing library",
    "rollout": "rollout",
}
ATTACKERS = {
    "64 adapters in turn": "adapter churn",
    "the same, callers leave after 50 ms": "cancellation churn",
    "prompts of 16,000 tokens": "long context",
    "idle, then 400 calls at once": "idle then burst",
    "adapters of rank 128": "rank 128",
    "flood of long answers": "flood",
    "bursts of 60 every five seconds": "synchronized bursts",
    "one adapter more than the pool holds, in turn": "cyclic K+1",
    "library from 200 to 20,000 adapters": "growing library",
    "rollout that doubles the adapters": "rollout doubling",
}


def table(header: str) -> dict[str, list[str]]:
    """Returns the cells of the table whose header begins so, by the first cell of their row."""
    _, _, rest = PAGE.partition(f"\n| {header} |")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in rest.partition("\n\n")[0].splitlines()]
    return {name: cells for name, *cells in rows[2:]}


@pytest.mark.parametrize(("header", "rows"), [("load cost, unit slots, K = 8 / 16", EVICTION), ("attacker", ATTACKERS)])
def test_a_table_has_a_row_for_each_line(header: str, rows: dict[str, str]) -> None:
    assert list(table(header)) == list(rows)


@pytest.mark.parametrize("row", EVICTION)
def test_what_eviction_costs(row: str) -> None:
    lru, optimum = ([FIGURES[f"load cost / {to}, {EVICTION[row]}, K={k}"] for k in (8, 16)] for to in ("LRU", "OPT"))
    pairs = [item["value"] for item in lru], [item["value"] for item in optimum], [item["baseline"] for item in optimum]
    assert table("load cost, unit slots, K = 8 / 16")[row] == [f"{small:.2f} / {large:.2f}" for small, large in pairs]


@pytest.mark.parametrize("row", ATTACKERS)
def test_what_tenants_notice(row: str) -> None:
    found = [FIGURES[f"victim p99 TTFT, {ATTACKERS[row]}, {pool}"]["value"] for pool in ("few", "many")]
    assert table("attacker")[row] == [f"{value:.2f}" for value in found]


def test_the_sentences_below() -> None:
    said = re.search(r"Jain index ([\d.]+), tokens ([\d.]+) of first.*?least share is ([\d.]+) of", PAGE, re.S)
    names = "Jain index, equal tenants", "tokens / first come first served", "least share / fluid max-min"
    assert said is not None
    assert list(said.groups()) == [f"{FIGURES[name]['value']:.2f}" for name in names]
