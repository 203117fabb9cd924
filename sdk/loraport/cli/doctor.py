"""`loraport doctor`: looks at clocks, certificates, keys, store, notice board, disks, versions; says what to do."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loraport.cli.views import DEFAULT_DATA, Data, Json, print_json, print_table, say

if TYPE_CHECKING:
    from loraport.operations import OperationsClient

GOOD, WARNING, BAD = "good", "warning", "bad"
# Tickets, sessions and checkpoints are dated: clocks further apart than this begin to refuse them, in seconds.
CLOCK_WARNING_S, CLOCK_BAD_S = 1.0, 10.0
# API keys that are older should have been rotated.
KEY_DAYS = 365
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Found:
    """One finding: who looked, at what, what was seen, what to do."""

    process: str
    check: str
    state: str
    detail: str
    advice: str = ""


def doctor(data: Data = DEFAULT_DATA, as_json: Json = False) -> None:
    """Check a running stack and say what to do about what is not well.

    Exit code 0 when nothing is bad (there may be warnings), 1 when something is.
    """
    from loraport.operations import OperationsClient

    with OperationsClient.local(data) as operations:
        found = [*_processes(operations), *_own_checks(operations)]
    found += [*_keys(data), *_disk(data)]
    bad = sum(one.state == BAD for one in found)
    warnings = sum(one.state == WARNING for one in found)
    if as_json:
        print_json({"bad_count": bad, "warning_count": warnings, "findings": [asdict(one) for one in found]})
    else:
        columns = ("process", "check", "state", "detail")
        print_table(columns, [[one.process, one.check, one.state, one.detail] for one in found])
        for one in found:
            if one.advice:
                say(f"{one.process}, {one.check}: {one.advice}")
        say(f"{len(found)} checks, {warnings} warnings, {bad} bad")
    if bad:
        raise typer.Exit(1)


def _processes(operations: "OperationsClient") -> Iterator[Found]:
    """Who answers, whose clock is off, who is of another release."""
    from loraport.errors import LoraportError

    asked_s = time.time()
    processes = operations.processes()
    # Asked all at once: whatever an answer's clock says lies between the two.
    earliest_s, latest_s = asked_s, time.time()
    releases: dict[str, str] = {}
    for name, one in processes.items():
        if isinstance(one, LoraportError):
            yield Found(name, "answers", BAD, str(one), "see its log; on a local stack: loraport dev status")
            continue
        up_s = one.now_time.ToNanoseconds() / 1e9 - one.start_time.ToNanoseconds() / 1e9
        yield Found(name, "answers", GOOD, f"{one.service} {one.version}, up {up_s:.0f} s")
        releases[name] = one.version
        yield _clock(name, one.now_time.ToNanoseconds() / 1e9, earliest_s, latest_s)
    if len(set(releases.values())) > 1:
        told = ", ".join(f"{name} {version}" for name, version in sorted(releases.items()))
        yield Found(
            "fleet", "versions", WARNING, told, "finish the upgrade: restart the older ones with the newer release"
        )
    elif releases:
        yield Found("fleet", "versions", GOOD, f"all are {next(iter(releases.values()))}")


def _clock(name: str, now_s: float, earliest_s: float, latest_s: float) -> Found:
    off_s = max(0.0, earliest_s - now_s, now_s - latest_s)
    state = BAD if off_s > CLOCK_BAD_S else WARNING if off_s > CLOCK_WARNING_S else GOOD
    advice = "" if state == GOOD else "set its machine's clock (NTP): what is signed is dated"
    return Found(name, "clock", state, f"{off_s:.1f} s from this machine's", advice)


def _own_checks(operations: "OperationsClient") -> Iterator[Found]:
    from loraport.errors import LoraportError
    from loraport.telemetry.v1 import telemetry_service_pb2 as pb

    for name, answer in operations.checks().items():
        if isinstance(answer, LoraportError):
            yield Found(name, "its own checks", BAD, str(answer), "see its log")
            continue
        for check in answer.checks:
            state = pb.Check.State.Name(check.state).removeprefix("STATE_").lower()
            yield Found(name, check.name, state, check.detail, check.advice)


def _keys(data: Path) -> Iterator[Found]:
    """API keys that are old, or end soon; and whether the registry answers an admin at all."""
    from loraport.admin import AdminClient
    from loraport.errors import LoraportError

    now, old, ending, active = time.time(), [], [], 0
    try:
        with AdminClient.local(data) as admin:
            for tenant in admin.list_tenants():
                short = tenant.name.rpartition("/")[2]
                for key in admin.list_api_keys(short):
                    if key.HasField("revoke_time"):
                        continue
                    active += 1
                    name = f"{short}/{key.name.rpartition('/')[2]}"
                    if now - key.create_time.ToSeconds() > KEY_DAYS * DAY_S:
                        old.append(name)
                    if key.HasField("expire_time") and 0 < key.expire_time.ToSeconds() - now < 14 * DAY_S:
                        ending.append(name)
    except LoraportError as error:
        yield Found("registry", "API keys", BAD, str(error), "see its log; on a local stack: loraport dev status")
        return
    if old:
        detail = f"{len(old)} of {active} are older than {KEY_DAYS} days: {', '.join(old[:5])}"
        yield Found("registry", "API keys", WARNING, detail, "replace each: loraport key rotate KEY --tenant TENANT")
    if ending:
        yield Found(
            "registry", "API keys", WARNING, f"{len(ending)} of {active} end within 14 days: {', '.join(ending[:5])}"
        )
    if not (old or ending):
        yield Found("registry", "API keys", GOOD, f"{active} in use, none older than {KEY_DAYS} days")


def _disk(data: Path) -> Iterator[Found]:
    usage = shutil.disk_usage(data)
    low = usage.free < 1 << 30 or usage.free < 0.05 * usage.total
    detail = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
    advice = "make room: logs, store and database of a local stack lie here" if low else ""
    yield Found("this machine", "data directory", WARNING if low else GOOD, detail, advice)
