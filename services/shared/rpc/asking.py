"""One question to a peer, with the same patience for every call that may be made once or twice."""

import asyncio
from typing import Any

import grpc

from services.shared import tracing
from services.shared.errors import LoraportError
from services.shared.rpc.status import from_rpc_error

# Between the two tries: a registry whose database was busy has had time to finish a write.
PAUSE_S = 0.2


async def ask(method: Any, request: Any, *, timeout_s: float, unavailable: str) -> Any:
    """Returns the answer of `method`, a unary call of a stub that has the same effect made once or twice.

    A peer that has just come back is refused by its channel for as long as the channel waits before it connects again
    (`channels.CHANNEL_OPTIONS`: up to 2 s); so the call waits for the connection, within its time. A call that loses
    its connection on the way, or whose peer says itself that it is unavailable, is made once more.

    Raises:
        LoraportError: the peer's own reason; `unavailable` when it has given none within `timeout_s`.
    """
    try:
        return await _once(method, request, timeout_s)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise _meant(error, unavailable) from None
    await asyncio.sleep(PAUSE_S)
    try:
        return await _once(method, request, timeout_s)
    except grpc.RpcError as error:
        raise _meant(error, unavailable) from None


def _once(method: Any, request: Any, timeout_s: float) -> Any:
    return method(request, timeout=timeout_s, wait_for_ready=True, metadata=tracing.outgoing())


def _meant(error: grpc.RpcError, unavailable: str) -> LoraportError:
    known = from_rpc_error(error, unavailable=unavailable)
    if known.reason == "DEADLINE_EXCEEDED":  # ours, not the caller's
        return LoraportError(unavailable, retry_after_s=1.0)
    return known
