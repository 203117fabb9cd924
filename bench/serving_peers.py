"""The serving benchmark's peers: transformers' generate, PEFT's mixed batch, and vLLM where an environment has it."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, StoppingCriteria

from bench.serving_work import Adapter

_LEAST_STEPS = 4  # decode steps of a run that is cut short
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class PeerTime:
    """Seconds that the whole work takes, the median of `rounds`; `cut` when decode steps were extrapolated."""

    seconds: float
    rounds: int
    cut: bool


class _Watch(StoppingCriteria):
    """Notes when each forward pass ended, and ends the run when its time is up."""

    def __init__(self, seconds: float) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self._until = self.started + seconds

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        now = time.perf_counter()
        self.times.append(now)
        stop = len(self.times) > _LEAST_STEPS and now > self._until
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool)


class TransformersPeer:
    """transformers' own generate, greedy, padded batch, its default attention."""

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Put adapters on it through PEFT."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for adapter in adapters:
                config = LoraConfig(
                    r=adapter.rank, lora_alpha=adapter.scaling * adapter.rank, target_modules=TARGETS,
                    task_type="CAUSAL_LM",
                )  # fmt: skip
                name = adapter.name[-8:]
                if hasattr(self._model, "peft_config"):
                    self._model.add_adapter(name, config)
                else:
                    self._model = get_peft_model(self._model, config, adapter_name=name)
                for path, (a, b) in adapter.modules.items():
                    module = self._model.base_model.model.get_submodule(path)
                    module.lora_A[name].weight.data.copy_(a)
                    module.lora_B[name].weight.data.copy_(b)
        self._model.eval()

    def measure(
        self, prompts: Sequence[tuple[int, ...]], owners: Sequence[str | None], new: int, *,
        budget_s: float, rounds: int = 3,
    ) -> PeerTime:  # fmt: skip
        """Generate `new` tokens per prompt, `rounds` times, in `budget_s` or little more.

        A run that takes longer than its share is cut short, and its remaining decode steps count as the median one.
        """
        extra = {}
        if any(owner is not None for owner in owners):
            extra["adapter_names"] = ["__base__" if owner is None else owner[-8:] for owner in owners]
        ids = torch.tensor(prompts)
        taken: list[float] = []
        cut = False
        for _ in range(rounds):
            watch = _Watch(budget_s / rounds)
            with torch.inference_mode():
                self._model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                    min_new_tokens=new, max_new_tokens=new, stopping_criteria=[watch], **extra,
                )  # fmt: skip
            steps = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
            left = new - len(watch.times)
            cut |= left > 0
            taken.append(watch.times[-1] - watch.started + left * (statistics.median(steps) if left else 0.0))
        return PeerTime(statistics.median(taken), len(taken), cut)


def vllm_rates(
    environment: Path, base: Path, *, dtype: str, threads: int, log: Callable[[str], None]
) -> dict[str, float]:
    """Return tokens/s of vLLM's CPU build for the base; empty, with a line in the log, when it does not run."""
    script = Path(__file__).with_name("serving_vllm.py")
    command = [str(environment / "bin" / "python"), str(script), str(base), dtype, str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log(f"vLLM did not run: {error}")
        return {}
    if done.returncode != 0:
        log(f"vLLM did not run: {done.stderr.strip().splitlines()[-1:]}")
        return {}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
