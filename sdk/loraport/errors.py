"""What the client raises, and nothing else.

    LoraportError
    ├── InvalidArgumentError      the request cannot be right; `faults` lists every field at fault
    ├── UnauthenticatedError      no valid credential
    ├── PermissionDeniedError     this identity may not do this
    ├── NotFoundError             not there, or not visible to this caller
    ├── AlreadyExistsError
    ├── FailedPreconditionError   right in itself, but the state does not allow it
    ├── AbortedError              changed in between; read again
    ├── ResourceExhaustedError    a quota or a store is used up
    ├── UnavailableError          down, unreachable or overloaded; retry after `retry_after` seconds
    ├── DeadlineExceededError     took longer than the timeout
    ├── CancelledError            the call was cancelled
    ├── UnimplementedError        part of the contract, not built yet
    ├── DataLossError             stored bytes are not what was signed
    └── InternalError             a fault of the service; quote `metadata["incident"]`

The reason is stable and made for programs, the message is for people and may change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "loraport.dev"
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Fault:
    """One of the faults behind an error: what it is about, one sentence, and a stable code or empty."""

    subject: str
    detail: str
    code: str = ""


class LoraportError(Exception):
    """Base of everything that the client raises.

    Attributes:
        reason: UPPER_SNAKE, stable; `UNREACHABLE`, `TIMEOUT` and the like where no service answered.
        message: One line for a person.
        retry_after: Seconds after which the same call may succeed, None where that was not said.
        faults: Every fault that the service found.
        metadata: Further facts of the service, e.g. `incident`.
        request_id: Id of the call in the services' logs, empty where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after: float | None = None,
        faults: tuple[Fault, ...] = (),
        metadata: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after = retry_after
        self.faults = faults
        self.metadata = dict(metadata or {})
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.reason else self.message


class InvalidArgumentError(LoraportError):
    """The request cannot be right, whatever the state."""


class UnauthenticatedError(LoraportError):
    """The credential is missing, malformed, expired or revoked."""


class PermissionDeniedError(LoraportError):
    """The caller is known and may not do this."""


class NotFoundError(LoraportError):
    """The thing is not there, or not visible to this caller."""


class AlreadyExistsError(LoraportError):
    """The name or the thing is taken."""


class FailedPreconditionError(LoraportError):
    """The state does not allow it."""


class AbortedError(LoraportError):
    """The thing changed since it was read."""


class ResourceExhaustedError(LoraportError):
    """A quota, a store or a pool has no room left."""


class UnavailableError(LoraportError):
    """The service is down, unreachable or overloaded."""


class DeadlineExceededError(LoraportError):
    """The call took longer than its timeout."""


class CancelledError(LoraportError):
    """The call was cancelled before it ended."""


class UnimplementedError(LoraportError):
    """The call is not built yet, or the service is older than the client."""


class DataLossError(LoraportError):
    """Stored bytes are not what was signed; they were not used."""


class InternalError(LoraportError):
    """A fault of the service."""


_BY_CODE: Mapping[grpc.StatusCode, type[LoraportError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
        grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
        grpc.StatusCode.ABORTED: AbortedError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.CANCELLED: CancelledError,
        grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
        grpc.StatusCode.DATA_LOSS: DataLossError,
    }
)


def error_from_rpc(error: grpc.RpcError, *, endpoint: str, request_id: str = "") -> LoraportError:
    """Returns the error that a failed call means. `endpoint` (`host:port`) names the other end in the message."""
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    kind = _BY_CODE.get(code, InternalError)
    status = _status(error)
    if status is None:
        return _without_details(kind, code, error, endpoint, request_id)
    fields = _details(status)
    return kind(_one_line(status.message) or code.name, request_id=request_id, **fields)


def _status(error: grpc.RpcError) -> status_pb2.Status | None:
    trailers: Any = error.trailing_metadata() or ()  # type: ignore[attr-defined]
    for key, value in trailers:
        if key == _DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return None
            return status
    return None


def _details(status: status_pb2.Status) -> dict[str, Any]:
    fields: dict[str, Any] = {"reason": "", "faults": ()}
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        request = error_details_pb2.BadRequest()
        state = error_details_pb2.PreconditionFailure()
        quota = error_details_pb2.QuotaFailure()
        delay = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            fields |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif detail.Unpack(request):
            fields["faults"] += tuple(Fault(f.field, f.description, f.reason) for f in request.field_violations)
        elif detail.Unpack(state):
            fields["faults"] += tuple(Fault(f.subject, f.description, f.type) for f in state.violations)
        elif detail.Unpack(quota):
            fields["faults"] += tuple(Fault(f.subject, f.description) for f in quota.violations)
        elif detail.Unpack(delay):
            fields["retry_after"] = delay.retry_delay.ToNanoseconds() / 1e9
    return fields


# What gRPC says where this side has ended the call.
_CANCELLED_HERE = ("Locally cancelled", "Cancelled upon garbage collection", "Channel closed", "Channel deallocated")


def _without_details(
    kind: type[LoraportError], code: grpc.StatusCode, error: grpc.RpcError, endpoint: str, request_id: str
) -> LoraportError:
    """No loraport service wrote this status: the connection, the deadline or gRPC itself did."""
    text = _one_line(error.details() or "")  # type: ignore[attr-defined]
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"cannot reach {endpoint}: {_connection_fault(text)}", reason="UNREACHABLE", request_id=request_id
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(
                f"no answer from {endpoint} within the timeout", reason="TIMEOUT", request_id=request_id
            )
        case grpc.StatusCode.CANCELLED if not any(sign in text for sign in _CANCELLED_HERE):
            # A server that stops drops what has reached it and nobody has looked at.
            return UnavailableError(f"{endpoint} dropped the call", reason="UNREACHABLE", request_id=request_id)
        case grpc.StatusCode.CANCELLED:
            return CancelledError("the call was cancelled", reason="CANCELLED", request_id=request_id)
        case _:
            return kind(text or code.name, reason=code.name, request_id=request_id)


def _connection_fault(text: str) -> str:
    """gRPC's own text lists addresses and nested causes; a person needs the last cause."""
    lower = text.lower()
    for sign, meaning in (
        ("certificate_verify_failed", "its certificate is not signed by the given CA"),
        ("certificate verify failed", "its certificate is not signed by the given CA"),
        ("hostname verification", "its certificate is for another host"),
        ("handshake", "the TLS handshake failed"),
        ("ssl", "the TLS handshake failed"),
        ("connection refused", "connection refused"),
        ("connection reset", "the connection broke"),
        ("socket closed", "the connection broke"),
        ("name resolution", "the host name is unknown"),
        ("domain name", "the host name is unknown"),
        ("dns", "the host name is unknown"),
    ):
        if sign in lower:
            return meaning
    return text or "no connection"


def _one_line(text: str) -> str:
    return " ".join(text.split())
