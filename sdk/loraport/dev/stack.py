"""A local stack: up, status, down.

`up` decides everything first (bases, ports, programs), then starts all processes, waits until they are healthy, and
registers the base models. What was started is on disk before anything is waited for, so that a stack whose `up` was
killed is found and ended by the next `up` or `down`. Whatever fails on the way, nothing is left running.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraport.admin import AdminClient
from loraport.dev.bases import DEFAULT_BASE, ensure_default_base, parse_bases, plan_executors, read_bases
from loraport.dev.commands import (
    Program,
    StackPlan,
    environment,
    make_endpoints,
    make_programs,
    rclone_program,
    s3_environment,
    valkey_program,
)
from loraport.dev.credentials import ensure_credentials, s3_credentials, write_private
from loraport.dev.health import HealthProbe, accepts, port_free, wait_ready
from loraport.dev.layout import DEFAULT_PORT_BASE, ENDPOINTS_SCHEMA, Layout, Ports, StackError, read_endpoints
from loraport.dev.processes import ProcessRecord, find, find_by_command, spawn, stop_all
from loraport.dev.state import StackState, forget, locked, read_state, write_state
from loraport.errors import LoraportError

DEFAULT_DTYPE = "float32"
READY_TIMEOUT_S = 300.0
PLACEABLE_TIMEOUT_S = 120.0
DRAIN_S = 25.0
STATUS_TIMEOUT_S = 3.0
HIGHEST_PORT_BASE = 65_535 - 40
# Users first, storage last, so that a request in flight finds everything it needs until it has ended.
STOP_ORDER = (("router",), ("executor",), ("loader",), ("registry",), ("s3", "valkey"))

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `up` was asked for. `bases` are `[NAME=]DIR` arguments; none means the default base.

    None means that nothing was asked for: the default where a stack is started, whatever it is where one runs.
    """

    data: Path
    port_base: int | None = None
    bases: tuple[str, ...] = ()
    executors: int | None = None
    dtype: str | None = None
    dedicated: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process of a stack as it is now. `state` is `serving`, `starting` or `gone`."""

    name: str
    pid: int
    port: int
    state: str
    log: str


def up(options: UpOptions, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Starts a stack and returns its endpoints, and whether it ran already.

    Raises:
        StackError: it cannot be started, and nothing is left running; or one runs that is not what was asked for.
    """
    layout = Layout.at(options.data)
    try:
        with locked(layout):
            running = read_state(layout)
            if running is not None and running.complete and all(map(find, running.processes)):
                endpoints = read_endpoints(layout.data)
                _refuse_other(options, running, endpoints)
                return endpoints, True
            if running is not None:
                progress("ending what an earlier stack left behind")
                _stop(layout, running)
            return _start(layout, options, progress), False
    except OSError as error:
        where = error.filename or layout.data
        raise StackError(f"cannot use the data directory: {where}: {error.strerror or error}") from None


def _refuse_other(options: UpOptions, state: StackState, endpoints: dict[str, Any]) -> None:
    """Raises StackError when the stack that runs is not the one that was asked for: it would be taken for it."""
    bases = {name: str(path) for name, path in parse_bases(options.bases).items()}
    per_base = len(endpoints["executors"]) // max(1, len(endpoints["bases"]))
    asked = {
        "--port-base": (options.port_base, state.port_base),
        "--base": (bases or None, endpoints["bases"]),
        "--executors": (options.executors, per_base),
        "--dtype": (options.dtype, endpoints["dtype"]),
        "--dedicated": (options.dedicated, endpoints.get("dedicated", False)),
    }
    other = [name for name, (wanted, present) in asked.items() if wanted is not None and wanted != present]
    if other:
        raise StackError(
            f"a stack runs at {options.data} with another {' and '.join(other)}; "
            f"stop it first: loraport dev down --data {options.data}"
        )


def down(data: Path) -> list[str]:
    """Ends the stack at `data` and returns the names of the processes that ran.

    Raises:
        StackError: another command is at work on it, or the directory cannot be used.
    """
    layout = Layout.at(data)
    if not layout.state.exists():
        return []
    try:
        with locked(layout):
            state = read_state(layout)
            return _stop(layout, state) if state is not None else []
    except OSError as error:
        raise StackError(f"cannot use {error.filename or layout.data}: {error.strerror or error}") from None


def restart(data: Path, name: str, progress: Progress) -> ProcessRecord:
    """Ends one process of the stack at `data` as `down` would, starts it again and waits until it serves.

    Raises:
        StackError: there is no such process, or it does not come up; the others run on.
    """
    layout = Layout.at(data)
    try:
        with locked(layout):
            state = read_state(layout)
            if state is None or not state.complete:
                raise StackError(f"no stack at {data}; start one with: loraport dev up")
            old = next((record for record in state.processes if record.name == name), None)
            if old is None:
                raise StackError(f"no process {name}; there are {', '.join(r.name for r in state.processes)}")
            progress(f"{name}: stopping")
            stop_all([old], grace_s=DRAIN_S)
            env = s3_environment(*s3_credentials(layout)) if name == "s3" else ()
            program = Program(name=name, kind=name, command=tuple(state.commands[name]), port=old.port, env=env)
            new = _spawn(layout, program)
            records = tuple(new if record is old else record for record in state.processes)
            write_state(layout, replace(state, processes=records))
            probe = HealthProbe(layout)
            try:
                wait_ready(layout, [new], lambda record: _ready(probe, record), progress, timeout_s=READY_TIMEOUT_S)
            finally:
                probe.close()
            return new
    except OSError as error:
        raise StackError(f"cannot use {error.filename or layout.data}: {error.strerror or error}") from None


def status(data: Path) -> list[ProcessStatus]:
    """Returns the processes of the stack at `data`, none when there is no stack."""
    layout = Layout.at(data)
    state = read_state(layout)
    if state is None:
        return []
    probe = HealthProbe(layout, timeout_s=STATUS_TIMEOUT_S)
    try:
        return [
            ProcessStatus(
                name=record.name,
                pid=record.pid,
                port=record.port,
                state="gone" if find(record) is None else ("serving" if _ready(probe, record) else "starting"),
                log=str(layout.log(record.name)),
            )
            for record in state.processes
        ]
    finally:
        probe.close()


def _start(layout: Layout, options: UpOptions, progress: Progress) -> dict[str, Any]:
    plan = _plan(layout, options, progress)
    ensure_credentials(layout, [executor.name for executor in plan.executors])
    programs = make_programs(plan)
    commands = {program.name: list(program.command) for program in programs}
    state = StackState(port_base=plan.ports.base, complete=False, processes=(), commands=commands)
    write_state(layout, state)
    try:
        for program in programs:
            progress(f"{program.name}: starting")
            state = replace(state, processes=(*state.processes, _spawn(layout, program)))
            write_state(layout, state)
        _bring_up(plan, programs, state.processes, progress)
        endpoints = make_endpoints(plan)
        write_private(layout.endpoints, json.dumps({"schema": ENDPOINTS_SCHEMA, **endpoints}, indent=1).encode())
        write_state(layout, replace(state, complete=True))
    except BaseException:
        stop_all(_alive(state), grace_s=3.0)
        forget(layout)
        raise
    return read_endpoints(layout.data)


def _plan(layout: Layout, options: UpOptions, progress: Progress) -> StackPlan:
    port_base = DEFAULT_PORT_BASE if options.port_base is None else options.port_base
    if not 1024 <= port_base <= HIGHEST_PORT_BASE:
        raise StackError(f"--port-base must be in [1024, {HIGHEST_PORT_BASE}], not {port_base}")
    valkey_program()
    rclone_program()
    directories = parse_bases(options.bases)
    names = list(directories) or [DEFAULT_BASE]
    executors = plan_executors(names, per_base=options.executors or 1)
    ports = Ports(port_base)
    for what, port in ports.used(len(executors)):
        if not port_free(port):
            raise StackError(f"port {port} ({what}) is taken; choose others with --port-base N")
    directories = directories or {DEFAULT_BASE: ensure_default_base(layout, progress)}
    bases = read_bases(directories, progress)
    return StackPlan(
        layout=layout,
        ports=ports,
        bases=bases,
        executors=executors,
        dtype=options.dtype or DEFAULT_DTYPE,
        dedicated=bool(options.dedicated),
    )


def _spawn(layout: Layout, program: Program) -> ProcessRecord:
    log = layout.log(program.name)
    # One log per run: what an earlier run wrote would be taken for what this one does.
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    return spawn(program.name, program.command, port=program.port, log=log, env=environment(program))


def _bring_up(
    plan: StackPlan, programs: Sequence[Program], records: Sequence[ProcessRecord], progress: Progress
) -> None:
    """Waits for the registry, registers the bases, then waits for everything."""
    probe = HealthProbe(plan.layout)
    kinds = {program.name: program.kind for program in programs}
    first = [record for record in records if kinds[record.name] in ("valkey", "s3", "registry")]
    rest = [record for record in records if record not in first]

    def ready(record: ProcessRecord) -> bool:
        return _ready(probe, record)

    try:
        wait_ready(plan.layout, first, ready, progress, timeout_s=READY_TIMEOUT_S)
        _register_bases(plan, progress)
        # The slowest, an executor, last: it is the one whose progress is shown.
        rest.sort(key=lambda record: kinds[record.name] == "executor")
        wait_ready(plan.layout, rest, ready, progress, timeout_s=READY_TIMEOUT_S)
        _wait_placeable(plan, progress)
    finally:
        probe.close()


def _ready(probe: HealthProbe, record: ProcessRecord) -> bool:
    if record.name in ("valkey", "s3"):
        return accepts(record.port)
    return probe.serving(record.port)


def _wait_placeable(plan: StackPlan, progress: Progress) -> None:
    """Waits until the router has heard of every executor, so that the first request finds one."""
    deadline = time.monotonic() + PLACEABLE_TIMEOUT_S
    with _admin(plan) as admin:
        while True:
            missing = {executor.name for executor in plan.executors}
            with contextlib.suppress(LoraportError):
                missing -= {executor.executor for executor in admin.residency() if executor.serving}
            if not missing:
                return
            if time.monotonic() > deadline:
                raise StackError(f"the router does not reach {min(missing)}; see {plan.layout.log('router')}")
            progress(f"router: waiting to hear from {', '.join(sorted(missing))}")
            time.sleep(0.1)


def _admin(plan: StackPlan) -> AdminClient:
    layout, endpoints = plan.layout, make_endpoints(plan)
    return AdminClient(
        registry=endpoints["registry"],
        router_admin=endpoints["router_admin"],
        loader_upload=endpoints["loader_upload"],
        ca=layout.certificate("ca").read_bytes(),
        certificate=layout.certificate("admin").read_bytes(),
        key=layout.private_key("admin").read_bytes(),
    )


def _register_bases(plan: StackPlan, progress: Progress) -> None:
    with _admin(plan) as admin:
        for base in plan.bases:
            progress(f"base {base.name}: registering")
            try:
                admin.create_base_model(base.name, base.spec)
            except LoraportError as error:
                if error.reason == "BASE_MODEL_EXISTS":
                    raise StackError(
                        f"--base {base.name}: this data directory knows another model by that name; "
                        "use another name, or another --data"
                    ) from None
                raise StackError(f"--base {base.name}: {error}") from None


def _stop(layout: Layout, state: StackState) -> list[str]:
    """Ends the processes in order, forgets the stack, and returns the names of those that ran."""
    alive = _alive(state)
    remaining = list(alive)
    for group in STOP_ORDER:
        members = [record for record in remaining if _kind(record) in group]
        remaining = [record for record in remaining if record not in members]
        stop_all(members, grace_s=DRAIN_S)
    forget(layout)
    return [record.name for record in alive]


def _alive(state: StackState) -> list[ProcessRecord]:
    """Returns what runs of a stack, noted or not."""
    noted = [record for record in state.processes if find(record) is not None]
    pids = {record.pid for record in noted}
    return noted + [record for record in find_by_command(state.commands) if record.pid not in pids]


def _kind(record: ProcessRecord) -> str:
    return record.name if record.name in ("router", "loader", "registry", "s3", "valkey") else "executor"
