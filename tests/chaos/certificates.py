"""A service's certificate runs out, and is renewed."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from loraport.dev.credentials import TRUST_DOMAIN, write_private
from loraport.dev.pki import Pair, days_left, make_leaf
from tests.chaos.world import World
from tests.e2e.harness import environment

LIVES_S, DAY_S = 15.0, 86_400
# How long somebody waits in vain for a service that nobody may talk to.
IN_VAIN_S = 8.0


@contextlib.contextmanager
def expired(world: World, name: str) -> Iterator[None]:
    """Lets a service run with a certificate that runs out: first with its old connections, then for all new ones.

    Services read their certificates when they start, so the end is the same as the beginning: a certificate, a restart.
    """
    pki = world.stack.data / "pki"
    certificate, key = pki / f"{name}.pem", pki / f"{name}.key"
    usual = Pair(certificate.read_bytes(), key.read_bytes())
    authority = Pair((pki / "ca.pem").read_bytes(), (pki / "ca.key").read_bytes())
    role = name if name in ("registry", "loader", "router") else f"executor/{name}"
    short = make_leaf(authority, uri=f"spiffe://{TRUST_DOMAIN}/service/{role}", days=LIVES_S / DAY_S)
    try:
        for path, data in ((key, short.key), (certificate, short.certificate)):
            write_private(path, data)
        _restarted(world, name, within_s=LIVES_S)
        while days_left(short.certificate, now=datetime.now(UTC)) >= 0:
            time.sleep(0.1)
        time.sleep(1.0)
        # From here on every connection to it is a new one. It is not waited for: nobody believes it.
        _restarted(world, name, within_s=IN_VAIN_S)
        doctor = world.stack.cli("doctor")
        assert doctor.code == 1, "doctor found nothing wrong"
        yield
    finally:
        for path, data in ((key, usual.key), (certificate, usual.certificate)):
            write_private(path, data)
        world.restart(name)


def _restarted(world: World, name: str, *, within_s: float) -> None:
    command = world.stack.command("dev", "restart", name)
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, env=environment(), timeout=within_s, check=False)
