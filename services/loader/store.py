"""The object store over S3.

The store is not trusted: keys are made here, stored bytes are read raw (`decode_content=False`: an object that claims
a Content-Encoding must not inflate), redirects are not followed, all else it says is bounded (`answers`), and whoever
reads hashes.

S3 has no certain sign for a full disk. A server that says so is believed; one that answers, but fails the same write
again and again with a bare 500 (as small servers do) is taken for full as well. A single 500 is not: `rclone serve s3`
also answers so when two writes of one key meet.
"""

import contextlib
import re
import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import structlog
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError
from urllib3.util import Retry, Timeout

from loraport.bundle.digest import parse_digest
from services.loader.answers import BoundedPool, Bounds
from services.loader.ports import Area, ObjectMissing
from services.shared.errors import LoraportError

log = structlog.get_logger()

CHUNK_BYTES = 1 << 20
# One part is in memory at a time; S3 allows 10 000 parts and asks for at least 5 MiB each.
PART_BYTES = 16 << 20
# Asking a region's name would be one more request before the first one.
REGION = "us-east-1"
CONNECT_S, READ_S = 3.0, 15.0
RETRY_AFTER_S = 2.0
# Between tries of a write that ended in a bare 500.
WRITE_PAUSES_S = (0.1, 0.4)

_FULL = frozenset({"StorageFull", "XMinioStorageFull", "InsufficientStorage", "QuotaExceeded", "EntityTooLarge"})
_MISSING = frozenset({"NoSuchKey", "NoSuchBucket"})
_THERE = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")


def verified_key(digest: str) -> str:
    """Returns the one key under which verified bytes of a digest lie. Raises ValueError."""
    digits = parse_digest(digest)
    return f"sha256/{digits[:2]}/{digits[2:]}"


def read_credentials(path: str) -> tuple[str, str]:
    """Returns (access key, secret key) from a file of two lines.

    Raises:
        OSError: the file cannot be read or has other content.
    """
    lines = Path(path).read_text().splitlines()
    if len(lines) != 2 or not all(line.strip() for line in lines):
        raise OSError(f"{path} must have two lines: access key and secret key")
    return lines[0].strip(), lines[1].strip()


class S3Store:
    """The port `ObjectStore` over any S3 server. Safe to use from several threads."""

    def __init__(
        self,
        endpoint: str,
        credentials: tuple[str, str],
        *,
        quarantine_bucket: str,
        verified_bucket: str,
        secure: bool = False,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
    ) -> None:
        self._bounds = bounds
        self._connect = partial(_connect, endpoint, credentials, secure, bounds)
        self._client = self._connect(None)
        self._buckets: dict[Area, str] = {"quarantine": quarantine_bucket, "verified": verified_bucket}

    def prepare(self) -> None:
        for bucket in self._buckets.values():
            with _typed():
                if self._client.bucket_exists(bucket):
                    continue
            try:
                with _typed():
                    self._client.make_bucket(bucket)
            except LoraportError as error:
                if error.metadata.get("s3_code") not in _THERE:
                    raise

    def put(self, area: Area, key: str, data: BinaryIO, size_bytes: int) -> None:
        start = data.tell()
        for pause in (*WRITE_PAUSES_S, None):
            data.seek(start)
            try:
                with _typed():
                    self._client.put_object(
                        self._buckets[area], key, data, size_bytes, part_size=PART_BYTES, num_parallel_uploads=1
                    )
                return
            except LoraportError as error:
                if error.reason != "STORE_UNAVAILABLE" or error.metadata["s3_status"] != "500":
                    raise
                if pause is None and self._answers(self._buckets[area]):
                    log.error("store refuses a write", size_bytes=size_bytes)
                    raise LoraportError(
                        "STORAGE_FULL", "the store answers, but does not take the bytes; it has no room left"
                    ) from None
                if pause is None:
                    raise
                time.sleep(pause)

    def read(self, area: Area, key: str) -> Generator[bytes, None, None]:
        response: Any = None
        try:
            with _typed(missing=True):
                response = self._client.get_object(
                    self._buckets[area], key, request_headers={"Accept-Encoding": "identity"}
                )
            while True:
                with _typed():
                    piece = _next_piece(response, self._bounds.piece_s)
                if not piece:
                    return
                yield piece
        finally:
            if response is not None:
                # Closed, not drained: an object may be far longer than what was asked for.
                response.close()
                response.release_conn()

    def delete(self, area: Area, key: str) -> None:
        with contextlib.suppress(ObjectMissing), _typed(missing=True):
            self._client.remove_object(self._buckets[area], key)

    def keys(self, area: Area, prefix: str) -> list[str]:
        client = self._connect(self._bounds.pages)  # one page is one request, and an empty one may be followed by more
        with _typed():
            found = client.list_objects(self._buckets[area], prefix=prefix, recursive=True)
            names = (item.object_name for item in found if item.object_name and not item.is_dir)
            return list(islice(names, self._bounds.keys))

    def _answers(self, bucket: str) -> bool:
        try:
            with _typed():
                return self._client.bucket_exists(bucket)
        except LoraportError:
            return False


def _connect(endpoint: str, credentials: tuple[str, str], secure: bool, bounds: Bounds, requests: int | None) -> Minio:
    pool = BoundedPool(
        bounds,
        requests=requests,
        timeout=Timeout(connect=CONNECT_S, read=READ_S),
        # A server that says when to come again is not waited for: its answer is an error like any other.
        retries=Retry(total=2, redirect=0, status=0, backoff_factor=0.1, respect_retry_after_header=False),
        maxsize=16,
    )
    access, secret = credentials
    return Minio(endpoint, access, secret, secure=secure, region=REGION, http_client=pool)


def _next_piece(response: Any, piece_s: float) -> bytes:
    """Returns CHUNK_BYTES, or what came within `piece_s` and one wait for bytes; empty at the end."""
    pieces: list[bytes] = []
    left, ends = CHUNK_BYTES, time.monotonic() + piece_s
    while left and (piece := response.read1(left, decode_content=False)):
        pieces.append(piece)
        left -= len(piece)
        if time.monotonic() >= ends:
            break
    return b"".join(pieces)


@contextlib.contextmanager
def _typed(*, missing: bool = False) -> Iterator[None]:
    """Lets only our errors out. With `missing`, an object that is not there is ObjectMissing."""
    try:
        yield
    except LoraportError:
        raise
    except (MinioException, HTTPError, OSError, ValueError, SyntaxError) as error:  # SyntaxError: broken XML
        status, code = _status_and_code(error)
        if missing and code in _MISSING:
            raise ObjectMissing(code) from None
        log.warning("store call failed", kind=type(error).__name__, status=status, code=code)
        metadata = {"s3_status": str(status), "s3_code": code}
        if code in _FULL or status == 507:
            raise LoraportError("STORAGE_FULL", metadata=metadata) from None
        raise LoraportError("STORE_UNAVAILABLE", retry_after_s=RETRY_AFTER_S, metadata=metadata) from None


def _status_and_code(error: Exception) -> tuple[int, str]:
    """Returns the HTTP status (0: none) and S3's own code (empty: none) behind a failure."""
    if isinstance(error, S3Error):
        return int(error.response.status), error.code or ""
    if isinstance(error, ServerError):
        return error.status_code, ""
    if isinstance(error, InvalidResponseError):
        # Servers that answer `text/xml` are not parsed by the client library; status and body are private there.
        match = _CODE.search(error._body or "")
        return int(error._code), match.group(1) if match else ""
    return 0, ""
