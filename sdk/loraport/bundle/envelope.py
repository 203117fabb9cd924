"""Signed envelopes: DSSE with Ed25519, built on securesystemslib.

The library counts key ids, not keys, and takes the caller's word for which id belongs to which
key. Here a key id is always computed from the key itself, so one key counts once. The payload type
is compared before the payload is used, and a caller gets the payload bytes, never the envelope.
"""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import Key, Signature, SSlibKey  # type: ignore[attr-defined]

from loraport.bundle.canonical import StrictJsonError, canonical, load_strict

IN_TOTO_PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES = 256 * 1024
MAX_SIGNATURES = 16
_KEY_ID = re.compile(r"[0-9a-f]{64}")
_ENVELOPE_KEYS = {"payload", "payloadType", "signatures"}


class EnvelopeError(ValueError):
    """An envelope that proves nothing.

    `code` is TOO_LARGE, MALFORMED, DUPLICATE_SIGNATURE, PAYLOAD_TYPE, BAD_KEY, UNTRUSTED or SIGNER.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def key_id(public: Ed25519PublicKey | bytes | str) -> str:
    """Returns the id of a public key (an object or PEM): hex SHA-256 of its SubjectPublicKeyInfo in DER.

    Raises:
        EnvelopeError: BAD_KEY, it is not an Ed25519 public key.
    """
    key = public if isinstance(public, Ed25519PublicKey) else _load_public(public)
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


class Signer(Protocol):
    """The port through which everything is signed: a key file, a program, a hardware module (`loraport.trust.signers`).

    All of it is Ed25519; the private key need not be anywhere near.
    """

    @property
    def key_id(self) -> str:
        """The id of the public key."""

    @property
    def public_pem(self) -> bytes:
        """The public key as SubjectPublicKeyInfo PEM."""

    def sign(self, data: bytes) -> tuple[str, bytes]:
        """Returns the id of the key that signed, which may change from call to call, and the signature (64 bytes).

        Raises:
            EnvelopeError: SIGNER, it cannot sign.
        """


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 private key in this process's memory: the signer of a key file. Its text form shows its id only."""

    private: Ed25519PrivateKey
    # Reckoned once: a router signs hundreds of tickets a second, and each names its key.
    _key_id: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key_id", key_id(self.private.public_key()))

    @classmethod
    def generate(cls) -> "SigningKey":
        """Returns a new random key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | Path) -> "SigningKey":
        """Reads an unencrypted PKCS#8 PEM file that nobody but its owner can read.

        Raises:
            OSError: the file cannot be read.
            EnvelopeError: BAD_KEY, it is not an Ed25519 private key, or others may read or write it.
        """
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise EnvelopeError("BAD_KEY", f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}")
            pem = file.read()
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise EnvelopeError("BAD_KEY", f"{path} is not an unencrypted PEM private key") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise EnvelopeError("BAD_KEY", f"{path} is not an Ed25519 key")
        return cls(key)

    def save(self, path: str | Path) -> None:
        """Writes the key to a new file that only its owner can read.

        Raises:
            FileExistsError: the file is there already; a key is never overwritten.
            OSError: the file cannot be written.
        """
        pem = self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)

    @property
    def key_id(self) -> str:
        """The id of the public key."""
        return self._key_id

    @property
    def public_pem(self) -> bytes:
        """The public key as SubjectPublicKeyInfo PEM."""
        return self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, data: bytes) -> tuple[str, bytes]:
        """Returns the key's id and its signature of `data`."""
        return self._key_id, self.private.sign(data)

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"


def sign_envelope(payload_type: str, payload: bytes, keys: Sequence[Signer] | Signer) -> bytes:
    """Returns the envelope of `payload` with one signature per distinct key, as canonical JSON.

    Raises:
        EnvelopeError: TOO_LARGE, MALFORMED when there is no key or more than 16, or a signer's SIGNER.
    """
    return _sealed(Envelope(payload, payload_type, {}), list(keys) if isinstance(keys, Sequence) else [keys])


def add_signatures(envelope: bytes, keys: Sequence[Signer]) -> bytes:
    """Returns an envelope signed by `keys` besides those who signed it already, whose signatures are not checked.

    Raises:
        EnvelopeError: as `sign_envelope`, or the envelope is none.
    """
    return _sealed(_parse(envelope), keys)


def _sealed(envelope: Envelope, signers: Sequence[Signer]) -> bytes:
    signed = envelope.pae()
    for signer in signers:
        name, signature = signer.sign(signed)
        envelope.signatures[name] = Signature(name, signature.hex())
    if not 1 <= len(envelope.signatures) <= MAX_SIGNATURES:
        count = len(envelope.signatures)
        raise EnvelopeError("MALFORMED", f"an envelope has 1 to {MAX_SIGNATURES} signatures, not {count}")
    data = canonical(envelope.to_dict())
    if len(data) > MAX_ENVELOPE_BYTES:
        raise EnvelopeError("TOO_LARGE", f"{len(data)} bytes, the limit is {MAX_ENVELOPE_BYTES}")
    return data


def verify_envelope(
    envelope: bytes, *, payload_type: str, trusted: Mapping[str, bytes | str], threshold: int = 1
) -> bytes:
    """Returns the payload if `threshold` distinct trusted keys signed it under `payload_type`.

    `trusted` maps key ids to public keys in PEM. What else the payload must be is for the caller
    to check; the bytes are exactly the signed ones.

    Raises:
        EnvelopeError: with the code of the first check that failed.
        ValueError: `threshold` is below 1.
    """
    if threshold < 1:
        raise ValueError("threshold must be at least 1")
    parsed = _parse(envelope)
    if parsed.payload_type != payload_type:
        raise EnvelopeError("PAYLOAD_TYPE", f"expected {payload_type}, found {parsed.payload_type!r:.100}")
    keys: list[Key] = [_trusted_key(name, pem) for name, pem in trusted.items() if name in parsed.signatures]
    if len(keys) < threshold:
        raise EnvelopeError("UNTRUSTED", f"signed by {len(keys)} trusted keys, {threshold} needed")
    try:
        parsed.verify(keys, threshold)
    except VerificationError:
        raise EnvelopeError("UNTRUSTED", f"fewer than {threshold} valid signatures of trusted keys") from None
    return parsed.payload


def signed_by(envelope: bytes) -> tuple[str, ...]:
    """Returns the key ids that an envelope claims, sorted: a hint to look keys up by, proof of nothing.

    Raises:
        EnvelopeError: TOO_LARGE, MALFORMED or DUPLICATE_SIGNATURE.
    """
    return tuple(sorted(_parse(envelope).signatures))


def claimed_payload(envelope: bytes, *, payload_type: str) -> bytes:
    """Returns the payload without looking at a signature: for a caller that knows the payload's digest otherwise.

    Raises:
        EnvelopeError: TOO_LARGE, MALFORMED, DUPLICATE_SIGNATURE or PAYLOAD_TYPE.
    """
    parsed = _parse(envelope)
    if parsed.payload_type != payload_type:
        raise EnvelopeError("PAYLOAD_TYPE", f"expected {payload_type}, found {parsed.payload_type!r:.100}")
    return parsed.payload


def _load_public(pem: bytes | str) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(pem.encode() if isinstance(pem, str) else pem)
    except (ValueError, UnsupportedAlgorithm):
        raise EnvelopeError("BAD_KEY", "not a public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise EnvelopeError("BAD_KEY", "not an Ed25519 public key")
    return key


def _trusted_key(name: str, pem: bytes | str) -> SSlibKey:
    key = _load_public(pem)
    if key_id(key) != name:
        raise EnvelopeError("BAD_KEY", f"the trusted key {name:.64} has another id")
    return SSlibKey.from_crypto(key, keyid=name)


def _parse(envelope: bytes) -> Envelope:
    try:
        value = load_strict(envelope, max_bytes=MAX_ENVELOPE_BYTES, max_depth=3)
    except StrictJsonError as error:
        code = "TOO_LARGE" if error.code == "TOO_LARGE" else "MALFORMED"
        raise EnvelopeError(code, error.detail) from None
    if not isinstance(value, dict) or set(value) != _ENVELOPE_KEYS:
        raise EnvelopeError("MALFORMED", "an envelope has exactly payload, payloadType and signatures")
    items = value["signatures"]
    if not isinstance(value["payloadType"], str) or not isinstance(items, list):
        raise EnvelopeError("MALFORMED", "payloadType must be text and signatures an array")
    if not 1 <= len(items) <= MAX_SIGNATURES:
        raise EnvelopeError("MALFORMED", f"an envelope has 1 to {MAX_SIGNATURES} signatures, not {len(items)}")
    signatures: dict[str, Signature] = {}
    for item in items:
        signature = _parse_signature(item)
        if signature.keyid in signatures:
            raise EnvelopeError("DUPLICATE_SIGNATURE", f"two signatures of key {signature.keyid}")
        signatures[signature.keyid] = signature
    return Envelope(_from_base64(value["payload"], "payload"), value["payloadType"], signatures)


def _parse_signature(item: Any) -> Signature:
    if not isinstance(item, dict) or set(item) != {"keyid", "sig"}:
        raise EnvelopeError("MALFORMED", "a signature has exactly keyid and sig")
    if not isinstance(item["keyid"], str) or not _KEY_ID.fullmatch(item["keyid"]):
        raise EnvelopeError("MALFORMED", "keyid must be the hex SHA-256 of a key")
    return Signature(item["keyid"], _from_base64(item["sig"], "sig").hex())


def _from_base64(text: Any, what: str) -> bytes:
    """Decodes either base64 alphabet, as the DSSE specification asks of verifiers."""
    if not isinstance(text, str):
        raise EnvelopeError("MALFORMED", f"{what} must be base64 text")
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/").encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise EnvelopeError("MALFORMED", f"{what} is not base64") from None
