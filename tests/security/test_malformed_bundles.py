"""Every malformed bundle of the corpus is refused for its own fault, by name, in little memory, and nothing of it runs."""

import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraport.bundle.bundle_dir import verify_dir
from loraport.bundle.codes import VIOLATIONS
from tests.bundle_files import codes, config, encode, small_base, verify
from tests.security.corpus import Case, Kit, corpus
from tests.security.corpus_files import MARKER

MEMORY = 64 * 2**20
BASE = small_base()
CASES = corpus(BASE)


@pytest.fixture(scope="module")
def slowest() -> Iterator[dict[str, float]]:
    """Seconds of processor time by case; the slowest is told at the end. Never a reason to fail: machines differ."""
    spent: dict[str, float] = {}
    yield spent
    name = max(spent, key=lambda case: spent[case], default="")
    if name:
        print(
            f"\n{len(spent)} malformed bundles refused; the slowest, {name!r}, took {spent[name] * 1000:.0f} ms of a processor"
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for a bundle; the working directory is empty as well."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "bundle").mkdir()
    return tmp_path / "bundle"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case: Case, folder: Path, slowest: dict[str, float]) -> None:
    case.write(folder)
    modules = set(sys.modules)
    started = time.thread_time()
    verdict = verify_dir(folder, base=BASE, tenant="acme")
    slowest[case.name] = time.thread_time() - started
    assert codes(verdict) == case.codes, verdict.violations
    named = [found for found in verdict.violations if case.offender in found.detail or case.offender in found.subject]
    assert named, verdict.violations
    assert all(len(found.detail) < 2000 and "\n" not in found.detail for found in verdict.violations)
    # Nothing was imported and nothing was unpickled on the word of the bundle.
    assert not [name for name in set(sys.modules) - modules if not name.startswith("numpy")]
    assert not Path(MARKER).exists()


def test_each_takes_little_memory(folder: Path) -> None:
    peaks = {}
    for number, case in enumerate(CASES):
        place = folder / str(number)
        place.mkdir()
        case.write(place)
        tracemalloc.start()
        verify_dir(place, base=BASE, tenant="acme")
        peaks[case.name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    name = max(peaks, key=lambda case: peaks[case])
    print(f"\nthe hungriest, {name!r}, took {peaks[name] / 2**20:.1f} MiB")
    assert peaks[name] < MEMORY


def test_the_corpus_is_large_and_of_every_kind() -> None:
    assert len(CASES) >= 120
    kinds = {case.source for case in CASES}
    assert {"A1", "A2", "A3", "B1", "B2", "B6", "B8", "B9", "G1", "G3", "H1", "H2", "H3", "H5", "§10"} <= kinds
    asked = set().union(*(case.codes for case in CASES))
    # What needs other limits or another base is in tests/unit/bundle.
    assert VIOLATIONS.keys() - asked == {"UNSUPPORTED_MODULE", "UNSUPPORTED_TIED_HEAD", "VALUE_OVERFLOW"}


def test_the_adapter_that_all_of_them_spoil_is_admitted() -> None:
    """Otherwise a refusal would prove nothing."""
    kit = Kit(BASE)
    verdict = verify(kit.good_config, kit.good_weights, base=BASE)
    assert codes(verdict) == set()
    assert len(verdict.modules) == 4
    assert kit.good_config == encode(config())
