"""An audit finds whatever was done to a copy, and says at which row."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loraport.log import merkle
from loraport.log.audit import audit, contradiction, first_difference
from loraport.log.checkpoint import Checkpoint, Floor
from loraport.log.copy import CopyError, read_checkpoint, read_floor, read_leaves, write_copy, write_floor
from loraport.log.leaf import FIRST, Kind, Leaf, LeafError, parse_leaf
from loraport.log.restrictions import Listed


def chain(count: int, *, start: int = 0, previous: str = FIRST, resource: str = "tenants/acme") -> list[bytes]:
    rows = []
    for index in range(start, start + count):
        leaf = Leaf(
            index=index,
            time=1_800_000_000 + index,
            kind=Kind.RECORD,
            resource=f"{resource}/{index}",
            digest="sha256:" + "1" * 64,
            previous=previous,
        )
        rows.append(leaf.body())
        previous = merkle.leaf_hash(rows[-1]).hex()
    return rows


def signed(rows: list[bytes]) -> Checkpoint:
    root = merkle.root(map(merkle.leaf_hash, rows)).hex()
    listed = reduce(Listed.grown, rows, Listed())
    return Checkpoint(
        tree_size=len(rows), root_hash=root, catalog_epoch=1, revocation_epoch=0, restriction_count=listed.count,
        restriction_head=listed.head.hex(), issued=1, expires=601,
    )  # fmt: skip


ROWS = chain(20)
SIGNED = signed(ROWS)


def edited(row: bytes) -> bytes:
    return replace(parse_leaf(row), digest="sha256:" + "2" * 64).body()


def test_the_log_itself_is_good() -> None:
    found = audit(ROWS, SIGNED)
    assert found.good
    assert (found.row_count, found.root_hash) == (20, SIGNED.root_hash)
    assert audit([], signed([])).good
    assert audit(chain(25), SIGNED).good, "rows that came after the checkpoint"
    assert audit([*ROWS, b"?"], SIGNED).good, "rows that came after the checkpoint"


def swap(rows: list[bytes], i: int, j: int) -> list[bytes]:
    rows = list(rows)
    rows[i], rows[j] = rows[j], rows[i]
    return rows


@pytest.mark.parametrize("index", [0, 1, 10, 18, 19])
@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("EDITED", lambda i: [*ROWS[:i], edited(ROWS[i]), *ROWS[i + 1 :]]),
        ("EDITED", lambda i: [*ROWS[:i], ROWS[i].replace(b"RECORD", b"RECORD "), *ROWS[i + 1 :]]),
        ("EDITED", lambda i: [*ROWS[:i], ROWS[i] + b" ", *ROWS[i + 1 :]]),
        ("EDITED", lambda i: [*ROWS[:i], b"", *ROWS[i + 1 :]]),
        ("DROPPED", lambda i: [*ROWS[:i], *ROWS[i + 1 :]]),
        ("DROPPED", lambda i: ROWS[:i]),
        ("REORDERED", lambda i: swap(ROWS, i, 19) if i < 19 else [*ROWS[:19], ROWS[18]]),
        ("REORDERED", lambda i: [*ROWS[: i + 1], ROWS[i], *ROWS[i + 1 :]]),
        ("REWRITTEN", lambda i: _rewritten(i)),
    ],
)
def test_the_first_row_that_was_touched_is_named(code: str, change: Callable[[int], list[bytes]], index: int) -> None:
    rows = change(index)
    found = audit(rows, SIGNED).finding
    assert found is not None or len(rows) > 20
    if found is None:
        return  # a copy of the last row behind the end is beyond what was signed
    if found.code == "REWRITTEN":
        # Offline nothing says where a consistent history of its own begins; the signed tree does.
        truth = [merkle.leaf_hash(row) for row in ROWS]
        assert first_difference(20, lambda i: truth[i] != merkle.leaf_hash(rows[i])) == index
        assert code == "REWRITTEN" or index == 19
    else:
        assert (found.code, found.index) in {(code, index), (code, index + 1)}
        assert found.index == index or code == "REORDERED"


def _rewritten(index: int) -> list[bytes]:
    first = edited(ROWS[index])
    return [*ROWS[:index], first, *chain(19 - index, start=index + 1, previous=merkle.leaf_hash(first).hex())]


@given(st.integers(0, 2**32))
@example(823)
def test_no_changed_copy_is_ever_good(seed: int) -> None:
    chooser = random.Random(seed)
    rows = list(ROWS)
    match chooser.randrange(4):
        case 0:
            chooser.shuffle(rows)
        case 1:
            del rows[chooser.randrange(20)]
        case 2:
            place = chooser.randrange(20)
            row = bytearray(rows[place])
            row[chooser.randrange(len(row))] ^= 1 << chooser.randrange(8)
            rows[place] = bytes(row)
        case 3:
            rows[chooser.randrange(20)] = rows[chooser.randrange(20)]
    found = audit(rows, SIGNED)
    assert found.good == (rows == ROWS)
    if rows != ROWS:
        first = next((i for i, (a, b) in enumerate(zip(rows, ROWS, strict=False)) if a != b), len(rows))
        assert found.finding is not None
        assert found.finding.index == (first if found.finding.code != "REWRITTEN" else 19)


def test_an_auditor_remembers() -> None:
    floor = Floor().raised(signed(ROWS[:12]))
    assert audit(ROWS, SIGNED, floor=floor).good
    other = [*_rewritten(5)]
    found = audit(other, signed(other), floor=floor).finding
    assert found is not None
    assert (found.code, found.index) == ("REWRITTEN", 11)
    short = signed(ROWS[:11])
    older = contradiction(short, floor)
    assert older is not None
    assert older.code == "ROLLBACK"
    assert audit(ROWS[:11], short, floor=floor, refused=older).finding == older
    split = contradiction(signed(other[:12]), floor)
    assert split is not None
    assert split.code == "SPLIT_VIEW"
    assert contradiction(SIGNED, floor) is None


@pytest.mark.parametrize("change", [b'{"index":0}', b"[]", b"", b"\xff", ROWS[0][:-1], ROWS[0].replace(b"0", b"-1", 1)])
def test_what_is_no_leaf_is_refused(change: bytes) -> None:
    with pytest.raises(LeafError):
        parse_leaf(change)


def test_a_copy_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert write_copy(path, b"envelope", ROWS) == 20
    assert read_checkpoint(path) == b"envelope"
    assert list(read_leaves(path)) == ROWS
    for content in (b"", b"{}\n", b'{"schema":"loraport.log-copy.v1"}\n', ROWS[0]):
        path.write_bytes(content)
        with pytest.raises(CopyError):
            read_checkpoint(path)


def test_an_auditors_memory_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audit.json"
    assert read_floor(path) is None
    write_floor(path, Floor().raised(SIGNED))
    assert read_floor(path) == Floor().raised(SIGNED)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    assert read_floor(path) == Floor().raised(SIGNED), "a later release may have kept more"
    kept = json.loads(path.read_bytes())
    older = {name: value for name, value in kept.items() if not name.startswith("restriction_")}
    path.write_text(json.dumps(older))
    assert read_floor(path) == Floor().raised(SIGNED), "an earlier one did not say what was taken back"
    for changes in ({"tree_size": "x"}, {"tree_size": -1}, {"root_hash": 5}, {"restriction_head": "ab"}):
        path.write_text(json.dumps(kept | changes))
        with pytest.raises(CopyError):
            read_floor(path)
    path.write_text("{}")
    with pytest.raises(CopyError, match="memory"):
        read_floor(path)


def test_a_copy_from_before_checkpoints_said_what_was_taken_back() -> None:
    taken_back = replace(parse_leaf(ROWS[-1]), kind=Kind.REVOKED).body()
    rows = [*ROWS[:-1], taken_back]
    older = replace(signed(rows), restriction_count=0, restriction_head="")
    assert audit(rows, older).good
    assert audit(rows, signed(ROWS)).finding is not None
    [finding] = [audit([*rows[:3], edited(rows[3]), *rows[4:]], older).finding]
    assert finding is not None
    assert (finding.code, finding.index) == ("EDITED", 3)


def test_an_older_checkpoint_is_held_against_what_both_say() -> None:
    floor = Floor().raised(signed(chain(19))).raised(replace(SIGNED, restriction_count=1, restriction_head="ab" * 32))
    older = replace(SIGNED, restriction_count=0, restriction_head="")
    assert contradiction(older, floor) is None
    assert floor.raised(older) == floor, "what it does not say is kept"
    for changes, code in (({"root_hash": "ab" * 32}, "SPLIT_VIEW"), ({"tree_size": 19}, "ROLLBACK")):
        finding = contradiction(replace(older, **changes), floor)  # type: ignore[arg-type]
        assert finding is not None
        assert finding.code == code
