"""Which of several uploads of one revision goes on."""

import asyncio

import pytest

from services.loader.slots import Slots
from services.loader.turns import Succession, Turns
from services.shared.errors import LoraportError
from services.shared.statements import UploadSession


def session(expires: int, revision_id: str = "a") -> UploadSession:
    return UploadSession(
        upload_id="u", tenant="acme", revision_id=revision_id, base_model="small", weights_digest="", weights_size=1,
        config_digest="", expires=expires,
    )  # fmt: skip


class Upload:
    """An upload that goes on until it is told to end; `done` is how it ended."""

    def __init__(self, succession: Succession, granted: UploadSession) -> None:
        self.begun, self.last_byte = asyncio.Event(), asyncio.Event()
        self.done = asyncio.create_task(self._run(succession, granted))

    async def _run(self, succession: Succession, granted: UploadSession) -> str:
        try:
            async with succession.hold(granted):
                self.begun.set()
                await self.last_byte.wait()
        except LoraportError as error:
            return error.reason
        finally:
            self.begun.set()
        return "OK"


async def begun(succession: Succession, granted: UploadSession) -> Upload:
    upload = Upload(succession, granted)
    await upload.begun.wait()
    return upload


async def test_a_newer_session_ends_older_ones_and_no_others() -> None:
    succession = Succession()
    older = [await begun(succession, session(expires)) for expires in (1, 1)]
    another = await begun(succession, session(1, "b"))
    newer = [await begun(succession, session(expires)) for expires in (2, 2)]
    assert [await upload.done for upload in older] == ["OVERLOADED", "OVERLOADED"]
    assert await (await begun(succession, session(1))).done == "OVERLOADED"
    for upload in (*newer, another):
        upload.last_byte.set()
        assert await upload.done == "OK"
    assert not succession._open


async def test_an_older_session_may_still_be_used_when_the_newer_one_is_gone() -> None:
    succession = Succession()
    newer = await begun(succession, session(2))
    newer.done.cancel()
    await asyncio.gather(newer.done, return_exceptions=True)
    older = await begun(succession, session(1))
    older.last_byte.set()
    assert await older.done == "OK"


async def test_what_has_come_whole_is_not_ended() -> None:
    succession = Succession()
    older = await begun(succession, session(1))
    older.last_byte.set()  # it leaves in the same turn of the loop in which the newer one comes
    newer = await begun(succession, session(2))
    assert await older.done in ("OK", "OVERLOADED")
    newer.last_byte.set()
    assert await newer.done == "OK"


async def test_a_time_that_runs_out_inside_is_told_as_it_is() -> None:
    with pytest.raises(TimeoutError):
        async with Succession().hold(session(1)):
            raise TimeoutError


async def test_a_turn_that_was_taken_over_is_not_ended_and_holds_up_the_next() -> None:
    turns = Turns(Slots(2, per_key=2))
    async with turns.hold(session(1)) as held:
        kept = held.pop_all()
    order: list[str] = []

    async def newer() -> None:
        async with turns.hold(session(2)):
            order.append("newer")

    waiting = asyncio.create_task(newer())
    async with turns.hold(session(1, "b")):
        order.append("another revision")
    async with kept:
        order.append("older")
    await waiting
    assert order == ["another revision", "older", "newer"]
