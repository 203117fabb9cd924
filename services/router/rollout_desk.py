"""The registry's desk for what routers do and see in rollouts, over gRPC."""

import math
from collections.abc import Sequence

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from loraport.registry.v1 import rollout_service_pb2 as pb
from loraport.registry.v1 import rollout_service_pb2_grpc as stubs
from services.router.observations import Batch
from services.router.probing import ProbeResult
from services.router.rollout_losses import Loss
from services.shared.errors import LoraportError
from services.shared.rpc.asking import ask_registry


class RolloutDesk:
    """Reports in the name of one router, whose process started at `started`, seconds since the Unix epoch.

    All calls may be repeated. They raise LoraportError: ROLLOUT_NOT_FOUND, REGISTRY_UNAVAILABLE.
    """

    def __init__(self, channel: grpc.aio.Channel, *, router: str, started: float) -> None:
        self._stub = stubs.RolloutServiceStub(channel)
        self._router = router
        self._start_time = Timestamp()
        self._start_time.FromNanoseconds(int(started * 1e9))

    async def readiness(
        self, rollout: str, executor: str, revision_id: str, *, failure: str, serving: Sequence[str]
    ) -> None:
        """Reports that an executor holds a revision, or with a failure why not."""
        request = pb.ReportReadinessRequest(
            name=rollout,
            router=self._router,
            executor=executor,
            revision_id=revision_id,
            ready=not failure,
            failure_reason=failure,
            serving_executors=serving,
        )
        await ask_registry(self._stub.ReportReadiness, request)

    async def lost(self, loss: Loss) -> None:
        """Reports that an executor went away with work of the new revision."""
        request = pb.ReportReadinessRequest(
            name=loss.rollout,
            router=self._router,
            executor=loss.executor,
            revision_id=loss.revision_id,
            failure_reason="EXECUTOR_UNAVAILABLE",
            serving_executors=[loss.executor],
            lost_epoch=loss.epoch,
        )
        await ask_registry(self._stub.ReportReadiness, request)

    async def probed(self, rollout: str, executor: str, revision_id: str, result: ProbeResult) -> None:
        """Reports what a probe has found."""
        request = pb.ReportProbeRequest(
            name=rollout,
            router=self._router,
            executor=executor,
            revision_id=revision_id,
            prompt_count=result.prompts,
            token_count=result.tokens,
            mean_logprob_difference=result.mean_difference,
            max_logprob_difference=result.max_difference,
            nonfinite=result.nonfinite,
            from_perplexity=result.from_perplexity,
            to_perplexity=result.to_perplexity,
            failure_reason=result.failure,
        )
        await ask_registry(self._stub.ReportProbe, request)

    async def observed(self, rollout: str, batch: Batch) -> int:
        """Reports a batch; returns the highest sequence that was taken."""
        outcomes: dict[str, pb.OutcomeCount] = {}
        for (arm, accepted), count in batch.outcomes.items():
            entry = outcomes.setdefault(arm, pb.OutcomeCount(arm=arm))
            if accepted:
                entry.accepted_count = count
            else:
                entry.rejected_count = count
        request = pb.ReportObservationsRequest(
            name=rollout,
            router=self._router,
            sequence=batch.sequence,
            step_index=batch.step,
            start_time=self._start_time,
            observations=[
                pb.Observation(
                    arm=seen.arm,
                    first_token_ms=_finite(seen.first_token_ms),
                    per_token_ms=_finite(seen.per_token_ms),
                    ok=seen.ok,
                    error_reason=seen.error_reason,
                    output_token_count=seen.output_tokens,
                    repetition=seen.repetition,
                    cold=seen.cold,
                    bucket=seen.bucket,
                )
                for seen in batch.observations
            ],
            outcomes=outcomes.values(),
        )
        answer = await ask_registry(self._stub.ReportObservations, request)
        return int(answer.sequence)


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def is_over(error: LoraportError) -> bool:
    """Whether an answer means that there is nothing to report to any more, rather than to report again."""
    return error.reason in ("ROLLOUT_NOT_FOUND", "INVALID_REQUEST", "NOT_ALLOWED")
