"""An HTTP client for a store that is not believed: what it answers is bounded in length, and in how slowly it comes.

Every wait for bytes is counted where they come from the socket, heads and chunk lines included: a server that sends a
byte now and then never runs into a socket's timeout. Answers other than an object's bytes are read whole, but not
further than a bound, and nothing is inflated: neither an encoding nor the entities of an XML document.

Who broke a bound is not asked again: the error is urllib3's HTTPError itself, which its retries let through.
"""

import http.client
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a store may do.

    An answer that is no object has `answer_bytes` at most, a page of a listing `page_bytes`; one listing takes `pages`
    requests, and ends after `keys` keys. Who waits for an answer may wait `patience_s` in advance, and earns a second
    with every `bytes_per_s` bytes. `silent_bytes` bounds what comes without being a body: heads, chunk lines, trailers.
    A piece of an object is handed on when it is full, or when it took `piece_s`.
    """

    answer_bytes: int = 64 << 10
    page_bytes: int = 2 << 20
    pages: int = 32
    keys: int = 10_000
    patience_s: float = 30.0
    bytes_per_s: int = 256 << 10
    silent_bytes: int = 1 << 20
    piece_s: float = 0.5


class BoundedPool(urllib3.PoolManager):
    """A pool that follows no redirects and holds every server to its bounds.

    With `requests` it makes so many, and no more. `urlopen` raises urllib3's HTTPError for whatever is out of bounds.
    """

    def __init__(self, bounds: Bounds, *, requests: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._bounds, self._left = bounds, requests
        response = partial(_Response, bounds=bounds, clock=time.monotonic)
        self.pool_classes_by_scheme = {
            scheme: _answering(pool, response) for scheme, pool in self.pool_classes_by_scheme.items()
        }

    def urlopen(  # type: ignore[override]  # as in the base class
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        """As the base class, but only what is asked for with `preload_content=False` and there is left unread."""
        if self._left is not None:
            if self._left == 0:
                raise HTTPError("the listing has no end")
            self._left -= 1
        streamed = not options.pop("preload_content", True)
        response = super().urlopen(method, url, redirect=False, preload_content=False, decode_content=False, **options)
        if streamed and response.status in (200, 206):
            return response
        listing = method == "GET" and "list-type=2" in urlsplit(url).query.split("&")
        try:
            body = _whole(response, self._bounds.page_bytes if listing else self._bounds.answer_bytes)
        finally:
            response.close()  # a connection that was read to the end is back in the pool already, and stays open
            response.release_conn()
        return urllib3.HTTPResponse(
            io.BytesIO(body),
            headers=response.headers,
            status=response.status,
            reason=response.reason,
            decode_content=False,
            enforce_content_length=False,
            request_method=method,
        )


def _whole(response: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    pieces, size = [], 0
    while piece := response.read1(limit + 1 - size, decode_content=False):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise HTTPError(f"an answer of more than {limit} bytes")
    body = b"".join(pieces)
    if b"<!ENTITY" in body:  # the client library decodes before it parses, so no other bytes can mean this
        raise HTTPError("an answer that defines entities")
    return body


class _Wire(io.RawIOBase):
    """The bytes of one answer as they come. `room` is how many more may come before a reader has some of them."""

    def __init__(self, raw: io.RawIOBase, bounds: Bounds, clock: Callable[[], float]) -> None:
        self._raw, self._bounds, self._clock = raw, bounds, clock
        self._left_s = bounds.patience_s
        self.room = bounds.silent_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        began = self._clock()
        count = self._raw.readinto(buffer) or 0
        self._left_s -= self._clock() - began
        if self._left_s < 0:
            raise HTTPError("the store is too slow")
        # What was sent fast is no licence to stop.
        self._left_s = min(self._bounds.patience_s, self._left_s + count / self._bounds.bytes_per_s)
        self.room -= count
        if self.room < 0:
            raise HTTPError("the store sends much, but no body")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, *args: Any, bounds: Bounds, clock: Callable[[], float], **options: Any) -> None:
        super().__init__(*args, **options)
        self._silent_bytes = bounds.silent_bytes
        self._wire = _Wire(self.fp.detach(), bounds, clock)
        self.fp = io.BufferedReader(self._wire)

    def read1(self, n: int = -1) -> bytes:
        self._wire.room = self._silent_bytes + max(n, 0)
        return super().read1(n)


def _answering(pool: Any, response: Any) -> Any:
    """Returns the class of pools whose connections make their answers by `response`."""
    connection = type("Connection", (pool.ConnectionCls,), {"response_class": response})
    return type("Pool", (pool,), {"ConnectionCls": connection})
