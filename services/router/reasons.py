"""What a caller is told when the executor of its request says no. Pure.

A reason of an executor or its loader that can be foreseen reaches the caller as it is, or in other words where it
speaks of the fleet's own affairs. Any other is a fault between the services: the caller gets INTERNAL and an incident
id.
"""

from services.shared.errors import REASONS, Code, LoraportError

AS_IT_IS = frozenset(
    {
        "INVALID_REQUEST", "PROMPT_TOO_LONG", "REVISION_NOT_ACTIVE", "ADAPTER_UNUSABLE", "CHECKPOINT_STALE",
        "CHECKPOINT_ROLLBACK", "LOG_SPLIT_VIEW", "LOG_DAMAGED", "RECORD_NOT_LOGGED", "POOL_TOO_SMALL", "HOST_TIER_FULL",
        "OVERLOADED", "DRAINING", "EXECUTOR_UNAVAILABLE", "LOADER_UNAVAILABLE", "STORE_UNAVAILABLE",
        "REGISTRY_UNAVAILABLE", "DEADLINE_EXCEEDED", "DIGEST_MISMATCH", "NON_FINITE_LOGITS", "INTERNAL",
        "NOT_IMPLEMENTED",
    }
)  # fmt: skip
# Reason → what it is to the caller: (reason, text).
IN_OTHER_WORDS = {
    # As good as no executor, for as long as it lasts, and no fault of the request.
    "INVALID_TICKET": ("EXECUTOR_UNAVAILABLE", "no executor takes this router's tickets"),
    "MERGED_MODE": ("EXECUTOR_UNAVAILABLE", "every executor that serves computes one other revision; retry"),
    "REQUEST_EXISTS": ("EXECUTOR_UNAVAILABLE", "an earlier try of this request is still ending there; ask again"),
    # The load was stopped, or its bytes were taken back: the next request begins it anew.
    "LOAD_CANCELLED": ("LOADER_UNAVAILABLE", "the load was stopped; retry"),
    "LEASE_NOT_FOUND": ("LOADER_UNAVAILABLE", "the load took too long; retry"),
    "REVISION_NOT_FOUND": ("REVISION_NOT_ACTIVE", "the revision is not known where it is loaded"),
}
RETRY_AFTER_S = 1.0


def for_the_caller(error: LoraportError, *, incident: str) -> LoraportError:
    """Returns what the caller is told of an executor's error; `error` itself when it is told as it is."""
    if error.reason in AS_IT_IS:
        return error
    reason, text = IN_OTHER_WORDS.get(error.reason, ("INTERNAL", "internal error"))
    retry_after_s = RETRY_AFTER_S if REASONS[reason][0] == Code.UNAVAILABLE else None
    return LoraportError(reason, f"{text}, incident {incident}", retry_after_s=retry_after_s)
