import grpc
import pytest
from google.rpc import error_details_pb2

from services.shared.errors import DOMAIN, REASONS, Code, Fault, FaultList, LoraportError
from services.shared.rpc.status import DETAILS_KEY, from_rpc_error, grpc_code, to_status, trailing_metadata


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, trailers: tuple = ()) -> None:
        self._code, self._trailers = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> tuple:
        return self._trailers


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_travels_whole(reason: str) -> None:
    error = LoraportError(reason, "what happened", retry_after_s=1.5, metadata={"executor": "e0"})
    status = to_status(error)
    infos = [d for d in status.details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1
    back = from_rpc_error(Failed(grpc_code(error.code), trailing_metadata(error)), unavailable="STORE_UNAVAILABLE")
    assert (back.reason, back.code, back.message) == (reason, error.code, "what happened")
    assert back.retry_after_s == 1.5
    assert back.metadata == {"executor": "e0"}


def test_reasons_are_upper_snake_and_explained() -> None:
    for reason, (code, meaning) in REASONS.items():
        assert reason == reason.upper()
        assert len(reason) <= 63
        assert isinstance(code, Code)
        assert meaning.endswith(".")


def test_faults_become_one_violation_each() -> None:
    faults = FaultList()
    faults.require(False, "temperature", "must be >= 0")
    faults.require(True, "top_p", "never seen")
    faults.add("max_tokens", "must be >= 1")
    with pytest.raises(LoraportError) as caught:
        faults.raise_if_any()
    detail = error_details_pb2.BadRequest()
    assert to_status(caught.value).details[1].Unpack(detail)
    assert [v.field for v in detail.field_violations] == ["temperature", "max_tokens"]
    assert "temperature" in caught.value.message


def test_a_thousand_faults_fit_the_trailers() -> None:
    error = LoraportError("INVALID_MANIFEST", faults=[Fault("x" * 4000, "y" * 4000)] * 1000)
    assert len(dict(trailing_metadata(error))[DETAILS_KEY]) < 16_384


def test_foreign_failures_become_the_callers_reason() -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE), unavailable="LOADER_UNAVAILABLE")
    assert (error.reason, error.code) == ("LOADER_UNAVAILABLE", Code.UNAVAILABLE)
    garbage = Failed(grpc.StatusCode.INTERNAL, ((DETAILS_KEY, b"\xff\xff"),))
    assert from_rpc_error(garbage, unavailable="LOADER_UNAVAILABLE").reason == "LOADER_UNAVAILABLE"
    late = from_rpc_error(Failed(grpc.StatusCode.DEADLINE_EXCEEDED), unavailable="LOADER_UNAVAILABLE")
    assert late.reason == "DEADLINE_EXCEEDED"


def test_domain_is_fixed() -> None:
    info = error_details_pb2.ErrorInfo()
    assert to_status(LoraportError("OVERLOADED")).details[0].Unpack(info)
    assert info.domain == DOMAIN
