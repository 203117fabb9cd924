"""Audits a copy of the log that nobody vouches for against the registry's signed checkpoint. Pure.

Every row must be a leaf, stand at its own index and name the hash of the row before it; all rows together must give
the root that was signed. The first row that breaks this is found by one pass:

    DROPPED    the row of this index is not in the copy
    REORDERED  the row of this index stands elsewhere in the copy
    EDITED     the row is not what the log took in
    REWRITTEN  the copy is a history of its own; the index is that of the first row that differs, as far as it is known
    ROLLBACK   the checkpoint itself is older than one that an earlier audit accepted
    SPLIT_VIEW the checkpoint itself tells of another history of the same length
    WITHHELD   the rows are good, and the checkpoint has another list of what they take back than they have (one of an
               earlier release has none, and is not compared)
    CATALOG    the log is good, and the registry shows something else than it says (`loraport.log.replay`)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraport.log import merkle
from loraport.log.checkpoint import Checkpoint, Floor, Judgement, judge
from loraport.log.leaf import FIRST, LeafError, parse_leaf
from loraport.log.restrictions import Listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first fault of a copy: its kind, the row it is about, one sentence."""

    code: str
    index: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What an audit found. `row_count` rows were read, `root_hash` (hex) is that of the first `tree_size` of them."""

    row_count: int
    tree_size: int
    root_hash: str
    finding: Finding | None

    @property
    def good(self) -> bool:
        """True when the copy is the log that was signed."""
        return self.finding is None


def contradiction(checkpoint: Checkpoint, floor: Floor) -> Finding | None:
    """Returns what is wrong with a checkpoint after an audit that accepted `floor`."""
    match judge(checkpoint, floor):
        case Judgement.ROLLBACK:
            detail = f"the checkpoint is older than the one of the last audit, which had {floor.tree_size} rows"
            return Finding(code="ROLLBACK", index=checkpoint.tree_size, detail=detail)
        case Judgement.SPLIT_VIEW:
            detail = "the signed root is not the one of the last audit, for the same number of rows"
            return Finding(code="SPLIT_VIEW", index=checkpoint.tree_size - 1, detail=detail)
        case _:
            return None


def audit(
    rows: Iterable[bytes], checkpoint: Checkpoint, *, floor: Floor | None = None, refused: Finding | None = None
) -> Audit:
    """Audits the rows of a copy. Rows beyond the checkpoint's size are read but prove nothing.

    `floor` is what an earlier audit accepted: rows that gave its root then must give it still. `refused` is what is
    wrong with the checkpoint; it is reported when the rows themselves are without fault.
    """
    roots = _Roots(checkpoint, floor)
    finding: Finding | None = None
    suspects: _Suspects | None = None
    listed = Listed()
    previous, count = FIRST, 0
    for count, body in enumerate(rows, start=1):
        index = count - 1
        if index >= checkpoint.tree_size:
            continue
        if suspects is not None:
            suspects.next(body)
        if finding is None:
            finding, broken_link = _check(body, index=index, previous=previous)
            if finding is None:
                listed = listed.grown(body)
            if broken_link is not None:
                suspects = _Suspects(roots, index, body, named=broken_link, previous=previous)
            hashed = merkle.leaf_hash(body)
            previous = hashed.hex()
            roots.append(hashed)
        elif finding.code == "DROPPED" and _index(body) == finding.index:
            # The row is there after all, later than it should be.
            finding = Finding(code="REORDERED", index=finding.index, detail=f"the row stands at {index}")
    if finding is None:
        finding = roots.finding(count) or _withheld(checkpoint, listed) or refused
    elif suspects is not None:
        finding = suspects.finding(checkpoint.root_hash)
    return Audit(row_count=count, tree_size=checkpoint.tree_size, root_hash=roots.of_checkpoint.hex(), finding=finding)


def first_difference(size: int, differs: Callable[[int], bool]) -> int:
    """Returns the first index of [0, size) at which a rewritten copy differs, by O(log size) questions.

    Each row names the hash of the one before, so once two histories differ they differ for ever.
    """
    low, high = 0, size - 1
    while low < high:
        middle = (low + high) // 2
        if differs(middle):
            high = middle
        else:
            low = middle + 1
    return low


class _Suspects:
    """Decides which of two rows was edited when one does not name the hash of the other.

    Each row's hash is named by the row after it. The signed root says whether all those names are right (then the row
    before was edited), or all but the one in question (then the row with the broken name was).
    """

    def __init__(self, roots: "_Roots", index: int, body: bytes, *, named: str, previous: str) -> None:
        self._index = index
        self._last = body
        # The last row's hash is named by nobody; with the right name put back, the root knows it.
        self._repaired = body.replace(named.encode(), previous.encode())
        # The rows up to the one before `index`: that one by the name it is given, and as it was found.
        self._named, self._found = roots.before.copy(), roots.frontier.copy()
        self._named.append(bytes.fromhex(named))

    def next(self, body: bytes) -> None:
        try:
            name = bytes.fromhex(parse_leaf(body).previous)
        except LeafError:
            name = b""
        self._repaired = body
        self._named.append(name)
        self._found.append(name)
        self._last = body

    def finding(self, signed_root: str) -> Finding:
        index = self._index
        for frontier, edited in ((self._named, index - 1), (self._found, index)):
            frontier.append(merkle.leaf_hash(self._last if edited < index else self._repaired))
            if frontier.root().hex() == signed_root:
                return Finding(code="EDITED", index=edited, detail="the row is not what the log took in")
        detail = f"row {index} was written after another one; one of the two was edited, and others as well"
        return Finding(code="EDITED", index=index - 1, detail=detail)


class _Roots:
    """Compares the copy's roots with those that were signed, where the copy is as long as they say."""

    def __init__(self, checkpoint: Checkpoint, floor: Floor | None) -> None:
        self._checkpoint = checkpoint
        self._floor = floor if floor is not None and 0 < floor.tree_size <= checkpoint.tree_size else None
        self._floor_good = True
        self.frontier = self.before = merkle.Frontier()
        self.of_checkpoint = merkle.EMPTY_ROOT

    def append(self, leaf: bytes) -> None:
        self.before, self.frontier = self.frontier, self.frontier.copy()
        frontier = self.frontier
        frontier.append(leaf)
        if self._floor is not None and frontier.size == self._floor.tree_size:
            self._floor_good = frontier.root().hex() == self._floor.root_hash
        if frontier.size == self._checkpoint.tree_size:
            self.of_checkpoint = frontier.root()

    def finding(self, count: int) -> Finding | None:
        size = self._checkpoint.tree_size
        if count < size:
            return Finding(code="DROPPED", index=count, detail=f"the log has {size} rows, the copy ends after {count}")
        if self._floor is not None and not self._floor_good:
            last = self._floor.tree_size - 1
            detail = f"rows 0 to {last} are not those of the last audit; one of them was rewritten"
            return Finding(code="REWRITTEN", index=last, detail=detail)
        if self.of_checkpoint.hex() != self._checkpoint.root_hash:
            detail = "the rows do not give the signed root: this row was edited, or an earlier one and all after it"
            return Finding(code="REWRITTEN", index=size - 1, detail=detail)
        return None


def _withheld(checkpoint: Checkpoint, found: Listed) -> Finding | None:
    count, head = checkpoint.restriction_count, checkpoint.restriction_head
    if checkpoint.older or (count, head) == (found.count, found.head.hex()):
        return None
    detail = f"the rows take back {found.count} times, the checkpoint names another list, of {count}"
    return Finding(code="WITHHELD", index=checkpoint.tree_size - 1, detail=detail)


def _check(body: bytes, *, index: int, previous: str) -> tuple[Finding | None, str | None]:
    """Returns what is wrong with a row, and the hash that it names when that is not the one of the row before."""
    try:
        leaf = parse_leaf(body)
    except LeafError as error:
        return Finding(code="EDITED", index=index, detail=f"the row is no leaf: {error}"), None
    if leaf.index != index:
        code = "DROPPED" if leaf.index > index else "REORDERED"
        return Finding(code=code, index=index, detail=f"row {leaf.index} stands in its place"), None
    if leaf.previous == previous:
        return None, None
    if index == 0:
        return Finding(code="EDITED", index=0, detail="the first row names a row before it"), None
    return Finding(code="EDITED", index=index - 1, detail=""), leaf.previous


def _index(body: bytes) -> int | None:
    try:
        return parse_leaf(body).index
    except LeafError:
        return None
