"""A status is what it was made of when it comes back, and nothing of a stranger's."""

from google.rpc import status_pb2

from services.shared.errors import LoraportError
from services.shared.rpc.status import from_status, to_status


def test_a_status_comes_back_as_the_error_it_was_made_of() -> None:
    known = LoraportError("POOL_TOO_SMALL", "no room", retry_after_s=2.0)
    again = from_status(to_status(known), unavailable="EXECUTOR_UNAVAILABLE")
    assert (again.reason, again.message, again.retry_after_s) == ("POOL_TOO_SMALL", "no room", 2.0)
    strange = from_status(status_pb2.Status(code=13, message="stack trace"), unavailable="EXECUTOR_UNAVAILABLE")
    assert (strange.reason, "stack" in strange.message) == ("EXECUTOR_UNAVAILABLE", False)
