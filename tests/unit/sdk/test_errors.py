import grpc
import pytest

from loraport import errors
from loraport.errors import LoraportError, error_from_rpc
from services.shared import errors as service
from services.shared.rpc.status import grpc_code, trailing_metadata


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "", trailers: tuple = ()) -> None:
        self._parts = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple:
        return self._parts[2]


def from_service(error: service.LoraportError) -> LoraportError:
    failed = Failed(grpc_code(error.code), error.message, trailing_metadata(error))
    return error_from_rpc(failed, endpoint="127.0.0.1:1", request_id="r1")


@pytest.mark.parametrize("reason", sorted(service.REASONS))
def test_every_reason_of_the_services_arrives_as_its_own_kind(reason: str) -> None:
    error = from_service(service.LoraportError(reason))
    assert type(error) is not LoraportError
    assert (error.reason, error.request_id) == (reason, "r1")
    assert "\n" not in str(error)


def test_details_arrive() -> None:
    faults = (service.Fault("a", "is wrong", "A"), service.Fault("b", "too"))
    error = from_service(service.LoraportError("INVALID_REQUEST", "two faults", faults=faults, metadata={"k": "v"}))
    assert isinstance(error, errors.InvalidArgumentError)
    assert error.faults == (errors.Fault("a", "is wrong", "A"), errors.Fault("b", "too"))
    assert (error.metadata, error.message) == ({"k": "v"}, "two faults")
    busy = from_service(service.LoraportError("OVERLOADED", retry_after_s=1.5))
    assert isinstance(busy, errors.UnavailableError)
    assert busy.retry_after == 1.5
    quota = from_service(service.LoraportError("QUOTA_EXCEEDED", quota=("tenants/acme", "60 a minute")))
    assert quota.faults == (errors.Fault("tenants/acme", "60 a minute"),)
    state = from_service(service.LoraportError("REVISION_NOT_ACTIVE", faults=(service.Fault("r", "PENDING"),)))
    assert state.faults[0].detail == "PENDING"


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connection refused (111)",
            errors.UnavailableError,
            "UNREACHABLE: cannot reach 127.0.0.1:1: connection refused",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Ssl handshake failed:\nCERTIFICATE_VERIFY_FAILED: self signed",
            errors.UnavailableError,
            "UNREACHABLE: cannot reach 127.0.0.1:1: its certificate is not signed by the given CA",
        ),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            errors.DeadlineExceededError,
            "TIMEOUT: no answer from 127.0.0.1:1 within the timeout",
        ),
        (grpc.StatusCode.CANCELLED, "Channel closed!", errors.CancelledError, "CANCELLED: the call was cancelled"),
        (
            grpc.StatusCode.CANCELLED,
            "Locally cancelled by application!",
            errors.CancelledError,
            "CANCELLED: the call was cancelled",
        ),
        (grpc.StatusCode.CANCELLED, "CANCELLED", errors.UnavailableError, "UNREACHABLE: 127.0.0.1:1 dropped the call"),
        (grpc.StatusCode.UNKNOWN, "a\nb", errors.InternalError, "UNKNOWN: a b"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too large",
            errors.ResourceExhaustedError,
            "RESOURCE_EXHAUSTED: too large",
        ),
    ],
)
def test_failures_that_no_service_wrote(code: grpc.StatusCode, details: str, kind: type, text: str) -> None:
    for trailers in ((), (("grpc-status-details-bin", b"\xff\xff"),)):
        error = error_from_rpc(Failed(code, details, trailers), endpoint="127.0.0.1:1")
        assert type(error) is kind
        assert str(error) == text
