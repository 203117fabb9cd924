"""What is looked at in the running stack, and what came of it, row by row."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loraport import Client
from tests.compose.fleet import CONTAINERS, Fleet, wait_for
from tests.compose.outside import OUTSIDE, outside_host

TENANT, PROMPT = "acme", "line 3 of"
ADAPTERS = {"helper": "alpha_8", "other": "alpha_1"}
# service → what must not be reachable from it.
WALLS = {
    "registry": ("store:9000", "board:6379"),
    "loader": ("database:5432", "board:6379"),
    "executor-0": ("database:5432", "store:9000"),
    "router": ("database:5432", "store:9000"),
    "board": ("registry:7401", "loader:7402"),
    "store": ("registry:7401", "database:5432"),
}
NEEDED = {"registry": "database:5432", "loader": "store:9000", "executor-0": "loader:7402", "router": "board:6379"}
CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 2).close()
        print(address)
    except OSError:
        pass
"""
UNWRITABLE = ("/x", "/etc/x", "/usr/bin/x", "/run/loraport/x", "/opt/x")
PYTHON = "/opt/loraport/bin/python"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    what: str
    passed: bool
    seconds: float
    seen: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gave: the tokens are the same as long as base, revision and sampling are."""

    revision_id: str
    token_ids: tuple[int, ...]


class Checks:
    """Collects the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, what: str, seen: str, *, started: float, passed: bool = True) -> None:
        """Notes one row."""
        self.rows.append(Row(what, passed, time.monotonic() - started, seen))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[list[str]]:
        """Notes a row for the block; what it raises is a failed one, and ends nothing else."""
        started, seen = time.monotonic(), list[str]()
        try:
            yield seen
        except Exception as error:
            self.add(what, " ".join(str(error).split())[:1500], started=started, passed=False)
        else:
            self.add(what, "; ".join(seen), started=started)

    def print(self) -> None:
        """Prints the table."""
        width = max(len(row.what) for row in self.rows)
        for row in self.rows:
            print(f"{row.what:<{width}}  {row.seconds:7.1f} s  {'PASS' if row.passed else 'FAIL'}  {row.seen}")

    def run(self, fleet: Fleet, work: Path, say: Callable[[str], None]) -> None:
        """Looks at everything. Raises RuntimeError when the stack does not come up at all."""
        say("up")
        started = time.monotonic()
        self.add("up until every container is healthy", f"{fleet.up():.1f} s", started=started)
        say("walls")
        with self.timed("users, file systems, capabilities") as seen:
            seen.append(hardened(fleet))
        with self.timed("no service reaches what it does not need") as seen:
            seen.append(walls(fleet))
        with self.timed("only the loader has a way out") as seen:
            seen.append(egress(fleet))
        with self.timed("notice board: what its users may not") as seen:
            seen.append(board_rules(fleet))
        with self.timed("keys lie where they are used only") as seen:
            seen.append(keys(fleet))
        say("publish and ask")
        with self.timed("tenant, key, signer, two adapters published") as seen:
            seen.append(publish(fleet))
        with fleet.client(work) as client:
            before = {name: ask(client, name) for name in ADAPTERS}
            self._kills(fleet, client, before, say)
        with self.timed("down and up again: all is there") as seen:
            fleet.down(volumes=False)
            fleet.up()
            with fleet.client(work) as client:
                seen.append(same(client, before))
        with self.timed("backup of the registry, while it runs") as seen:
            seen.append(fleet.upkeep("backup", "/tmp/registry.backup").split(": ", 1)[-1])
        with self.timed("the log holds together") as seen:
            verdict = fleet.operator("log", "verify")
            seen.append(str({key: verdict[key] for key in list(verdict)[:3]}))

    def _kills(self, fleet: Fleet, client: Client, before: dict[str, Answer], say: Callable[[str], None]) -> None:
        for name in CONTAINERS:
            say(f"kill {name}")
            with self.timed(f"kill -9 {name}") as seen:
                was = fleet.kill(name)
                asked, answered = wait_for(lambda: same(client, before), within_s=90, what="the first right answer")
                assert asked
                started = time.monotonic()
                now = fleet.wait_healthy(name, not_since=was.fresh, within_s=120)
                assert now.restarts > was.restarts or now.pid != was.pid
                seen.append(f"first right answers after {answered:.1f} s")
                seen.append(f"healthy {time.monotonic() - started:.1f} s later")
                seen.append(same(client, before))
        say("stop and start again")
        for name in ("registry", "loader", "executor-0", "router"):
            with self.timed(f"restart {name}") as seen:
                was = fleet.state(name)
                fleet.compose("restart", "-t", "30", name)
                fleet.wait_healthy(name, not_since=was.fresh, within_s=120)
                asked, answered = wait_for(lambda: same(client, before), within_s=60, what="the first right answer")
                seen.append(f"right answers {answered:.1f} s after it is healthy; {asked}")


def ask(client: Client, adapter: str) -> Answer:
    """Asks an adapter for twelve tokens, greedily."""
    done = client.generate(PROMPT, adapter=adapter, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert done.revision_id is not None
    return Answer(done.revision_id, tuple(done.token_ids))


def same(client: Client, before: dict[str, Answer]) -> str:
    """Asks all adapters again. Raises AssertionError when one answers otherwise."""
    for name, expected in before.items():
        found = ask(client, name)
        assert found == expected, f"{name} answered {found}, before {expected}"
    assert len({answer.token_ids for answer in before.values()}) == len(before), "the adapters cannot be told apart"
    return f"{len(before)} adapters answer as before"


def publish(fleet: Fleet) -> str:
    """Makes a tenant and publishes the adapters by the operator's command line."""
    fleet.operator("tenant", "create", TENANT)
    fleet.operator("key", "create", "--tenant", TENANT)
    fleet.operator("signer", "create", "--tenant", TENANT)
    for name, bundle in ADAPTERS.items():
        options = ("--tenant", TENANT, "--name", name, "--base", "tiny", "--approve", "--alias", "prod")
        published = fleet.operator("adapter", "register", f"/bundles/{bundle}", *options)
        assert published["state"] == "ACTIVE", published
    fleet.learn(TENANT)
    return ", ".join(ADAPTERS)


def hardened(fleet: Fleet) -> str:
    """Asks the engine, and the processes themselves."""
    for name in CONTAINERS:
        whole = fleet.inspect(name)
        host = whole["HostConfig"]
        assert whole["Config"]["User"] == "10001:10001", name
        assert host["ReadonlyRootfs"], name
        assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], None), name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert min(host["PidsLimit"], host["Memory"]) > 0, name
        secret = [
            entry for entry in whole["Config"]["Env"] or () if re.search("[0-9a-f]{40}", entry) and "SHA" not in entry
        ]
        assert not secret, f"{name}: {secret}"
        status = fleet.exec(name, "cat", "/proc/1/status")
        assert "NoNewPrivs:\t1" in status, name
        assert "CapEff:\t0000000000000000" in status, name
        assert "Seccomp:\t2" in status, name
        attempts = "; ".join(f"touch {place} 2>/dev/null && echo {place}" for place in UNWRITABLE)
        assert not fleet.exec(name, "sh", "-c", f"{attempts}; true").split(), name
    return f"{len(CONTAINERS)} containers: 10001, read-only, no capability, seccomp, nothing writable but volumes"


def reached(fleet: Fleet, name: str, *addresses: str) -> set[str]:
    """Returns those of the addresses that a container gets a connection to."""
    python = PYTHON if name in ("registry", "loader", "executor-0", "router") else "python3"
    return set(fleet.exec(name, python, "-c", CONNECT, *addresses).split())


def walls(fleet: Fleet) -> str:
    """Tries every connection that must not be, to every address; one that must be shows that the attempt works."""
    where = {name: fleet.addresses(name) for name in CONTAINERS}

    def of(name: str, port: str) -> list[str]:
        return [f"{address}:{port}" for address in where[name]]

    tried = 0
    for name, targets in WALLS.items():
        forbidden = [address for target in targets for address in of(*target.split(":"))]
        through = reached(fleet, name, *forbidden)
        assert not through, f"{name} reaches {through}"
        tried += len(forbidden)
    for name, target in NEEDED.items():
        assert reached(fleet, name, target) == {target}, f"{name} does not reach {target}"
    return f"{tried} connections refused, {len(NEEDED)} that must be are made"


def egress(fleet: Fleet) -> str:
    """Puts a host of the test's own outside and tries to reach it from everywhere."""
    with outside_host() as there:
        if not there:
            return "not looked at: no network namespace may be made here"
        assert reached(fleet, "loader", OUTSIDE), "the loader has no way out"
        leaks = [name for name in CONTAINERS if name != "loader" and reached(fleet, name, OUTSIDE)]
    assert not leaks, f"{leaks} have a way out"
    return f"a host outside answers the loader, and none of the other {len(CONTAINERS) - 1}"


def board_rules(fleet: Fleet) -> str:
    """Tries what a service that was taken over would try."""

    passwords = {user: fleet.read(f"secrets/board-{user}") for user in ("router", "executor")}

    def says(user: str, *command: str) -> str:
        login = ("--no-auth-warning", "--user", user, "--pass", passwords[user])
        return fleet.exec("board", "redis-cli", *login, *command, check=False)

    assert "OK" in says("executor", "SET", "loraport:residency:x", "1", "EX", "1")
    for kind in ("work", "quotas", "gauges"):
        assert says("router", "HSET", f"loraport:{kind}", "x", "1").strip().isdigit()
        assert says("router", "HDEL", f"loraport:{kind}", "x").strip().isdigit()
    refused = [
        ("executor", "SET", "loraport:work", "1"),
        ("executor", "GET", "loraport:residency:executor-0"),
        ("router", "SET", "loraport:residency:executor-0", "1"),
    ]
    for user in passwords:
        refused += [(user, "KEYS", "*"), (user, "EVAL", "return 1", "0"), (user, "CONFIG", "GET", "*")]
        refused += [(user, "FLUSHALL"), (user, "CLIENT", "LIST")]
    through = [entry for entry in refused if "NOPERM" not in says(*entry)]
    assert not through, through
    assert "NOAUTH" in fleet.exec("board", "redis-cli", "GET", "loraport:work", check=False)
    return f"{len(refused)} commands refused, and anybody without a password"


def keys(fleet: Fleet) -> str:
    """Looks at what each service has."""
    found = {name: set(fleet.exec(name, "ls", "/run/loraport").split()) for name in CONTAINERS}
    assert "root.key" not in set().union(*found.values()), "the root's key is in a service"
    assert "ca.key" not in set().union(*found.values()), "a CA's key is in a service"
    for key, holder in (("registry.key", "registry"), ("loader.key", "loader"), ("router.key", "router")):
        assert [name for name in CONTAINERS if key in found[name]] == [holder], key
    assert [name for name in CONTAINERS if "pepper" in found[name]] == ["registry", "router"]
    for name in CONTAINERS:
        modes = fleet.exec(name, "sh", "-c", "stat -c '%a %U %n' /run/loraport/*").splitlines()
        assert all(line.startswith("600 ") for line in modes), modes
    return f"{sum(map(len, found.values()))} files, each for its owner"
