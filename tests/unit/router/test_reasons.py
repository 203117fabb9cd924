"""Every reason of the table is either told to the caller of a request or known never to come from an executor."""

import pytest

from services.executor.wire import _FAILURES, _REFUSALS
from services.router.reasons import AS_IT_IS, IN_OTHER_WORDS, for_the_caller
from services.shared.errors import REASONS, Code, LoraportError

# From an executor that computes a request these are a fault between the services. A new reason that is in none of the
# three sets fails below: whoever adds it decides what a caller is told.
NEVER = frozenset(
    {
        # its own identity, its own request, another service's or another call's affair
        "INVALID_CREDENTIAL", "NOT_ALLOWED", "INVALID_SESSION", "SOURCE_NOT_ALLOWED", "UNTRUSTED_SIGNER",
        "UNTRUSTED_VERIFIER", "DEADLINE_REQUIRED", "INVALID_NAME", "INVALID_PAGE_TOKEN", "INVALID_MANIFEST",
        "INVALID_VERIFICATION", "INVALID_BASE_MODEL", "INVALID_KEY", "UPLOAD_TOO_LARGE", "ADAPTER_NOT_FOUND",
        "REVISION_NOT_RESIDENT", "TENANT_NOT_FOUND", "BASE_MODEL_NOT_FOUND", "KEY_NOT_FOUND", "SIGNER_NOT_FOUND",
        "ALIAS_NOT_FOUND", "EXECUTOR_NOT_FOUND", "LOAD_NOT_FOUND", "ROLLOUT_NOT_FOUND", "REQUEST_NOT_FOUND",
        "TENANT_EXISTS", "SIGNER_EXISTS", "BASE_MODEL_EXISTS", "REVISION_EXISTS", "INVALID_STATE",
        "VERSION_NOT_RISING", "VERSION_TOO_FAR", "BASE_MODEL_UNKNOWN", "ALIAS_LIVE", "ROLLOUT_RUNNING", "QUORUM_MISSING",
        "INVALID_TRUST_ROOT", "SOURCE_UNUSABLE", "SHARED_EXECUTOR", "STALE_ETAG", "QUOTA_EXCEEDED", "STORAGE_FULL",
        "PIN_BUDGET", "SOURCE_UNAVAILABLE",
        # the router asked an executor of another base model
        "WRONG_BASE",
    }
)  # fmt: skip
INCIDENT = "1234"


def test_no_reason_is_forgotten() -> None:
    sets = (AS_IT_IS, frozenset(IN_OTHER_WORDS), NEVER)
    assert frozenset().union(*sets) == frozenset(REASONS)
    assert sum(map(len, sets)) == len(REASONS)


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason not in NEVER])
def test_what_can_be_foreseen_is_typed(reason: str) -> None:
    told = for_the_caller(LoraportError(reason, "inner detail"), incident=INCIDENT)
    assert told.code != Code.INTERNAL or reason in ("INTERNAL", "NON_FINITE_LOGITS")
    assert told.reason in AS_IT_IS
    if reason in IN_OTHER_WORDS:
        assert "inner" not in told.message
        assert INCIDENT in told.message
        assert (told.retry_after_s is not None) == (told.code == Code.UNAVAILABLE)


@pytest.mark.parametrize("reason", sorted(NEVER))
def test_what_cannot_is_internal(reason: str) -> None:
    told = for_the_caller(LoraportError(reason, "inner detail"), incident=INCIDENT)
    assert (told.reason, told.message) == ("INTERNAL", f"internal error, incident {INCIDENT}")


def test_what_an_executor_refuses_a_request_for_is_never_a_fault() -> None:
    # Merged mode is asked for by an operator, of one executor.
    assert {*_REFUSALS.values(), *_FAILURES.values()} - {"SHARED_EXECUTOR"} <= AS_IT_IS | set(IN_OTHER_WORDS)
