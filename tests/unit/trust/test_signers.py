"""Signers by reference: a file, a program, a module of the signing library. One law: what they sign verifies."""

import stat
import sys
from pathlib import Path

import pytest

from loraport.bundle.envelope import EnvelopeError, Signer, SigningKey, sign_envelope, verify_envelope
from loraport.trust.signers import open_signer

TYPE = "application/test"

PROGRAM = """#!{python}
import sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_private_key
key = load_pem_private_key(Path({key!r}).read_bytes(), None)
if sys.argv[1] == "public":
    sys.stdout.write(Path({public!r}).read_text())
else:
    data = sys.stdin.buffer.read()
    sys.stdout.buffer.write({sign})
"""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter may take long to start on a busy machine."""
    monkeypatch.setattr("loraport.trust.signers.PROGRAM_TIMEOUT_S", 60.0)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    made = SigningKey.generate()
    made.save(tmp_path / "role.key")
    (tmp_path / "role.pub").write_bytes(made.public_pem)
    return made


def program(folder: Path, *, sign: str = "key.sign(data)") -> str:
    path = folder / "signer.py"
    values = {"key": str(folder / "role.key"), "public": str(folder / "role.pub"), "sign": sign}
    path.write_text(PROGRAM.format(python=sys.executable, **values))
    path.chmod(0o700)
    return f"exec:{path}"


def holds(signer: Signer, key: SigningKey) -> None:
    assert (signer.key_id, signer.public_pem) == (key.key_id, key.public_pem)
    envelope = sign_envelope(TYPE, b"payload", signer)
    assert verify_envelope(envelope, payload_type=TYPE, trusted={key.key_id: key.public_pem}) == b"payload"


def test_every_kind_of_signer_signs_for_its_key(tmp_path: Path, key: SigningKey) -> None:
    holds(open_signer(tmp_path / "role.key"), key)
    holds(open_signer(program(tmp_path)), key)
    holds(open_signer(f"file2:{tmp_path / 'role.key'}", public_pem=key.public_pem), key)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_key_file_that_others_may_touch_is_refused_in_one_line(tmp_path: Path, key: SigningKey, mode: int) -> None:
    path = tmp_path / "role.key"
    path.chmod(mode)
    with pytest.raises(EnvelopeError, match=r"chmod 600 .*role\.key$") as caught:
        open_signer(path)
    assert caught.value.code == "BAD_KEY"
    path.chmod(0o400)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    holds(open_signer(path), key)


@pytest.mark.parametrize("sign", ["bytes(64)", "b''", "key.sign(data + b'x')", "sys.exit(3) or b''", "b'x' * 9999"])
def test_a_program_that_signs_something_else_is_caught(tmp_path: Path, key: SigningKey, sign: str) -> None:
    signer = open_signer(program(tmp_path, sign=sign))
    with pytest.raises(EnvelopeError) as caught:
        sign_envelope(TYPE, b"payload", signer)
    assert caught.value.code == "SIGNER"


def shell(folder: Path, body: str) -> str:
    path = folder / "signer.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return f"exec:{path}"


@pytest.mark.parametrize("body", ["exec yes", "yes & exec yes", "head -c 5000 /dev/zero"])
def test_a_program_that_floods_is_stopped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Ten seconds of a pipe are gigabytes."""
    monkeypatch.setattr("loraport.trust.signers.PROGRAM_TIMEOUT_S", 600.0)
    with pytest.raises(EnvelopeError, match="more than 4096 bytes"):
        open_signer(shell(tmp_path, body))


@pytest.mark.parametrize(
    "body", ["exec sleep 600", "exec >&-; exec sleep 600", "sleep 30 & exit 0", "echo x; sleep 600"]
)
def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr("loraport.trust.signers.PROGRAM_TIMEOUT_S", 0.3)
    with pytest.raises(EnvelopeError, match="took longer"):
        open_signer(shell(tmp_path, body))


def test_a_signer_that_is_not_there_is_one_line(tmp_path: Path, key: SigningKey) -> None:
    for reference in (f"exec:{tmp_path / 'missing'}", "file2:/nowhere", "hsm:"):
        with pytest.raises(EnvelopeError) as caught:
            open_signer(reference, public_pem=None if reference.startswith("exec") else key.public_pem)
        assert caught.value.code == "SIGNER"
        assert "\n" not in str(caught.value)
    with pytest.raises(EnvelopeError, match="needs the public key"):
        open_signer("gcpkms:some/key")
