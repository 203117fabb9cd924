"""The hand-over of sealed memory between two processes' worth of code, over a real unix socket."""

import asyncio
import contextlib
import gc
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.executor.handover import HandoverFailed, take_over
from services.loader import handover
from services.loader.handover import HandoverSocket, Tokens
from services.loader.sealed import Blob
from services.shared.handover import GRANTED, MAX_PATH_BYTES, REFUSED, SEALS, encode_request, lease_key, missing_seals

DATA = os.urandom(10_000)
# What is waited for comes, on a slow machine as well.
PATIENCE_S = 60.0


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    gc.collect()
    before = open_fds()
    yield
    gc.collect()
    # The loop's own descriptors come and go with it; a leak of a test below would be at least one for each round.
    assert open_fds() <= before + 3


def blob(data: bytes = DATA, *, seal: bool = True) -> Blob:
    made = Blob("test")
    made.write(data)
    if seal:
        made.seal()
    return made


class Desk:
    """A loader's side: leases by id."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self.blobs: dict[str, Blob] = {}
        self.served: HandoverSocket | None = None

    def lease(self, lease_id: str, made: Blob) -> bytes:
        self.blobs[lease_id] = made
        return self.tokens.issue(lease_id, "executor-0")

    def redeem(self, token: bytes, key: bytes) -> int | None:
        found = self.tokens.redeem(token, key)
        return None if found is None else self.blobs[found[0]].open_handover()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[tuple[Desk, str]]:
    desk, path = Desk(), str(tmp_path / "s")
    served = HandoverSocket(path, desk.redeem, patience_s=PATIENCE_S)
    served.start()
    desk.served = served
    yield desk, path
    await served.stop()
    assert not os.path.exists(path)
    for made in desk.blobs.values():
        made.close()


async def take(path: str, token: bytes, lease_id: str, size: int = len(DATA)) -> memoryview:
    return await asyncio.to_thread(take_over, path, token, lease_id, size_bytes=size, patience_s=PATIENCE_S)


async def fails(path: str, token: bytes, lease_id: str, size: int = len(DATA)) -> HandoverFailed:
    with pytest.raises(HandoverFailed) as caught:
        await take(path, token, lease_id, size)
    return caught.value


async def test_the_same_memory_arrives_read_only(desk: tuple[Desk, str]) -> None:
    loader, path = desk
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for number in range(20):
        token = loader.lease(f"lease-{number}", blob())
        view = await take(path, token, f"lease-{number}")
        assert view.readonly
        assert view == DATA
        with pytest.raises(TypeError):
            view[0] = 1
        # It outlives the loader's own hold, and nothing is left open once nobody looks.
        loader.blobs.pop(f"lease-{number}").close()
        assert bytes(view[-3:]) == DATA[-3:]
        del view
    assert len(loader.tokens) == 0


async def test_a_token_is_good_once_and_for_its_own_lease(desk: tuple[Desk, str]) -> None:
    loader, path = desk
    first, second = loader.lease("first", blob()), loader.lease("second", blob(b"y" * 500))
    await take(path, first, "first")
    assert "refused" in str(await fails(path, first, "first"))  # replayed
    assert "refused" in str(await fails(path, second, "first"))  # another lease's
    assert "refused" in str(await fails(path, second, "second", 500))  # and spent by that
    assert "refused" in str(await fails(path, os.urandom(32), "second"))
    newer = loader.tokens.issue("second", "executor-0")
    loader.tokens.drop("second")
    loader.tokens.drop("second")
    assert "refused" in str(await fails(path, newer, "second"))
    assert len(loader.tokens) == 0


async def test_unsealed_memory_is_never_handed_over(desk: tuple[Desk, str]) -> None:
    loader, path = desk
    assert "refused" in str(await fails(path, loader.lease("open", blob(seal=False)), "open"))


async def test_garbage_slowness_and_hanging_up_leave_the_socket_working(desk: tuple[Desk, str]) -> None:
    loader, path = desk
    good = encode_request(loader.lease("lease", blob()), "lease")
    for sent, expected in [
        (b"", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b""),  # too short: let go after a while
        (os.urandom(len(good)), REFUSED),
        (b"LPH2" + good[4:], REFUSED),
        (os.urandom(100_000), REFUSED),
        (good[:-1], b""),
    ]:
        loader.served._patience_s = PATIENCE_S if expected else 0.3
        assert await asyncio.to_thread(talk, path, sent) == expected
    for _ in range(3):  # hangs up without a word
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    slow = [socket.socket(socket.AF_UNIX) for _ in range(handover.MAX_CLIENTS + 4)]
    for client in slow:
        await asyncio.to_thread(client.connect, path)
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await try_to_take(loader, path)):
            pass  # it was too slow itself
    assert found == DATA
    for client in slow:
        client.close()


async def try_to_take(loader: Desk, path: str) -> memoryview | None:
    try:
        return await take(path, loader.lease("lease", blob()), "lease")
    except HandoverFailed:
        return None


def talk(path: str, sent: bytes) -> bytes:
    """Says something and returns what comes back, empty when the loader hangs up."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        try:
            return client.recv(10)
        except ConnectionResetError:
            return b""


async def test_another_user_gets_nothing(desk: tuple[Desk, str], monkeypatch: pytest.MonkeyPatch) -> None:
    loader, path = desk
    token = loader.lease("lease", blob())
    monkeypatch.setattr(handover, "peer_uid", lambda _: os.getuid() + 1)
    # Which of the three depends on who is faster.
    gone = ("hung up", "BrokenPipeError", "ConnectionResetError")
    why = str(await fails(path, token, "lease"))
    assert any(word in why for word in gone), why
    monkeypatch.undo()
    assert await take(path, token, "lease") == DATA


@contextlib.contextmanager
def impostor(tmp_path: Path, answer: bytes, fds: list[int], *, wait: float = 0) -> Iterator[str]:
    """Answers one client with what the test wants."""
    path = str(tmp_path / "impostor")
    stop = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE_S)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(200)
                stop.wait(wait)
                if fds:
                    socket.send_fds(connection, [answer], fds)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            stop.set()
            thread.join()
            os.unlink(path)


async def test_what_is_not_sealed_or_not_of_the_size_is_refused(tmp_path: Path) -> None:
    token = os.urandom(32)
    good, loose, small = blob(), blob(seal=False), blob(b"tiny")
    with open(tmp_path / "plain", "wb") as plain:
        plain.write(DATA)
        plain.flush()
        reading, writing = os.pipe()
        for fds, why in [
            ([loose._fd], "can still change"),
            ([plain.fileno()], "can still change"),
            ([small._fd], "a file of 4 bytes"),
            ([reading], "a file of 0 bytes"),
            ([], "without a file"),
            # The kernel closes what did not fit into the room for one; the first is taken.
            ([loose._fd, good._fd], "can still change"),
        ]:
            with impostor(tmp_path, GRANTED, fds) as path:
                error = await fails(path, token, "lease")
            assert why in str(error)
            assert error.suspicious
        os.close(reading)
        os.close(writing)
    with impostor(tmp_path, REFUSED, [good._fd]) as path:
        assert not (await fails(path, token, "lease")).suspicious
    with impostor(tmp_path, GRANTED, [good._fd]) as path:
        assert await take(path, token, "lease") == DATA
    for made in (good, loose, small):
        made.close()


def test_some_seals_are_not_enough(tmp_path: Path) -> None:
    import fcntl

    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    assert missing_seals(fd) == SEALS
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    assert missing_seals(fd) == ("F_SEAL_SEAL",)
    os.close(fd)


async def test_nobody_there_or_nobody_answering_is_not_waited_for_long(tmp_path: Path) -> None:
    token = os.urandom(32)
    assert "FileNotFoundError" in str(await fails(str(tmp_path / "missing"), token, "lease"))
    for path in ("s", "", "\0abstract"):
        assert (await fails(path, token, "lease")).suspicious
    assert not (await fails("/" + "x" * 300, token, "lease")).suspicious
    assert not (await fails(str(tmp_path / "x"), b"short", "lease")).suspicious
    with impostor(tmp_path, REFUSED, [], wait=30) as path, pytest.raises(HandoverFailed, match="TimeoutError"):
        await asyncio.to_thread(take_over, path, token, "lease", size_bytes=1, patience_s=0.1)


async def test_the_path_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def make() -> HandoverSocket:
        return HandoverSocket(path, lambda *_: None)

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    first = make()
    first.start()
    with pytest.raises(OSError, match="another process listens"):
        make().start()
    await first.stop()
    await first.stop()
    Path(path).write_text("a file of somebody")
    with pytest.raises(OSError, match="not a socket"):
        make().start()
    assert Path(path).read_text() == "a file of somebody"
    with pytest.raises(OSError, match="longer than"):
        HandoverSocket("/" + "x" * MAX_PATH_BYTES, lambda *_: None).start()


async def test_a_failing_redeem_ends_one_client_only(tmp_path: Path) -> None:
    def redeem(*_: bytes) -> int | None:
        raise OSError(24, "Too many open files")

    served = HandoverSocket(str(tmp_path / "s"), redeem, patience_s=PATIENCE_S)
    served.start()
    for _ in range(2):
        assert "hung up" in str(await fails(str(tmp_path / "s"), os.urandom(32), "lease"))
    await served.stop()


def test_lease_keys_differ() -> None:
    assert lease_key("a") != lease_key("b")
    with pytest.raises(ValueError, match="32 bytes"):
        encode_request(b"x", "a")
