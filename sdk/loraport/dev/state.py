"""What a running stack is: written while it comes up, read by every later command."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from loraport.dev.credentials import write_private
from loraport.dev.layout import Layout, StackError
from loraport.dev.processes import ProcessRecord

SCHEMA = "loraport.stack.v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The processes of a stack in the order they were started.

    `complete` once all were healthy. `commands` holds the argument vectors of all that were to be started, by name:
    `up` may be killed between a start and the note of it.
    """

    port_base: int
    complete: bool
    processes: tuple[ProcessRecord, ...]
    commands: dict[str, list[str]]


def read_state(layout: Layout) -> StackState | None:
    """Returns what `up` noted, or None when there is nothing to be read."""
    try:
        value = json.loads(layout.state.read_bytes())
        if value["schema"] != SCHEMA:
            return None
        return StackState(
            port_base=value["port_base"],
            complete=value["complete"],
            processes=tuple(ProcessRecord(**row) for row in value["processes"]),
            commands={name: [str(word) for word in words] for name, words in value["commands"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_state(layout: Layout, state: StackState) -> None:
    """Notes what runs. Raises OSError."""
    value = {"schema": SCHEMA, **asdict(state)}
    write_private(layout.state, json.dumps(value, indent=1).encode())


def forget(layout: Layout) -> None:
    """Removes the notes of a stack that is gone."""
    layout.state.unlink(missing_ok=True)
    layout.endpoints.unlink(missing_ok=True)


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Keeps other commands from starting or stopping the same stack.

    Raises:
        StackError: another command is at it.
        OSError: the data directory cannot be written.
    """
    layout.lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another loraport dev command is at work on {layout.data}; wait for it") from None
        yield
    finally:
        os.close(descriptor)
