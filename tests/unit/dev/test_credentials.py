import stat
import time
from pathlib import Path

from loraport.bundle.envelope import SigningKey, sign_envelope
from loraport.dev.credentials import ensure_credentials, ensure_trust, s3_credentials, write_private
from loraport.dev.layout import Layout
from loraport.trust.edit import first_root
from loraport.trust.files import write_root
from loraport.trust.root import PAYLOAD_TYPE, Role
from services.shared.trust import TrustStore


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_that_services_need_is_there_and_private(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    ensure_credentials(layout, ["tiny-0"])
    for name in ("registry", "loader", "router", "tiny-0", "admin"):
        assert layout.certificate(name).exists()
        assert stat.S_IMODE(layout.private_key(name).stat().st_mode) == 0o600
    trust = TrustStore.load(layout.trust)
    for role in ("registry", "loader", "router"):
        assert SigningKey.load(layout.trust / f"{role}.key").key_id in trust.keys(role)
    assert len(layout.secret("pepper").read_bytes()) >= 32
    access, secret = s3_credentials(layout)
    assert len(access) >= 8
    assert len(secret) >= 32


def test_nothing_changes_when_it_is_done_again(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    ensure_credentials(layout, ["tiny-0"])
    before = snapshot(tmp_path)
    ensure_credentials(layout, ["tiny-0", "tiny-1"])
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"pki/tiny-1.pem", "pki/tiny-1.key"}


def test_a_new_ca_takes_its_old_leaves_with_it(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    ensure_credentials(layout, ["tiny-0"])
    before = layout.certificate("tiny-0").read_bytes()
    layout.private_key("ca").unlink()
    ensure_credentials(layout, ["tiny-0"])
    assert layout.certificate("tiny-0").read_bytes() != before


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, b"long text that was there before")
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_stack_of_before_goes_on_with_its_keys(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    layout.trust.mkdir(parents=True)
    before = {role: SigningKey.generate() for role in ("registry", "loader", "router")}
    for role, key in before.items():
        key.save(layout.trust / f"{role}.key")
        (layout.trust / f"{role}.pub").write_bytes(key.public_pem)
    ensure_credentials(layout, [])
    trust = TrustStore.load(layout.trust)
    for role, key in before.items():
        assert set(trust.keys(role)) == {key.key_id}
    assert len({key for role in ("root", "timestamp", *before) for key in trust.keys(role)}) == 5
    assert not list(layout.trust.glob("*.pub"))


def test_a_root_is_signed_anew_before_it_ends(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    layout.trust.mkdir(parents=True)
    keys = {role: SigningKey.generate() for role in Role}
    for role, key in keys.items():
        key.save(layout.trust / f"{role}.key")
    ending = first_root({role: [key.public_pem] for role, key in keys.items()}, now=int(time.time()), life_s=20 * 86400)
    write_root(layout.trust, ending, sign_envelope(PAYLOAD_TYPE, ending.body(), keys[Role.ROOT]))
    ensure_trust(layout)
    trust = TrustStore.load(layout.trust)
    assert trust.version == 2
    assert trust.root.expires > ending.expires
    assert set(trust.keys("registry")) == {keys[Role.REGISTRY].key_id}
    ensure_trust(layout)
    assert TrustStore.load(layout.trust).version == 2
