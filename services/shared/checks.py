"""A process's own checks of what it depends on, for `loraport doctor`: each says what it saw and what to do.

A check is a coroutine function that returns a `Finding`. One that raises, or takes longer than LIMIT_S, is itself a bad
finding: a check never breaks what it looks at, nor the call that asks.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509

from services.shared.catalog_client import CatalogClient
from services.shared.checkpoint import CheckpointKeeper
from services.shared.clock import Clock
from services.shared.trust import TrustStore

LIMIT_S = 10.0
DAY_S = 86_400.0
# A certificate that ends sooner is worth a word.
CERTIFICATE_DAYS = 14
# A file system with less room, of its size and in bytes.
DISK_PART, DISK_BYTES = 0.05, 1 << 30
ROOT_DAYS = 30
CONNECT_S = 3.0

State = Literal["GOOD", "WARNING", "BAD"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: `detail` is what was seen, `advice` what to do, empty for nothing."""

    state: State
    detail: str
    advice: str = ""


Check = Callable[[], Awaitable[Finding]]


async def run(checks: Mapping[str, Check]) -> dict[str, Finding]:
    """Runs checks side by side and returns their findings in order."""
    return dict(zip(checks, await asyncio.gather(*map(_one, checks.values())), strict=True))


async def _one(check: Check) -> Finding:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await check()
    except TimeoutError:
        return Finding("BAD", f"gave no answer in {LIMIT_S:g} s", "see the process's log")
    except Exception as error:
        return Finding("BAD", f"failed: {type(error).__name__}", "see the process's log")


def certificate(path: str, clock: Clock) -> Check:
    """Looks at how long a certificate is good for still."""

    async def check() -> Finding:
        found = x509.load_pem_x509_certificate(await asyncio.to_thread(Path(path).read_bytes))
        left_s = found.not_valid_after_utc.timestamp() - clock.now()
        began_s = clock.now() - found.not_valid_before_utc.timestamp()
        advice = "issue a new certificate for this service and restart it"
        if left_s <= 0:
            return Finding("BAD", f"expired {-left_s / DAY_S:.0f} days ago", advice)
        if began_s < 0:
            return Finding("BAD", "is not valid yet", "set this machine's clock")
        return Finding("WARNING" if left_s < CERTIFICATE_DAYS * DAY_S else "GOOD", f"{left_s / DAY_S:.0f} days left",
                       advice if left_s < CERTIFICATE_DAYS * DAY_S else "")  # fmt: skip

    return check


def disk(path: str) -> Check:
    """Looks at the room of the file system that holds `path`."""

    async def check() -> Finding:
        usage = await asyncio.to_thread(shutil.disk_usage, path)
        detail = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
        if usage.free < DISK_BYTES or usage.free < DISK_PART * usage.total:
            return Finding("WARNING", detail, f"make room on the file system of {Path(path).name or path}")
        return Finding("GOOD", detail)

    return check


def reachable(what: str, address: str, advice: str) -> Check:
    """Looks at whether something takes a connection at `host:port`."""

    async def check() -> Finding:
        host, _, port = address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S)
        except (OSError, TimeoutError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
            return Finding("BAD", f"{what} does not take a connection: {why}", advice)
        writer.close()
        return Finding("GOOD", f"{what} takes connections")

    return check


def trust_root(trust: TrustStore, clock: Clock) -> Check:
    """Looks at how long the newest trust root is good for still, and how old it is."""

    async def check() -> Finding:
        root, now = trust.root, clock.now()
        left_days, age_days = (root.expires - now) / DAY_S, (now - root.issued) / DAY_S
        detail = f"version {root.version}, {age_days:.0f} days old, {left_days:.0f} days left"
        advice = "issue the next root: loraport trust rotate ROLE"
        if left_days <= 0:
            return Finding("BAD", detail, advice)
        return Finding("WARNING", detail, advice) if left_days < ROOT_DAYS else Finding("GOOD", detail)

    return check


def catalog_synced(catalog: CatalogClient) -> Check:
    """Looks at whether the catalog has come, and is as new as the registry."""

    async def check() -> Finding:
        if not catalog.view.synced:
            return Finding("BAD", "no catalog has come yet", "see whether the registry serves, and its log")
        if not await catalog.catch_up():
            return Finding("BAD", "the registry does not answer", "see whether the registry serves, and its log")
        return Finding("GOOD", f"epoch {catalog.view.epoch}")

    return check


def checkpoint(keeper: CheckpointKeeper, clock: Clock) -> Check:
    """Looks at how old the newest believed checkpoint is: with a stale one nothing new is loaded."""

    async def check() -> Finding:
        if keeper.alarm:
            return Finding("BAD", "the registry tells two histories", "see: loraport log verify")
        if keeper.newest is None:
            return Finding("BAD", f"none is believed ({keeper.doubt})", "see whether the registry serves, and its log")
        age_s, left_s = clock.now() - keeper.newest.issued, keeper.newest.expires - clock.now()
        detail = f"{age_s:.0f} s old, {keeper.newest.tree_size} leaves"
        if left_s <= 0:
            return Finding("BAD", f"{detail}, stale", "see whether the registry serves, and both clocks")
        return Finding("GOOD", detail)

    return check
