"""Secrets of sources: read once at the start, given to the one host that they are for, never logged."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult

from minio.credentials.credentials import Credentials as Keys
from minio.signer import sign_v4_s3
from minio.time import to_amz_date

from services.loader.fetch.config import HubSource, ImportSources, StoreSource
from services.loader.fetch.http import host_header
from services.loader.fetch.sources import RemoteFile, Target
from services.loader.store import read_credentials
from services.shared.clock import Clock

_TOKEN = re.compile(r"[!-~]{1,512}")
# SHA-256 of no bytes: a GET has no body.
_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True, slots=True)
class _Store:
    keys: tuple[str, str] | None
    region: str
    authorities: ssl.SSLContext | None


class Credentials:
    """What each source asks for."""

    def __init__(self, sources: ImportSources, *, clock: Clock) -> None:
        """Reads every file that `sources` names.

        Raises:
            OSError: one cannot be read, or holds something else.
        """
        self._clock = clock
        self._stores = {name: _read_store(store) for name, store in sources.s3.items()}
        self._tokens = _read_tokens(sources.hub) if sources.hub else {}

    def headers(self, file: RemoteFile, target: Target, *, tenant: str) -> Mapping[str, str]:
        """Returns the headers that prove a tenant's right to `file`. `target` is on the file's own host."""
        if file.commit and tenant in self._tokens:
            return {"Authorization": f"Bearer {self._tokens[tenant]}"}
        store = self._stores.get(file.store)
        if store is None or store.keys is None:
            return {}
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        signed: dict[str, str | list[str] | tuple[str]] = {
            "Host": host_header(target),
            "x-amz-content-sha256": _EMPTY,
            "x-amz-date": to_amz_date(now),
        }
        headers = sign_v4_s3(
            method="GET",
            url=SplitResult("https", host_header(target), target.path, "", ""),
            region=store.region,
            headers=signed,
            credentials=Keys(*store.keys),
            content_sha256=_EMPTY,
            date=now,
        )
        return {name: str(value) for name, value in headers.items() if name != "Host"}

    def authorities(self, file: RemoteFile) -> ssl.SSLContext | None:
        """Returns what the source's certificate is checked against; None for the system's authorities."""
        store = self._stores.get(file.store)
        return store.authorities if store else None


def _read_store(store: StoreSource) -> _Store:
    keys = read_credentials(store.credentials) if store.credentials else None
    authorities = ssl.create_default_context(cafile=store.ca_file) if store.ca_file else None
    return _Store(keys, store.region, authorities)


def _read_tokens(hub: HubSource) -> dict[str, str]:
    tokens = {}
    for tenant, path in hub.token_files.items():
        token = Path(path).read_text().strip()
        if not _TOKEN.fullmatch(token):
            raise OSError(f"{path} must hold one token and nothing else")
        tokens[tenant] = token
    return tokens
