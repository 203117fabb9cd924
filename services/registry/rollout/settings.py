"""What a rollout was asked to do: shares, waits, gates, prompts. Pure; checked once, at the start."""

from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from services.shared.errors import FaultList

WHOLE = 10_000
MAX_STEPS, MAX_EXECUTORS = 16, 1000
MAX_GOLDEN, MAX_EVAL = 16, 64
MAX_TEXT, MIN_IDS, MAX_IDS = 8192, 2, 2048
# All prompts of a rollout travel in one item of the catalog.
MAX_PROMPT_UNITS = 64 << 10
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text, or token ids where the text is empty."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The numbers that decide. Margins are parts of one: 0.05 is five percent."""

    # Rollback when a latency is shown to be worse than the control's by more.
    rollback_margin: float = 0.05
    # The step to the whole needs a latency shown to be worse by at most this; smaller shares need less evidence.
    advance_tolerance: float = 0.10
    # Requests of each judged arm in a step after which no verdict means to hold.
    max_samples: int = 8000
    # A probe's mean and largest |difference of log-probabilities|, and the new perplexity by the old.
    max_mean_difference: float = 0.02
    max_difference: float = 0.2
    max_perplexity_ratio: float = 1.05
    # Rollback when failures are shown to be more frequent by about this share of all requests.
    error_margin: float = 0.02
    preload_timeout_s: float = 600.0
    shadow_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Shares are parts of ten thousand. `quorum` 0 means every executor that serves the base model. The alias moves
    before `until_us`, microseconds since the Unix epoch, or not at all; 0 means that nobody waits for it."""

    steps: tuple[int, ...] = (100, 500, 2500, 5000, WHOLE)
    min_samples: int = 200
    min_step_s: float = 60.0
    retention_s: float = 600.0
    quorum: int = 0
    shadow: int = 0
    until_us: int = 0
    gates: Gates = field(default_factory=Gates)
    golden: tuple[Prompt, ...] = ()
    evals: tuple[Prompt, ...] = ()

    @property
    def probes(self) -> bool:
        """Whether there is something to probe with."""
        return bool(self.golden or self.evals)


def check(settings: Settings, faults: FaultList) -> None:
    """Notes every fault of the settings, under the names of the request's fields."""
    steps, gates = settings.steps, settings.gates
    rising = all(a < b for a, b in pairwise(steps))
    faults.require(
        0 < len(steps) <= MAX_STEPS and rising and steps[0] > 0 and steps[-1] == WHOLE,
        "rollout.step_percents",
        f"must be at most {MAX_STEPS} shares above 0, rising, in hundredths of a percent, the last one 100",
    )
    for value, low, high, name in (
        (settings.min_samples, 0, 1_000_000, "min_sample_count"),
        (settings.min_step_s, 0, WEEK_S, "min_step_duration"),
        (settings.retention_s, 0, WEEK_S, "retention_duration"),
        (settings.quorum, 0, MAX_EXECUTORS, "quorum_count"),
        (settings.shadow, 0, WHOLE, "shadow_percent"),
        (gates.max_samples, max(1, settings.min_samples), 10_000_000, "gates.max_sample_count"),
        (gates.preload_timeout_s, 0, DAY_S, "gates.preload_timeout"),
        (gates.shadow_s, 0, WEEK_S, "gates.shadow_duration"),
    ):
        faults.require(low <= value <= high, f"rollout.{name}", f"must be in [{low:g}, {high:g}]")
    for value, high, name in (
        (gates.rollback_margin, 10, "rollback_margin_percent"),
        (gates.advance_tolerance, 10, "advance_tolerance_percent"),
        (gates.error_margin, 1, "error_margin_percent"),
        (gates.max_mean_difference, 1000, "max_mean_logprob_difference"),
        (gates.max_difference, 1000, "max_logprob_difference"),
        (gates.max_perplexity_ratio, 1000, "max_perplexity_ratio"),
    ):
        faults.require(0 < value <= high, f"rollout.gates.{name}", "must be above 0 and not absurd")
    _check_prompts(settings.golden, MAX_GOLDEN, "rollout.golden_prompts", faults)
    _check_prompts(settings.evals, MAX_EVAL, "rollout.eval_prompts", faults)
    units = sum(len(prompt.text) + 4 * len(prompt.token_ids) for prompt in (*settings.golden, *settings.evals))
    faults.require(
        units <= MAX_PROMPT_UNITS, "rollout.golden_prompts", f"all prompts together exceed {MAX_PROMPT_UNITS} bytes"
    )


def _check_prompts(prompts: tuple[Prompt, ...], most: int, name: str, faults: FaultList) -> None:
    faults.require(len(prompts) <= most, name, f"must be at most {most}")
    for index, prompt in enumerate(prompts):
        good = (
            0 < len(prompt.text) <= MAX_TEXT
            if prompt.text
            else MIN_IDS <= len(prompt.token_ids) <= MAX_IDS and all(token >= 0 for token in prompt.token_ids)
        )
        rule = f"needs 1 to {MAX_TEXT} characters of text, or {MIN_IDS} to {MAX_IDS} token ids"
        faults.require(good, f"{name}[{index}]", rule)


def to_json(settings: Settings) -> dict[str, Any]:
    """Returns the settings as JSON values, the prompts left out."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    del values["golden"], values["evals"]
    if not settings.until_us:
        del values["until_us"]
    return values | {"steps": list(settings.steps), "gates": asdict(settings.gates)}


def from_json(values: dict[str, Any], prompts: dict[str, Any]) -> Settings:
    """Returns what `to_json` and `prompts_to_json` wrote."""
    known = values | {"steps": tuple(values["steps"]), "gates": Gates(**values["gates"])}
    golden, evals = (
        tuple(
            Prompt(item if isinstance(item, str) else "", () if isinstance(item, str) else tuple(item)) for item in part
        )
        for part in (prompts["golden"], prompts["evals"])
    )
    return Settings(**known, golden=golden, evals=evals)


def prompts_to_json(settings: Settings) -> dict[str, Any]:
    """Returns the prompts as JSON values: a string for text, a list for token ids."""
    return {
        name: [prompt.text or list(prompt.token_ids) for prompt in prompts]
        for name, prompts in (("golden", settings.golden), ("evals", settings.evals))
    }
