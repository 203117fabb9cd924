"""Whose upload goes on, and where it waits.

Of uploads of one revision, the one whose session is newest goes on. A session says nothing of who sends it. Whoever
has got hold of one could keep its revision's turn for as long as the least rate lets it; the publisher announces again,
and the new session ends what came under the old one. So does a publisher whose first call hangs. Sessions live equally
long, so the one that ends last is the newest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from services.loader.slots import Slots
from services.shared.errors import LoraportError
from services.shared.statements import UploadSession

WAIT_FOR_TURN_S = 30.0
RETRY_AFTER_S = 5.0


class Turns:
    """Of uploads: a revision's go on one at a time, a newer session's before an older one's, each in a place of its
    tenant. All methods belong to one event loop.
    """

    def __init__(self, places: Slots) -> None:
        self._places = places
        self._one = Slots(None, per_key=1)  # of revisions, and of digests
        self._succession = Succession()

    @asynccontextmanager
    async def hold(self, session: UploadSession) -> AsyncIterator[AsyncExitStack]:
        """Waits for turn and place, and gives them; who takes them over (`pop_all`) is ended by no newer session.

        Raises:
            LoraportError: OVERLOADED, others have not ended in time, or a newer session's upload is under way.
        """
        async with AsyncExitStack() as held, self._succession.hold(session):
            try:
                async with asyncio.timeout(WAIT_FOR_TURN_S):
                    await held.enter_async_context(self._one.hold(session.revision_id))
                    await held.enter_async_context(self._places.hold(session.tenant))
            except TimeoutError:
                raise LoraportError("OVERLOADED", "other uploads are running", retry_after_s=RETRY_AFTER_S) from None
            yield held

    def of_bytes(self, digest: str) -> AbstractAsyncContextManager[None]:
        """Returns the turn among those who write the object of a digest."""
        return self._one.hold(digest)


class Succession:
    """Uploads that wait or receive. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, dict[asyncio.Timeout, int]] = {}

    @asynccontextmanager
    async def hold(self, session: UploadSession) -> AsyncIterator[None]:
        """Ends what goes on under older sessions of the revision, and goes on until a newer one comes.

        Raises:
            LoraportError: OVERLOADED, a newer session's upload is under way.
        """
        others = self._open.setdefault(session.revision_id, {})
        if any(expires > session.expires for expires in others.values()):
            raise _superseded()
        for other in [other for other, expires in others.items() if expires < session.expires]:
            del others[other]
            other.reschedule(0.0)
        bound = asyncio.timeout(None)
        try:
            async with bound:
                others[bound] = session.expires
                yield
        except TimeoutError:
            if bound.expired():
                raise _superseded() from None
            raise
        finally:
            others.pop(bound, None)
            if not others and self._open.get(session.revision_id) is others:
                del self._open[session.revision_id]


def _superseded() -> LoraportError:
    detail = "an upload of the same revision under a newer session is under way"
    return LoraportError("OVERLOADED", detail, retry_after_s=RETRY_AFTER_S)
