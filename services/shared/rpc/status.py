"""`LoraportError` to and from `google.rpc.Status`, with exactly one ErrorInfo."""

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from services.shared.errors import DOMAIN, REASONS, Code, LoraportError

DETAILS_KEY = "grpc-status-details-bin"
# Metadata of a call is limited to 8 KiB on the wire, where the details may travel as base64 and every byte of the
# message that is not plain ASCII as three. What is longer is cut, else the caller would get no status at all.
MAX_FAULTS = 24
MAX_FAULTS_BYTES = 3 << 10
MAX_TEXT = 240
MAX_MESSAGE_BYTES = 1 << 10


def clip(message: str) -> str:
    """Returns as much of a status message as fits its share of a call's metadata."""
    room = MAX_MESSAGE_BYTES
    for index, character in enumerate(message):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return message[:index]
    return message


def to_status(error: LoraportError) -> status_pb2.Status:
    """Returns the wire form of an error."""
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if error.faults and error.code == Code.INVALID_ARGUMENT:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=fault.subject[:MAX_TEXT], description=fault.detail[:MAX_TEXT], reason=fault.code
            )
            for fault in error.faults[:MAX_FAULTS]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=_fitting(violations)))
    elif error.faults:
        preconditions = [
            error_details_pb2.PreconditionFailure.Violation(
                type=fault.code or error.reason,
                subject=fault.subject[:MAX_TEXT],
                description=fault.detail[:MAX_TEXT],
            )
            for fault in error.faults[:MAX_FAULTS]
        ]
        details.append(error_details_pb2.PreconditionFailure(violations=_fitting(preconditions)))
    if error.quota is not None:
        subject, description = error.quota
        details.append(
            error_details_pb2.QuotaFailure(
                violations=[error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)]
            )
        )
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=int(error.code), message=clip(error.message))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _fitting(violations: list[Any]) -> list[Any]:
    """Returns the first violations that fit together; the first one always does."""
    room = MAX_FAULTS_BYTES
    for index, violation in enumerate(violations):
        room -= violation.ByteSize() + 4
        if room < 0:
            return violations[: max(index, 1)]
    return violations


def trailing_metadata(error: LoraportError) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailers that carry the status's details."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def grpc_code(code: Code) -> grpc.StatusCode:
    """Returns grpc's own enum member."""
    return next(member for member in grpc.StatusCode if member.value[0] == int(code))


def from_rpc_error(error: grpc.RpcError, *, unavailable: str) -> LoraportError:
    """Returns what a peer's failed call means for the caller.

    A status made by a loraport service keeps its reason and retry delay. UNAVAILABLE without details, and any
    status that no loraport service made, becomes `unavailable`; a passed deadline stays one.
    """
    code = error.code()  # type: ignore[attr-defined]
    for data in details_of(error):
        parsed = _parse(data)
        if parsed is not None:
            return parsed
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return LoraportError("DEADLINE_EXCEEDED")
    return LoraportError(unavailable, retry_after_s=1.0)


def connection_broke(error: grpc.RpcError) -> bool:
    """Says whether a call failed with its connection and not by the peer's word: it may be tried on a new one."""
    return bool(error.code() == grpc.StatusCode.UNAVAILABLE and not details_of(error))  # type: ignore[attr-defined]


def details_of(error: grpc.RpcError) -> list[bytes]:
    """Returns the serialized statuses in a failed call's trailers."""
    trailers: Any = error.trailing_metadata() or ()  # type: ignore[attr-defined]
    return [value for key, value in trailers if key == DETAILS_KEY]


def from_status(status: status_pb2.Status, *, unavailable: str) -> LoraportError:
    """Returns the error that a peer made a status of, `unavailable` where no loraport service did; it is not OK."""
    if (known := _known(status)) is not None:
        return known
    return LoraportError(unavailable, retry_after_s=1.0)


def _parse(data: bytes) -> LoraportError | None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(data)
    except DecodeError:
        return None
    return _known(status)


def _known(status: status_pb2.Status) -> LoraportError | None:
    """Returns the error that a loraport service made a status of; None when none did."""
    reason, retry, metadata = "", None, {}
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        delay = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
    if reason not in REASONS:
        return None
    return LoraportError(reason, status.message, retry_after_s=retry, metadata=metadata)
