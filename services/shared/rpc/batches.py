"""Messages that carry much at a time, and are never too large."""

from collections import deque
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def some_of(queue: deque[M], most: int, max_bytes: int) -> list[M]:
    """Takes the first of a queue that is not empty: at most so many, of at most so many bytes together; one always."""
    some = [queue.popleft()]
    size = some[0].ByteSize()
    while queue and len(some) < most:
        size += queue[0].ByteSize()
        if size > max_bytes:
            break
        some.append(queue.popleft())
    return some
