"""What an answer may be and how slow it may come, as tables and plain state: no sockets, no clock.

status         asked from 0     asked from k > 0, with If-Range
200            whole body       whole body again: the first k bytes must be the ones already here
206            RANGE            exactly k to the end, of the same strong ETag
301 302 303 307 308             followed by hand, or REDIRECT
401 403        DENIED           404 410  MISSING        408 425 429 5xx  BUSY        416  RANGE
any other      STATUS
"""

import re
from collections import deque
from dataclasses import dataclass

from services.loader.fetch.faults import FetchFault

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAULTS = {401: "DENIED", 403: "DENIED", 404: "MISSING", 410: "MISSING", 416: "RANGE"}
_BUSY = frozenset({408, 425, 429})
_DIGITS = re.compile(r"[0-9]{1,15}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]{0,256}"')
# A window is kept in this many steps.
_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Times in seconds, rates in bytes per second."""

    resolve_s: float = 5.0
    connect_s: float = 5.0
    tls_s: float = 5.0
    # From the request to the end of the headers.
    head_s: float = 15.0
    # At least so much in any window, counting only the time spent waiting for the source.
    min_rate: int = 256 << 10
    window_s: float = 30.0
    max_redirects: int = 3
    max_resumes: int = 3
    resume_pause_s: float = 0.5

    def total_s(self, size_bytes: int) -> float:
        """Returns how long a file of this size may take, redirects and resumes included."""
        return self.window_s + size_bytes / self.min_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked for: everything from byte `start` on.

    `size_bytes` is the exact size of the whole file where it is known, `max_bytes` holds in any case. `etag` is the
    strong ETag of what is already here. `commit` is what the answer must state; `first` is the answer of the host that
    was named, not of one it redirected to.
    """

    max_bytes: int
    size_bytes: int | None = None
    start: int = 0
    etag: str | None = None
    commit: str = ""
    first: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """Returns what to send for it."""
        plain = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if self.start and self.etag:
            return plain | {"Range": f"bytes={self.start}-", "If-Range": self.etag}
        return plain


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; names in lower case, in order."""

    status: int
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """Returns every value of a header."""
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True, slots=True)
class Body:
    """A body to be read: bytes `start` to `size_bytes` of the file, `size_bytes` not included."""

    start: int
    size_bytes: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class Redirect:
    """Ask elsewhere."""

    location: str


def judge(ask: Ask, head: Head) -> Body | Redirect:
    """Returns what an answer means.

    Raises:
        FetchFault: it is not an answer to what was asked.
    """
    if head.status in REDIRECTS or head.status in (200, 206):
        _check_commit(ask, head)
    if head.status in REDIRECTS:
        locations = head.all("location")
        if len(locations) != 1:
            raise FetchFault("REDIRECT", f"{len(locations)} Location headers")
        return Redirect(locations[0])
    if head.status in (200, 206):
        return _body(ask, head)
    if head.status in _BUSY or 500 <= head.status <= 599:
        raise FetchFault("BUSY", f"status {head.status}")
    raise FetchFault(_FAULTS.get(head.status, "STATUS"), f"status {head.status}")


def _check_commit(ask: Ask, head: Head) -> None:
    stated = head.all("x-repo-commit")
    if ask.commit and (ask.first or stated) and stated != [ask.commit]:
        raise FetchFault("WRONG_COMMIT")


def _body(ask: Ask, head: Head) -> Body:
    if any(value.lower() != "identity" for value in head.all("content-encoding")):
        raise FetchFault("ENCODED")
    lengths = head.all("content-length")
    if head.all("transfer-encoding") or len(lengths) != 1 or not _DIGITS.fullmatch(lengths[0]):
        raise FetchFault("LENGTH")
    length = int(lengths[0])
    etags = head.all("etag")
    etag = etags[0] if len(etags) == 1 and _STRONG_ETAG.fullmatch(etags[0]) else None
    if head.status == 206:
        return _part(ask, head, length, etag)
    if not 1 <= length <= ask.max_bytes or ask.size_bytes not in (None, length):
        raise FetchFault("SIZE", f"{length} bytes")
    return Body(0, length, etag)


def _part(ask: Ask, head: Head, length: int, etag: str | None) -> Body:
    ranges = head.all("content-range")
    match = _CONTENT_RANGE.fullmatch(ranges[0]) if len(ranges) == 1 else None
    if not ask.start or match is None:
        raise FetchFault("RANGE", "a part that was not asked for")
    first, last, size = map(int, match.groups())
    if etag is None or etag != ask.etag or ask.size_bytes not in (None, size):
        raise FetchFault("CHANGED")
    if first != ask.start or last != size - 1 or length != size - first or size > ask.max_bytes:
        raise FetchFault("RANGE")
    return Body(first, size, etag)


class Pace:
    """Whether a body comes fast enough: the bytes of the last window of waiting. Time stands still between reads."""

    def __init__(self, limits: FetchLimits) -> None:
        self._need = limits.min_rate * limits.window_s
        self._window_s = limits.window_s
        self._step_s = limits.window_s / _STEPS
        self._waited = 0.0
        self._bytes = 0
        # (time of waiting at the end of the step, bytes in the step)
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, waited_s: float, count: int) -> None:
        """Notes that so many bytes came after waiting so long.

        Raises:
            FetchFault: SLOW.
        """
        self._waited += waited_s
        self._bytes += count
        if self._steps and self._waited - self._steps[-1][0] < self._step_s:
            self._steps[-1] = (self._steps[-1][0], self._steps[-1][1] + count)
        else:
            self._steps.append((self._waited, count))
        while self._steps and self._steps[0][0] <= self._waited - self._window_s:
            self._bytes -= self._steps.popleft()[1]
        if self._waited >= self._window_s and self._bytes < self._need:
            raise FetchFault("SLOW")
