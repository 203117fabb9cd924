"""One question to the registry, with the same patience for every call that may be made once or twice."""

import asyncio
from typing import Any

import grpc

from services.shared import tracing
from services.shared.errors import LoraportError
from services.shared.rpc.status import from_rpc_error

CALL_S = 5.0
# Between the two tries: a registry whose database was busy has had time to finish a write.
PAUSE_S = 0.2
UNAVAILABLE = "REGISTRY_UNAVAILABLE"


async def ask_registry(method: Any, request: Any, *, timeout_s: float = CALL_S) -> Any:
    """Returns the answer of `method`, a unary call of a stub that has the same effect made once or twice.

    A registry that has just come back is refused by its channel for as long as the channel waits before it connects
    again (`channels.CHANNEL_OPTIONS`: up to 2 s); so the call waits for the connection, within its time. A call that
    loses its connection on the way, or whose peer says itself that it is unavailable, is made once more, and has its
    whole time again.

    Raises:
        LoraportError: the registry's own reason; REGISTRY_UNAVAILABLE when it has given none within `timeout_s`, or,
            where the call was made twice, within twice that and `PAUSE_S`.
    """
    for last in (False, True):
        try:
            return await method(request, timeout=timeout_s, wait_for_ready=True, metadata=tracing.outgoing())
        except grpc.RpcError as error:
            if last or error.code() != grpc.StatusCode.UNAVAILABLE:
                raise _meant(error) from None
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable")


def _meant(error: grpc.RpcError) -> LoraportError:
    known = from_rpc_error(error, unavailable=UNAVAILABLE)
    if known.reason == "DEADLINE_EXCEEDED":  # ours, not the caller's
        return LoraportError(UNAVAILABLE, retry_after_s=1.0)
    return known
