"""Every error that crosses a service boundary.

There is one exception, `LoraportError`, and one table, `REASONS`: a reason fixes the status code, so the pair
(domain, reason) means the same everywhere and for ever; the message may change. Any other exception that
reaches the door is a bug and leaves as INTERNAL with a fixed text and an incident id, never with `str(exc)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

DOMAIN = "loraport.dev"


class Code(IntEnum):
    """Status codes of gRPC (google.rpc.Code)."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# reason: (code, what it means and what to do). docs/errors.md is made from this table.
REASONS = MappingProxyType(
    {
        # who may call
        "INVALID_CREDENTIAL": (Code.UNAUTHENTICATED, "The credential is missing, malformed, expired or revoked."),
        "NOT_ALLOWED": (Code.PERMISSION_DENIED, "This identity may not call this method."),
        "INVALID_TICKET": (Code.PERMISSION_DENIED, "The router's ticket is not valid for this request."),
        "INVALID_SESSION": (Code.PERMISSION_DENIED, "The upload session is not valid; register the revision again."),
        "SOURCE_NOT_ALLOWED": (Code.PERMISSION_DENIED, "The source is not on the loader's allow-list for the tenant."),
        "UNTRUSTED_SIGNER": (Code.PERMISSION_DENIED, "Too few active signers of the tenant signed the manifest."),
        "UNTRUSTED_VERIFIER": (Code.PERMISSION_DENIED, "No trusted loader signed the verification result."),
        # what was asked
        "DEADLINE_REQUIRED": (Code.INVALID_ARGUMENT, "Unary calls need a deadline; set one in the client."),
        "INVALID_REQUEST": (Code.INVALID_ARGUMENT, "Fields are missing or out of range; every fault is listed."),
        "INVALID_NAME": (Code.INVALID_ARGUMENT, "A resource name or id has the wrong form."),
        "INVALID_PAGE_TOKEN": (Code.INVALID_ARGUMENT, "The page token was not made for this list; start again."),
        "INVALID_MANIFEST": (Code.INVALID_ARGUMENT, "The signed manifest breaks its rules; every fault is listed."),
        "INVALID_VERIFICATION": (Code.INVALID_ARGUMENT, "The verification result breaks its rules."),
        "INVALID_BASE_MODEL": (Code.INVALID_ARGUMENT, "The base model's specification breaks its rules."),
        "INVALID_KEY": (Code.INVALID_ARGUMENT, "The public key is not an Ed25519 key in PEM."),
        "PROMPT_TOO_LONG": (Code.INVALID_ARGUMENT, "Prompt and answer do not fit the model's context."),
        "UPLOAD_TOO_LARGE": (Code.INVALID_ARGUMENT, "More bytes came than the manifest announced or the limit allows."),
        # what is not there (for this caller)
        "ADAPTER_NOT_FOUND": (Code.NOT_FOUND, "No adapter or revision of this name is visible to the caller."),
        "REVISION_NOT_FOUND": (Code.NOT_FOUND, "No such revision."),
        "REVISION_NOT_RESIDENT": (Code.NOT_FOUND, "The revision is not on this device."),
        "TENANT_NOT_FOUND": (Code.NOT_FOUND, "No such tenant."),
        "BASE_MODEL_NOT_FOUND": (Code.NOT_FOUND, "No such base model."),
        "KEY_NOT_FOUND": (Code.NOT_FOUND, "No such API key."),
        "SIGNER_NOT_FOUND": (Code.NOT_FOUND, "No such signer."),
        "ALIAS_NOT_FOUND": (Code.NOT_FOUND, "No such alias."),
        "EXECUTOR_NOT_FOUND": (Code.NOT_FOUND, "No such executor."),
        "LEASE_NOT_FOUND": (Code.NOT_FOUND, "No such lease, or it was given back."),
        "LOAD_NOT_FOUND": (Code.NOT_FOUND, "Nothing of this revision is being loaded."),
        "ROLLOUT_NOT_FOUND": (Code.NOT_FOUND, "No such rollout."),
        "REQUEST_NOT_FOUND": (Code.NOT_FOUND, "The caller's tenant made no such request here lately."),
        # what is there already
        "TENANT_EXISTS": (Code.ALREADY_EXISTS, "The tenant exists."),
        "SIGNER_EXISTS": (Code.ALREADY_EXISTS, "The signer's id or key is in use."),
        "BASE_MODEL_EXISTS": (Code.ALREADY_EXISTS, "The name is taken by a base model of other digests."),
        "REQUEST_EXISTS": (Code.ALREADY_EXISTS, "A request of this id is running."),
        "REVISION_EXISTS": (Code.ALREADY_EXISTS, "The same revision is registered already."),
        # what does not fit the state
        "REVISION_NOT_ACTIVE": (Code.FAILED_PRECONDITION, "The revision is not ACTIVE; approve it first."),
        "INVALID_STATE": (Code.FAILED_PRECONDITION, "The state does not allow this move."),
        "VERSION_NOT_RISING": (Code.FAILED_PRECONDITION, "The version must be above every earlier one."),
        "VERSION_TOO_FAR": (Code.FAILED_PRECONDITION, "The version must be less than 2^32 above the latest one."),
        "BASE_MODEL_UNKNOWN": (Code.FAILED_PRECONDITION, "The manifest names a base model that is not registered."),
        "WRONG_BASE": (Code.FAILED_PRECONDITION, "The revision belongs to another base model."),
        "ADAPTER_UNUSABLE": (
            Code.FAILED_PRECONDITION,
            "The base model as it is served cannot compute the adapter: other modules, or values beyond its dtype.",
        ),
        "ALIAS_LIVE": (Code.FAILED_PRECONDITION, "The alias serves already; use a rollout, or now with a reason."),
        "ROLLOUT_RUNNING": (Code.FAILED_PRECONDITION, "A rollout of the adapter is running; end it first."),
        "QUORUM_MISSING": (Code.FAILED_PRECONDITION, "Too few executors have the new revision READY."),
        "CHECKPOINT_STALE": (Code.FAILED_PRECONDITION, "The registry's checkpoint is stale; nothing new is loaded."),
        "CHECKPOINT_ROLLBACK": (
            Code.FAILED_PRECONDITION,
            "The registry's checkpoint is older than one seen before; nothing new is loaded.",
        ),
        "LOG_SPLIT_VIEW": (
            Code.FAILED_PRECONDITION,
            "The registry shows a log that contradicts the one seen before; nothing new is loaded. Audit it at once.",
        ),
        "RECORD_NOT_LOGGED": (
            Code.FAILED_PRECONDITION,
            "The revision's record is signed and not in the registry's log; it is not loaded. Audit the log at once.",
        ),
        "INVALID_TRUST_ROOT": (Code.FAILED_PRECONDITION, "The trust root does not follow the newest one."),
        "SOURCE_UNUSABLE": (Code.FAILED_PRECONDITION, "The source gives something else than the files asked for."),
        "SHARED_EXECUTOR": (Code.FAILED_PRECONDITION, "Merged mode is for an executor configured as dedicated."),
        "STALE_ETAG": (Code.ABORTED, "The resource changed since it was read; read it again."),
        # what is used up or down
        "QUOTA_EXCEEDED": (Code.RESOURCE_EXHAUSTED, "The tenant's quota is used up; see QuotaFailure and RetryInfo."),
        "STORAGE_FULL": (Code.RESOURCE_EXHAUSTED, "The store has no room left; nothing was kept."),
        "HOST_TIER_FULL": (Code.RESOURCE_EXHAUSTED, "The loader's host memory, or the tenant's part, is in use."),
        "POOL_TOO_SMALL": (Code.RESOURCE_EXHAUSTED, "The revision does not fit the executor's adapter pool."),
        "PIN_BUDGET": (Code.RESOURCE_EXHAUSTED, "Rollouts hold as much of the adapter pool as they may."),
        "OVERLOADED": (Code.UNAVAILABLE, "The queue is full; retry after the stated delay."),
        "DRAINING": (Code.UNAVAILABLE, "The service is shutting down; retry elsewhere."),
        "MERGED_MODE": (Code.UNAVAILABLE, "The executor computes one revision in merged mode; retry elsewhere."),
        "EXECUTOR_UNAVAILABLE": (Code.UNAVAILABLE, "No executor of this base model is serving; retry."),
        "LOADER_UNAVAILABLE": (Code.UNAVAILABLE, "The loader cannot be reached; retry."),
        "REGISTRY_UNAVAILABLE": (Code.UNAVAILABLE, "The registry cannot be reached; retry."),
        "STORE_UNAVAILABLE": (Code.UNAVAILABLE, "The object store cannot be reached; retry."),
        "SOURCE_UNAVAILABLE": (Code.UNAVAILABLE, "The source cannot be reached, is too slow or broke off; retry."),
        # what went wrong
        "LOAD_CANCELLED": (Code.CANCELLED, "The load was stopped by CancelLoad; ask again to start it anew."),
        "DEADLINE_EXCEEDED": (Code.DEADLINE_EXCEEDED, "The deadline passed."),
        "DIGEST_MISMATCH": (Code.DATA_LOSS, "Stored bytes are not what was signed; they are not used."),
        "LOG_DAMAGED": (Code.DATA_LOSS, "The registry's transparency log is damaged; audit it with `log verify`."),
        "NON_FINITE_LOGITS": (Code.INTERNAL, "The model gave NaN or infinite logits for this request."),
        "INTERNAL": (Code.INTERNAL, "A fault of the service; quote the incident id."),
        "NOT_IMPLEMENTED": (Code.UNIMPLEMENTED, "This call is part of the contract but not built yet."),
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One of the faults behind an error: a field path, or what else it is about, and one sentence."""

    subject: str
    detail: str
    code: str = ""


class LoraportError(Exception):
    """An error with a reason of `REASONS`.

    `faults` become BadRequest or PreconditionFailure details, `retry_after_s` becomes RetryInfo, `quota` (subject,
    description) becomes QuotaFailure, `metadata` goes into ErrorInfo. Nothing private belongs in any of them.
    """

    def __init__(
        self,
        reason: str,
        message: str = "",
        *,
        subject: str = "",
        faults: Sequence[Fault] = (),
        retry_after_s: float | None = None,
        quota: tuple[str, str] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        code, meaning = REASONS[reason]
        self.reason = reason
        self.code = code
        self.message = message or meaning
        self.faults = tuple(faults) or ((Fault(subject, self.message),) if subject else ())
        self.retry_after_s = retry_after_s
        self.quota = quota
        self.metadata = metadata or {}
        super().__init__(f"{reason}: {self.message}")


class FaultList:
    """Collects faults, so that a caller sees all of them and not the first."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, subject: str, detail: str, code: str = "") -> None:
        """Notes a fault."""
        self._faults.append(Fault(subject, detail, code))

    def require(self, condition: bool, subject: str, detail: str) -> bool:
        """Notes a fault unless `condition`; returns `condition`."""
        if not condition:
            self.add(subject, detail)
        return condition

    def raise_if_any(self, reason: str = "INVALID_REQUEST") -> None:
        """Raises LoraportError with every fault noted, if there is one."""
        if self._faults:
            text = "; ".join(
                f"{fault.subject}: {fault.detail}" if fault.subject else fault.detail for fault in self._faults[:5]
            )
            more = f"; and {len(self._faults) - 5} more" if len(self._faults) > 5 else ""
            raise LoraportError(reason, text + more, faults=self._faults)
