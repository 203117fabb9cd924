"""Rollouts between messages and values."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from sqlalchemy import Connection

from loraport.registry.v1 import rollout_service_pb2 as pb
from services.registry.records import RolloutRow
from services.registry.rollout.arms import ArmStats, StepStats
from services.registry.rollout.machine import Evidence, Executor, Probe, verdict_on
from services.registry.rollout.settings import Gates, Prompt, Settings
from services.registry.rollout.states import State
from services.registry.servicers.convert import timestamp
from services.registry.servicers.rollout_item import prompt_message
from services.registry.store import rollouts
from services.shared.errors import FaultList
from services.shared.split import ARMS, SHADOW_STEP, Observation

MAX_OBSERVATIONS = 10_000
MAX_MS = 1e9
MIN_MS = 1e-3  # 0 is no time at all; nothing real is faster than a microsecond
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")


def read_settings(message: pb.Rollout) -> Settings:
    """Returns what a rollout is asked to do; unset fields take their defaults. Not checked yet."""
    default = Settings()
    return Settings(
        steps=tuple(round(percent * 100) for percent in map(_finite, message.step_percents)) or default.steps,
        min_samples=message.min_sample_count if message.HasField("min_sample_count") else default.min_samples,
        min_step_s=_seconds(message, "min_step_duration", default.min_step_s),
        retention_s=_seconds(message, "retention_duration", default.retention_s),
        quorum=message.quorum_count,
        shadow=round(_finite(message.shadow_percent) * 100),
        gates=_gates(message.gates),
        golden=tuple(map(_prompt, message.golden_prompts)),
        evals=tuple(map(_prompt, message.eval_prompts)),
    )


def _gates(message: pb.RolloutGates) -> Gates:
    default = Gates()

    def percent(name: str, otherwise: float) -> float:
        return getattr(message, name) / 100 if message.HasField(name) else otherwise

    def plain(name: str, otherwise: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else otherwise

    return Gates(
        rollback_margin=percent("rollback_margin_percent", default.rollback_margin),
        advance_tolerance=percent("advance_tolerance_percent", default.advance_tolerance),
        max_samples=plain("max_sample_count", default.max_samples),
        max_mean_difference=plain("max_mean_logprob_difference", default.max_mean_difference),
        max_difference=plain("max_logprob_difference", default.max_difference),
        max_perplexity_ratio=plain("max_perplexity_ratio", default.max_perplexity_ratio),
        error_margin=percent("error_margin_percent", default.error_margin),
        preload_timeout_s=_seconds(message, "preload_timeout", default.preload_timeout_s),
        shadow_s=_seconds(message, "shadow_duration", default.shadow_s),
    )


def _seconds(message: Any, name: str, otherwise: float) -> float:
    return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else otherwise


def _finite(value: float) -> float:
    # What is no number is out of every range, so the check lists it with the other faults.
    return value if math.isfinite(value) and abs(value) < 1e6 else -1.0


def _prompt(message: pb.RolloutPrompt) -> Prompt:
    return Prompt(message.text, tuple(message.token_ids.ids))


def rollout(row: RolloutRow, *, connection: Connection | None = None) -> pb.Rollout:
    """Returns the message of a rollout; with a connection, with its story, prompts and what was seen."""
    settings = row.settings
    message = pb.Rollout(
        name=row.name,
        alias=row.alias,
        from_revision_id=row.from_revision_id,
        to_revision_id=row.to_revision_id,
        state=f"STATE_{row.position.state}",
        share_percent=row.share / 100,
        step_percents=[step / 100 for step in settings.steps],
        min_sample_count=settings.min_samples,
        min_step_duration=_duration(settings.min_step_s),
        retention_duration=_duration(settings.retention_s),
        etag=row.etag,
        create_time=timestamp(row.create_us),
        update_time=timestamp(row.update_us),
        step_index=row.position.step,
        hold_reason=row.position.hold_reason,
        quorum_count=settings.quorum,
        shadow_percent=settings.shadow / 100,
        gates=_gates_message(settings.gates),
    )
    if row.position.at is State.SPLITTING:
        message.step_time.CopyFrom(timestamp(row.position.entered_us))
    if connection is not None:
        message.golden_prompts.extend(map(prompt_message, settings.golden))
        message.eval_prompts.extend(map(prompt_message, settings.evals))
        message.story.extend(
            pb.StoryLine(
                decide_time=timestamp(line.event_us),
                state=f"STATE_{line.phase}",
                actor=line.actor,
                sentence=line.sentence,
            )
            for line in rollouts.story(connection, row)
        )
        _add_evidence(message, row, rollouts.evidence(connection, row))
    return message


def _gates_message(gates: Gates) -> pb.RolloutGates:
    return pb.RolloutGates(
        rollback_margin_percent=round(gates.rollback_margin * 100, 9),
        advance_tolerance_percent=round(gates.advance_tolerance * 100, 9),
        max_sample_count=gates.max_samples,
        max_mean_logprob_difference=gates.max_mean_difference,
        max_logprob_difference=gates.max_difference,
        max_perplexity_ratio=gates.max_perplexity_ratio,
        error_margin_percent=round(gates.error_margin * 100, 9),
        preload_timeout=_duration(gates.preload_timeout_s),
        shadow_duration=_duration(gates.shadow_s),
    )


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _add_evidence(message: pb.Rollout, row: RolloutRow, evidence: Evidence) -> None:
    known = {item.name: item for item in evidence.executors}
    silent = (Executor(name=name) for name in evidence.serving if name not in known)
    everybody = sorted([*known.values(), *silent], key=lambda item: item.name)
    message.executors.extend(map(_executor, everybody))
    step = SHADOW_STEP if row.position.at is State.SHADOWING else row.position.step
    seen = evidence.steps.get(step, StepStats())
    message.arms.extend(_arm(name, seen.arm(name)) for name in ARMS)
    verdict = verdict_on(row.position, row.settings, evidence)
    if verdict is None:
        return
    message.verdict = f"{verdict.word}: {verdict.sentence}"
    for item in verdict.comparisons:
        shown = pb.Comparison(metric=item.metric, estimate=item.estimate, sample_count=item.samples, verdict=item.word)
        if item.low is not None and item.high is not None and item.samples and item.high < 1e300:
            shown.low, shown.high = item.low, item.high
        message.comparisons.append(shown)


def _executor(item: Executor) -> pb.ExecutorStatus:
    status = pb.ExecutorStatus(executor=item.name, ready=item.ready, failure_reason=item.failure)
    probe = item.probe
    if probe is None:
        return status
    if probe.failure:
        status.failure_reason = status.failure_reason or probe.failure
        return status
    status.mean_logprob_difference = probe.mean_difference
    status.max_logprob_difference = probe.max_difference
    if probe.perplexity_ratio is not None:
        status.perplexity_ratio = probe.perplexity_ratio
    return status


def _arm(name: str, stats: ArmStats) -> pb.ArmStatistics:
    message = pb.ArmStatistics(
        arm=name,
        request_count=stats.requests,
        error_count=stats.errors,
        empty_count=stats.empty,
        accepted_count=stats.accepted,
        rejected_count=stats.rejected,
    )
    if stats.first_token.count:
        message.first_token_ms = math.exp(stats.first_token.mean)
    if stats.per_token.count:
        message.per_token_ms = math.exp(stats.per_token.mean)
    if stats.answered:
        message.output_token_count = stats.tokens / stats.answered
        message.repetition = stats.repetition.mean
    return message


def check_names(faults: FaultList, named: Iterable[tuple[str, str]]) -> None:
    """Notes every name of a router or executor that is none."""
    for field, value in named:
        faults.require(_NAME.fullmatch(value) is not None, field, "is no name of a router or executor")


def check_reason(faults: FaultList, value: str) -> None:
    """Notes a failure reason that is no reason."""
    faults.require(not value or _REASON.fullmatch(value) is not None, "failure_reason", "is no reason of an error")


def read_probe(request: pb.ReportProbeRequest) -> Probe:
    """Returns the result of a probe. A perplexity that cannot be compared is as bad as one that is not finite."""
    ratio = None
    if request.HasField("from_perplexity") and request.HasField("to_perplexity"):
        ratio = request.to_perplexity / request.from_perplexity if request.from_perplexity > 0 else math.inf
    return Probe(
        mean_difference=request.mean_logprob_difference,
        max_difference=request.max_logprob_difference,
        nonfinite=request.nonfinite,
        perplexity_ratio=ratio,
        failure=request.failure_reason,
    )


def read_observations(request: pb.ReportObservationsRequest, settings: Settings) -> dict[Any, ArmStats]:
    """Returns the sums of a report by arm.

    Raises:
        LoraportError: INVALID_REQUEST with every fault.
    """
    faults = FaultList()
    check_names(faults, [("router", request.router)])
    faults.require(request.sequence >= 1, "sequence", "must be at least 1")
    faults.require(request.HasField("start_time"), "start_time", "is missing")
    faults.require(
        SHADOW_STEP <= request.step_index < len(settings.steps), "step_index", f"must be in [-1, {len(settings.steps)})"
    )
    faults.require(len(request.observations) <= MAX_OBSERVATIONS, "observations", f"must be at most {MAX_OBSERVATIONS}")
    for index, item in enumerate(request.observations[:MAX_OBSERVATIONS]):
        numbers = (item.first_token_ms, item.per_token_ms)
        good = (
            item.arm in ARMS
            and all(math.isfinite(value) and (value == 0 or MIN_MS <= value <= MAX_MS) for value in numbers)
            and 0 <= item.repetition <= 1
            and item.output_token_count >= 0
        )
        faults.require(good, f"observations[{index}]", "has an unknown arm or a number out of range")
    for index, count in enumerate(request.outcomes):
        good = count.arm in ARMS and count.accepted_count >= 0 and count.rejected_count >= 0
        faults.require(good, f"outcomes[{index}]", "has an unknown arm or a negative count")
    faults.raise_if_any()
    return _sums(request.observations, request.outcomes)


def _sums(seen: Sequence[pb.Observation], outcomes: Sequence[pb.OutcomeCount]) -> dict[Any, ArmStats]:
    sums: dict[Any, ArmStats] = {}
    for item in seen:
        sums.setdefault(item.arm, ArmStats()).take(
            Observation(
                arm=item.arm,  # type: ignore[arg-type]
                first_token_ms=item.first_token_ms,
                per_token_ms=item.per_token_ms,
                ok=item.ok,
                error_reason=item.error_reason,
                output_tokens=item.output_token_count,
                repetition=item.repetition,
                cold=item.cold,
                bucket=item.bucket,
            )
        )
    for count in outcomes:
        arm = sums.setdefault(count.arm, ArmStats())
        arm.accepted += count.accepted_count
        arm.rejected += count.rejected_count
    return sums
