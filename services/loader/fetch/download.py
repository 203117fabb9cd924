"""One file from its first byte to its last, over redirects and broken connections. Blocking.

Bytes that were handed on cannot be taken back, so a source that starts again from the beginning must first repeat
them: their SHA-256 is compared before anything new is handed on.
"""

import hashlib
import ssl
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

from services.loader.fetch.faults import FetchFault
from services.loader.fetch.http import Answer, Budget, Transport
from services.loader.fetch.limits import Ask, Body, judge
from services.loader.fetch.sources import RemoteFile, Target, redirected

PIECE_BYTES = 256 << 10

Credentials = Callable[[Target], Mapping[str, str]]


class Download:
    """A file as pieces of 1 byte to 256 KiB. `close` may be called at any time, from another thread."""

    def __init__(
        self,
        transport: Transport,
        file: RemoteFile,
        *,
        max_bytes: int,
        size_bytes: int | None = None,
        credentials: Credentials | None = None,
        authorities: ssl.SSLContext | None = None,
    ) -> None:
        """`credentials` gives the headers for the host that was named. They never go to another one."""
        self._transport = transport
        self._file = file
        self._ask = Ask(max_bytes=max_bytes, size_bytes=size_bytes, commit=file.commit)
        self._credentials = credentials
        self._authorities = authorities
        self._budget = Budget(transport.limits.total_s(size_bytes or max_bytes))
        self._pieces = self._run()
        self._turn = threading.Lock()
        self._taken = hashlib.sha256()
        self._position = 0
        self._size = size_bytes
        self._etag: str | None = None

    def next_piece(self) -> bytes:
        """Returns the next bytes; none at the end. Raises FetchFault."""
        with self._turn:
            return next(self._pieces, b"")

    def close(self) -> None:
        """Ends the fetch, waiting for what is under way no longer than one tick or one handshake."""
        self._budget.stop()
        with self._turn:
            self._pieces.close()

    def _run(self) -> Generator[bytes, None, None]:
        left = self._transport.limits.max_resumes
        while True:
            try:
                yield from self._attempt()
                return
            except FetchFault as fault:
                if not fault.resumable or left == 0:
                    raise
            left -= 1
            self._budget.pause(self._transport.limits.resume_pause_s)

    def _attempt(self) -> Generator[bytes, None, None]:
        """Yields what is missing, as far as one answer gives it."""
        answer, body = self._reach()
        with answer:
            self._size, self._etag = body.size_bytes, body.etag
            at, repeated = body.start, hashlib.sha256()
            while at < body.size_bytes:
                piece = answer.read(min(PIECE_BYTES, body.size_bytes - at))
                if not piece:
                    raise FetchFault("SHORT", f"{at} of {body.size_bytes} bytes")
                known = piece[: max(0, self._position - at)]
                at += len(piece)
                if known:
                    repeated.update(known)
                    if at >= self._position and repeated.digest() != self._taken.digest():
                        raise FetchFault("CHANGED")
                if fresh := piece[len(known) :]:
                    self._taken.update(fresh)
                    self._position += len(fresh)
                    yield fresh

    def _reach(self) -> tuple[Answer, Body]:
        """Asks for what is missing and follows redirects, each one checked as if it had been named first."""
        target, at_home = self._file.target, True
        for hop in range(self._transport.limits.max_redirects + 1):
            ask = replace(
                self._ask,
                size_bytes=self._size,
                start=self._position if self._etag else 0,
                etag=self._etag,
                first=hop == 0,
            )
            answer = self._open(target, ask, at_home)
            try:
                meaning = judge(ask, answer.head)
                if isinstance(meaning, Body):
                    return answer, meaning
            except BaseException:
                answer.close()
                raise
            answer.close()
            if self._file.redirect_hosts is None:
                raise FetchFault("REDIRECT")
            target = redirected(target, meaning.location, self._file.redirect_hosts)
            # Once another host has had a word, what follows is its choice: credentials stay at home for good.
            at_home = at_home and (target.host, target.port) == (self._file.target.host, self._file.target.port)
        raise FetchFault("REDIRECT", f"more than {self._transport.limits.max_redirects}")

    def _open(self, target: Target, ask: Ask, at_home: bool) -> Answer:
        secrets = self._credentials(target) if at_home and self._credentials is not None else {}
        return self._transport.open(
            target,
            {**ask.headers, **secrets},
            budget=self._budget,
            private=at_home and self._file.private,
            authorities=self._authorities if at_home else None,
        )
