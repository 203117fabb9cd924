"""Serve thousands of tenants' signed LoRA adapters on one shared base model: the client.

Names are loaded when they are first used: `loraport.bundle` lives in this package and must not need gRPC.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraport.aio import AsyncClient
    from loraport.client import Client
    from loraport.errors import (
        AbortedError,
        AlreadyExistsError,
        CancelledError,
        DataLossError,
        DeadlineExceededError,
        FailedPreconditionError,
        Fault,
        InternalError,
        InvalidArgumentError,
        LoraportError,
        NotFoundError,
        PermissionDeniedError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
        UnimplementedError,
    )
    from loraport.values import (
        Adapter,
        AliasTarget,
        Answer,
        Completion,
        Event,
        Finished,
        PositionLogprobs,
        Score,
        Started,
        TokenCount,
        TokenLogprob,
        Tokens,
        Usage,
    )

__all__ = [
    "AbortedError",
    "Adapter",
    "AliasTarget",
    "AlreadyExistsError",
    "Answer",
    "AsyncClient",
    "CancelledError",
    "Client",
    "Completion",
    "DataLossError",
    "DeadlineExceededError",
    "Event",
    "FailedPreconditionError",
    "Fault",
    "Finished",
    "InternalError",
    "InvalidArgumentError",
    "LoraportError",
    "NotFoundError",
    "PermissionDeniedError",
    "PositionLogprobs",
    "ResourceExhaustedError",
    "Score",
    "Started",
    "TokenCount",
    "TokenLogprob",
    "Tokens",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
]

_HOMES = {"AsyncClient": "aio", "Client": "client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name) or ("errors" if name.endswith("Error") or name == "Fault" else "values")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
