"""A process's chain of trust roots: what is believed, what is remembered, and who signs."""

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loraport.bundle.envelope import EnvelopeError, SigningKey, sign_envelope, verify_envelope
from loraport.trust.edit import GRACE_S, next_root
from loraport.trust.files import read_chain, write_root
from loraport.trust.root import Role, TrustRoot
from services.shared.clock import ManualClock
from services.shared.trust import RoleSigner, TrustError, TrustStore, state_file
from tests.support.roots import NOW, make_root, sealed

OLD, NEW, THIEF = (SigningKey.generate() for _ in range(3))
FIRST = make_root({"registry": OLD})
SECOND = next_root(FIRST, now=NOW, role=Role.REGISTRY, public_keys=[NEW.public_pem], since=50)
THIRD = next_root(SECOND, now=NOW)


def directory(folder: Path, *roots: TrustRoot) -> Path:
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.root.json"):
        path.unlink()
    for root in roots or (FIRST,):
        write_root(folder, root, sealed(root))
    return folder


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW + 1.0)


def load(folder: Path, clock: ManualClock, state: Path | str = "") -> TrustStore:
    return TrustStore.load(folder, clock=clock, state_file=str(state))


def test_the_keys_follow_the_root(tmp_path: Path, clock: ManualClock) -> None:
    store = load(directory(tmp_path / "trust"), clock)
    keys, heard = store.keys("registry"), []
    store.on_change(lambda: heard.append(store.version))
    assert (dict(keys), len(keys), keys.version) == ({OLD.key_id: OLD.public_pem}, 1, 1)
    assert store.offer(2, sealed(SECOND))
    assert set(keys) == {OLD.key_id, NEW.key_id}  # what the old one signed a moment ago
    assert (set(keys.at(49)), set(keys.at(50))) == ({OLD.key_id, NEW.key_id}, {NEW.key_id})
    clock.advance(GRACE_S)
    assert set(keys) == {NEW.key_id}
    assert (keys.version, heard) == (2, [2])
    with pytest.raises(KeyError):
        store.keys("anybody")


def test_an_expired_root_is_believed_in_nothing(tmp_path: Path, clock: ManualClock) -> None:
    store = load(directory(tmp_path / "trust"), clock)
    clock.advance(366 * 86400)
    with capture_logs() as logs:
        assert dict(store.keys("registry")) == dict(store.keys("registry").at(1)) == {}
    assert [line["log_level"] for line in logs] == ["critical"], "said once"
    assert store.offer(2, sealed(next_root(FIRST, now=int(clock.now()))))
    assert set(store.keys("registry")) == {OLD.key_id}


@pytest.mark.parametrize(
    ("version", "root", "signers", "code"),
    [
        (2, SECOND, (THIEF,), "OLD_THRESHOLD"),
        (3, THIRD, (), "VERSION"),
        (1, replace(FIRST, expires=FIRST.expires + 1), (), "FORK"),
        (2, replace(SECOND, version=1), (), "VERSION"),
    ],
)
def test_what_does_not_follow_changes_nothing_and_is_an_alarm(
    tmp_path: Path, clock: ManualClock, version: int, root: TrustRoot, signers: tuple[SigningKey, ...], code: str
) -> None:
    store = load(directory(tmp_path / "trust"), clock)
    store.on_change(lambda: pytest.fail("nothing has changed"))
    with capture_logs() as logs:
        assert not store.offer(version, sealed(root, *signers))
    assert [(line["log_level"], line["code"]) for line in logs] == [("critical", code)]
    assert logs[0]["event"].startswith("ALARM: ")
    assert store.root == FIRST


def test_what_was_shown_before_may_be_shown_again(tmp_path: Path, clock: ManualClock) -> None:
    store = load(directory(tmp_path / "trust", SECOND), clock)
    assert store.offer(1, sealed(FIRST))  # older than the operator's first
    assert store.offer(3, sealed(THIRD))
    with capture_logs() as logs:
        assert store.offer(2, sealed(SECOND))
        assert store.offer(3, sealed(THIRD))
    assert logs == []


def test_what_was_accepted_outlives_a_restart_and_a_directory_that_was_set_back(
    tmp_path: Path, clock: ManualClock
) -> None:
    folder, state = directory(tmp_path / "trust", FIRST, SECOND), tmp_path / "state" / "roots.json"
    store = load(folder, clock, state)
    assert store.offer(3, sealed(THIRD))
    assert load(folder, clock, state).root == THIRD
    directory(folder, FIRST)
    assert load(folder, clock, state).root == THIRD
    # The directory may be ahead.
    fourth = next_root(THIRD, now=NOW)
    directory(folder, FIRST, SECOND, THIRD, fourth)
    assert load(folder, clock, state).root == fourth
    directory(folder, FIRST)
    assert load(folder, clock, state).root == fourth
    # Another chain is not an older one, wherever it parted.
    directory(folder, FIRST, next_root(FIRST, now=NOW + 1))
    with pytest.raises(TrustError, match="accepted before"):
        load(folder, clock, state)
    other = make_root({"registry": THIEF})
    directory(folder, other)
    with pytest.raises(TrustError, match="accepted before"):
        load(folder, clock, state)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"schema":"loraport.trust-state.v1","roots":[]}', b"[1]"])
def test_a_state_file_is_never_guessed_at(tmp_path: Path, clock: ManualClock, content: bytes) -> None:
    folder, state = directory(tmp_path / "trust"), tmp_path / "roots.json"
    state.write_bytes(content)
    with pytest.raises(TrustError, match=r"roots\.json"):
        load(folder, clock, state)


def test_a_root_that_cannot_be_kept_is_not_believed(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = load(directory(tmp_path / "trust"), clock, tmp_path / "roots.json")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert not store.offer(2, sealed(SECOND))
    assert store.root == FIRST
    monkeypatch.undo()
    assert store.offer(2, sealed(SECOND))


def test_a_directory_is_a_chain(tmp_path: Path, clock: ManualClock) -> None:
    folder = tmp_path / "trust"
    folder.mkdir()
    with pytest.raises(TrustError, match="loraport trust init"):
        load(folder, clock)
    directory(folder, FIRST, THIRD)
    with pytest.raises(TrustError, match=r"lacks 2\.root\.json"):
        load(folder, clock)
    directory(folder)
    (folder / "2.root.json").write_bytes(sealed(SECOND, THIEF))
    with pytest.raises(TrustError, match="OLD_THRESHOLD"):
        load(folder, clock)
    (folder / "2.root.json").write_bytes(sealed(FIRST))
    with pytest.raises(TrustError, match="VERSION"):
        load(folder, clock)
    assert [root.version for root, _ in read_chain(directory(folder, SECOND, THIRD))] == [2, 3]


def test_state_files_lie_beside_the_floor() -> None:
    assert (state_file("/a/loader.json"), state_file("")) == ("/a/loader.roots.json", "")


def signs(signer: RoleSigner, key: SigningKey) -> None:
    envelope = sign_envelope("t", b"x", signer)
    assert verify_envelope(envelope, payload_type="t", trusted={key.key_id: key.public_pem}) == b"x"
    assert (signer.key_id, signer.public_pem) == (key.key_id, key.public_pem)


def test_a_service_signs_with_the_key_that_the_root_names(tmp_path: Path, clock: ManualClock) -> None:
    store = load(directory(tmp_path / "trust"), clock)
    OLD.save(tmp_path / "registry.key")
    signer = RoleSigner(str(tmp_path / "registry.key"), role="registry", trust=store)
    signs(signer, OLD)
    NEW.save(tmp_path / "registry.new.key")
    THIEF.save(tmp_path / "registry.thief.key")
    signs(signer, OLD)
    store.offer(2, sealed(SECOND))
    signs(signer, NEW)
    # The old file may go, and a start finds the new one.
    (tmp_path / "registry.key").unlink()
    fresh = RoleSigner(str(tmp_path / "registry.key"), role="registry", trust=store)
    fresh.require()
    signs(fresh, NEW)


def test_a_service_without_the_key_signs_nothing(tmp_path: Path, clock: ManualClock) -> None:
    store = load(directory(tmp_path / "trust"), clock)
    OLD.save(tmp_path / "registry.key")
    signer = RoleSigner(str(tmp_path / "registry.key"), role="registry", trust=store)
    signer.require()
    store.offer(2, sealed(SECOND))
    with capture_logs() as logs, pytest.raises(EnvelopeError) as caught:
        sign_envelope("t", b"x", signer)
    assert caught.value.code == "SIGNER"
    assert logs[0]["event"] == "ALARM: this service cannot sign"
    with pytest.raises(TrustError, match="loraport trust rotate --role registry"):
        signer.require()
    with pytest.raises(TrustError, match="cannot read"):
        RoleSigner(str(tmp_path / "none.key"), role="registry", trust=store).require()
