"""What a rollout will do, in sentences. Pure."""

from services.registry.rollout.settings import WHOLE, Settings


def plan(settings: Settings, *, old: str, new: str, alias: str) -> list[str]:
    """Returns one sentence per step; `old` and `new` name the revisions, e.g. `v3`."""
    gates = settings.gates
    who = f"{settings.quorum} executors" if settings.quorum else "every executor that serves the base model"
    lines = [
        f"preload: {who} must report {new} READY beside {old}, by digest, within {span(gates.preload_timeout_s)}",
    ]
    if settings.golden:
        lines.append(
            f"probe: {len(settings.golden)} golden prompts on each, against a reference path: log-probabilities within "
            f"{gates.max_mean_difference:g} on average, {gates.max_difference:g} at most"
        )
    if settings.evals:
        lines.append(
            f"perplexity: {len(settings.evals)} prompts, {new} at most {gates.max_perplexity_ratio:g} times {old}"
        )
    if not settings.probes:
        lines.append("no probe: no golden prompts and no eval prompts were given")
    if settings.shadow:
        lines.append(f"shadow: {settings.shadow / 100:g} % of the requests are copied for {span(gates.shadow_s)}")
    for share in settings.steps:
        wait = f"at least {settings.min_samples} requests and {span(settings.min_step_s)}"
        lines.append(f"{share / 100:g} % of the conversations of {alias} get {new}: {wait}" + _gate(share, settings))
    lines.append(f"then {alias} points to {new}, and {old} stays on the devices for {span(settings.retention_s)}")
    return lines


def span(seconds: float) -> str:
    """Returns a duration in words."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _gate(share: int, settings: Settings) -> str:
    if share == WHOLE:
        return ", errors judged"
    return f", back when slower by more than {settings.gates.rollback_margin:.0%} or failing more often"
