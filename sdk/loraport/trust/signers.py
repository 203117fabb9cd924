"""Where private keys are: signers by reference. Everything that signs goes through `loraport.bundle.envelope.Signer`.

    /path/to/role.key       an unencrypted PEM file with mode 0600
    exec:/path/to/program   a program that holds the key: `program public` prints the public key in PEM, `program sign`
                            reads what is to be signed and prints the 64 bytes of the signature
    any URI that securesystemslib knows (`hsm:`, `gcpkms:`, `awskms:`, …), for a public key that is given

The program is started for every signature, with nothing but its own environment: it is where a hardware module, a key
service or an agent is attached.
"""

import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.signer import Signer as LibrarySigner  # type: ignore[attr-defined]
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from loraport.bundle.envelope import EnvelopeError, Signer, SigningKey, key_id

PROGRAM_TIMEOUT_S = 10.0
MAX_OUTPUT = 4096


@dataclass(frozen=True, slots=True)
class ProgramSigner:
    """A signer outside this process. What it returns is verified before it is used."""

    program: str
    public_pem: bytes
    key_id: str

    @classmethod
    def open(cls, program: str) -> "ProgramSigner":
        """Asks the program for its public key. Raises EnvelopeError (SIGNER or BAD_KEY)."""
        pem = _run(program, "public", b"")
        return cls(program, pem, key_id(pem))

    def sign(self, data: bytes) -> tuple[str, bytes]:
        return self.key_id, _checked(self.public_pem, _run(self.program, "sign", data), data)


@dataclass(frozen=True, slots=True)
class ModuleSigner:
    """A signer of securesystemslib: a hardware module, a key service of a cloud, or its own key file."""

    inner: LibrarySigner
    public_pem: bytes
    key_id: str

    @classmethod
    def open(cls, uri: str, public_pem: bytes) -> "ModuleSigner":
        """Returns the signer of a URI for the key `public_pem`. Raises EnvelopeError (SIGNER or BAD_KEY)."""
        name = key_id(public_pem)
        public = SSlibKey.from_crypto(load_pem_public_key(public_pem), keyid=name)
        try:
            return cls(LibrarySigner.from_priv_key_uri(uri, public), public_pem, name)
        except Exception as error:
            # The library's signers raise what their vendors' libraries raise.
            raise EnvelopeError("SIGNER", f"{uri.split(':')[0]}: cannot be used: {error!s:.200}") from None

    def sign(self, data: bytes) -> tuple[str, bytes]:
        try:
            signature = bytes.fromhex(self.inner.sign(data).signature)
        except Exception as error:
            raise EnvelopeError("SIGNER", f"the signer failed: {error!s:.200}") from None
        return self.key_id, _checked(self.public_pem, signature, data)


def open_signer(reference: str | os.PathLike[str], *, public_pem: bytes | None = None) -> Signer:
    """Returns the signer that `reference` names; see the module's text.

    Raises:
        OSError: a key file cannot be read.
        EnvelopeError: BAD_KEY or SIGNER, one line.
    """
    text = os.fspath(reference)
    scheme, colon, rest = text.partition(":")
    if not colon or "/" in scheme:
        return SigningKey.load(text)
    if scheme == "exec":
        return ProgramSigner.open(rest)
    if public_pem is None:
        raise EnvelopeError("SIGNER", f"{scheme}: needs the public key that it signs for")
    return ModuleSigner.open(text, public_pem)


def _run(program: str, verb: str, data: bytes) -> bytes:
    ends = time.monotonic() + PROGRAM_TIMEOUT_S
    try:
        with tempfile.TemporaryFile() as given:
            given.write(data)
            given.seek(0)
            process = subprocess.Popen(
                [program, verb], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
    except OSError as error:
        raise EnvelopeError("SIGNER", f"{program} cannot be run: {error.strerror}") from None
    assert process.stdout is not None
    with process:
        try:
            output = _read(process.stdout, ends)
            code = process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise EnvelopeError("SIGNER", f"{program} {verb} took longer than {PROGRAM_TIMEOUT_S:.0f} s") from None
        finally:
            process.kill()  # harmless when it has ended
    if code:
        raise EnvelopeError("SIGNER", f"{Path(program).name} {verb} ended with exit code {code}")
    return output


def _read(pipe: IO[bytes], ends: float) -> bytes:
    """Returns what a program prints, which is never held beyond `MAX_OUTPUT`. Raises EnvelopeError, TimeoutExpired."""
    output = b""
    while select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
        piece = pipe.read(MAX_OUTPUT + 1 - len(output))
        if not piece:
            return output
        output += piece
        if len(output) > MAX_OUTPUT:
            raise EnvelopeError("SIGNER", f"the signer printed more than {MAX_OUTPUT} bytes")
    raise subprocess.TimeoutExpired("signer", PROGRAM_TIMEOUT_S)


def _checked(public_pem: bytes, signature: bytes, data: bytes) -> bytes:
    try:
        load_pem_public_key(public_pem).verify(signature, data)  # type: ignore[union-attr, call-arg, arg-type]
    except InvalidSignature:
        raise EnvelopeError("SIGNER", "the signer's signature is not of its public key") from None
    return signature
