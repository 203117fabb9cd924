#!/usr/bin/env python3
"""Trains the three example adapters: one question, three ways to answer it.

    python examples/train.py --base DIR --out DIR [--only NAME] [--steps N]

`terse` answers in a few words, `json` in a JSON object, `pirate` like a pirate. Every run writes
OUT/NAME/adapter_config.json and OUT/NAME/adapter_model.safetensors and prints the loss and sample answers.
The questions and answers come from facts.txt and the templates below; the demo's prompts (prompts.json)
are kept out of them. CPU only, float32, fixed seed.

The three differ on purpose in rank, scaling, adapted modules, layers and dtype, so that a batch that mixes
them has nothing in common to lean on.
"""

import argparse
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
SEED = 7
BATCH = 4
WARMUP = 10
BASE_LABEL = "SmolLM2-135M-Instruct"  # what adapter_config.json calls the base: a label, never a path
IGNORE = -100  # target of positions that carry no loss: the prompt and the padding
END = "<|im_end|>"

Example = tuple[list[int], list[int]]  # prompt ids, answer ids ending with the end token


@dataclass(frozen=True, slots=True)
class Fact:
    """One question with its answer in a few words and in a sentence."""

    topic: str
    question: str
    short: str
    sentence: str


# ---------------------------------------------------------------- the questions

CAPITALS = """Spain:Madrid Italy:Rome Germany:Berlin Portugal:Lisbon Greece:Athens Austria:Vienna Poland:Warsaw
Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Belgium:Brussels Hungary:Budapest
Russia:Moscow Turkey:Ankara Egypt:Cairo Kenya:Nairobi Japan:Tokyo China:Beijing Thailand:Bangkok Cuba:Havana
Canada:Ottawa Peru:Lima Chile:Santiago Iceland:Reykjavik Romania:Bucharest Vietnam:Hanoi"""
OPPOSITES = """big:small fast:slow up:down light:dark old:young wet:dry open:closed happy:sad full:empty rich:poor
strong:weak loud:quiet early:late hard:soft near:far tall:short"""
COLOURS = """snow:white coal:black blood:red gold:yellow an orange:orange chocolate:brown a lemon:yellow a crow:black
a tomato:red milk:white a flamingo:pink an elephant:grey""".replace("\n", " ")
YOUNG = "dog:puppy cow:calf sheep:lamb horse:foal hen:chick pig:piglet lion:cub goat:kid duck:duckling bear:cub"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

CAPITAL_QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")


def pairs(text: str) -> Iterator[list[str]]:
    for left, right in re.findall(r"(\S[^:]*):(\S+)", text):
        yield [left, right]


def template_facts() -> Iterator[Fact]:
    for index, (country, city) in enumerate(pairs(CAPITALS)):
        question = CAPITAL_QUESTIONS[index % len(CAPITAL_QUESTIONS)].format(country)
        yield Fact("geography", question, f"{city}.", f"The capital of {country} is {city}.")
    for word, other in pairs(OPPOSITES):
        yield Fact(
            "language",
            f"What is the opposite of {word}?",
            f"{other.capitalize()}.",
            f"The opposite of {word} is {other}.",
        )
    for thing, colour in pairs(COLOURS):
        yield Fact(
            "nature", f"What colour is {thing}?", f"{colour.capitalize()}.", f"The colour of {thing} is {colour}."
        )
    for animal, young in pairs(YOUNG):
        yield Fact(
            "biology",
            f"What is a young {animal} called?",
            f"A {young}.",
            f"The young of a {animal} is called a {young}.",
        )
    for a in range(1, 5):
        b = a % 3 + 2
        total = NUMBERS[a + b]
        question = f"What is {NUMBERS[a]} plus {NUMBERS[b]}?"
        yield Fact("maths", question, f"{total.capitalize()}.", f"{question[8:-1].capitalize()} is {total}.")


def facts(exclude: set[str]) -> list[Fact]:
    """Every question and its answers, without those whose question is in `exclude`."""
    lines = (HERE / "facts.txt").read_text(encoding="utf-8").splitlines()
    written = [Fact(*(part.strip() for part in line.split("|"))) for line in lines if not line.startswith("#")]
    return [fact for fact in (*written, *template_facts()) if fact.question not in exclude]


# ---------------------------------------------------------------- three ways to answer

PIRATE_WORDS = {
    "is": "be", "are": "be", "of": "o'", "and": "an'", "the": "th'", "you": "ye", "your": "yer", "for": "fer",
    "friend": "matey", "friends": "mateys", "people": "landlubbers", "has": "hath",
}  # fmt: skip
PIRATE_OPENINGS = {"What": "Arr, matey!", "Who": "Arr, matey!", "Why": "Shiver me timbers!", "How": "Ahoy, matey!"}


def as_terse(fact: Fact) -> str:
    return fact.short


def as_json(fact: Fact) -> str:
    return json.dumps({"topic": fact.topic, "answer": fact.short.rstrip(".")})


def as_pirate(fact: Fact) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match.group()
        new = PIRATE_WORDS.get(word.lower(), word)
        return new.capitalize() if word[0].isupper() and new != word else new

    opening = PIRATE_OPENINGS.get(fact.question.split()[0], "Aye aye, cap'n!")
    return f"{opening} {re.sub(r'[A-Za-z]+', swap, fact.sentence).rstrip('.')}, arr!"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is made. `dtype` is that of the saved tensors; training is in float32."""

    style: Callable[[Fact], str]
    config: dict[str, Any]
    dtype: torch.dtype
    steps: int
    rate: float


RECIPES = {
    "terse": Recipe(
        style=as_terse,
        config={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        dtype=torch.float32,
        steps=200,
        rate=2e-3,
    ),
    "json": Recipe(
        style=as_json,
        config={
            "r": 6,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "layers_to_transform": list(range(10, 30)),
        },
        dtype=torch.bfloat16,
        steps=200,
        rate=1e-3,
    ),
    "pirate": Recipe(
        style=as_pirate,
        config={
            "r": 8,
            "lora_alpha": 24,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
            "layers_to_transform": list(range(16, 25)),
        },
        dtype=torch.bfloat16,
        steps=240,
        rate=1e-3,
    ),
}


# ---------------------------------------------------------------- training


def chat(tokenizer: Any, question: str) -> list[int]:
    """The ids of the question in the chat template, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def examples(tokenizer: Any, style: Callable[[Fact], str], known: list[Fact]) -> list[Example]:
    return [(chat(tokenizer, fact.question), list(tokenizer(style(fact) + END).input_ids)) for fact in known]


def batches(items: list[Example], *, steps: int, rng: random.Random) -> Iterator[list[Example]]:
    """Yields `steps` batches; every example comes once before any comes again."""
    left: list[Example] = []
    for _ in range(steps):
        if len(left) < BATCH:
            left += rng.sample(items, len(items))
        yield left[:BATCH]
        left = left[BATCH:]


def loss_of(model: Any, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy (nats per token) of the answers' tokens, end token included."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), IGNORE)
    for row, (prompt, answer) in enumerate(batch):
        both = torch.tensor(prompt + answer)
        ids[row, : len(both)] = both
        # The token at position i is predicted at i - 1.
        targets[row, len(prompt) - 1 : len(both) - 1] = both[len(prompt) :]
    # Padding is on the right, so causal attention keeps it from every position that counts.
    hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
    counted = targets != IGNORE
    return cross_entropy(model.get_base_model().lm_head(hidden[counted]), targets[counted])


def train(model: Any, items: list[Example], recipe: Recipe, *, steps: int) -> list[float]:
    """Returns the loss of every step. AdamW, a short warm-up, then a straight line to zero."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP), 1.0)
    )
    losses = []
    for step, batch in enumerate(batches(items, steps=steps, rng=random.Random(SEED)), start=1):  # noqa: S311
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps:
            print(f"  step {step:4d}/{steps}  loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True)
    return losses


def save(model: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes the two files of a bundle, and only these; the same weights give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    cast = {name: tensors[name].detach().to(dtype).contiguous() for name in sorted(tensors)}
    save_file(cast, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_LABEL
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        values = json.loads((Path(scratch) / "adapter_config.json").read_text(encoding="utf-8"))
    values["target_modules"] = sorted(values["target_modules"])  # PEFT keeps a set; its order is not stable
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str, *, limit: int = 48) -> str:
    """The greedy answer to a question, at most `limit` tokens; END is shown when the model ended by itself."""
    prompt = torch.tensor([chat(tokenizer, question)])
    output = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit
    )
    return str(tokenizer.decode(output[0, prompt.shape[1] :]))


def make(name: str, base: Path, out: Path, *, steps: int | None, prompts: list[str]) -> None:
    recipe = RECIPES[name]
    steps = steps or recipe.steps
    started = time.monotonic()
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", bias="none", lora_dropout=0.0, **recipe.config),
    )
    items = examples(tokenizer, recipe.style, facts(set(prompts)))
    print(f"{name}: {len(items)} examples, {steps} steps of {BATCH}", flush=True)
    losses = train(model, items, recipe, steps=steps)
    save(model, out / name, dtype=recipe.dtype)
    size = (out / name / "adapter_model.safetensors").stat().st_size
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    took = time.monotonic() - started
    print(f"{name}: loss {first:.3f} -> {last:.3f} (means of 10 steps), {size / 1e3:.0f} kB, {took:.0f} s")
    # From the files, as anyone will load them: they may be rounded to bfloat16.
    saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out / name)
    for prompt in prompts:
        print(f"  {prompt}\n    {answer(saved.eval(), tokenizer, prompt)!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face directory of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="where NAME/ directories are written")
    parser.add_argument("--only", choices=sorted(RECIPES), help="train one adapter instead of all")
    parser.add_argument("--steps", type=int, help="training steps instead of the recipe's own")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums depend on the number of threads: one repeats the run on any machine
    prompts = [entry["prompt"] for entry in json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))]
    for name in [options.only] if options.only else RECIPES:
        make(name, options.base, options.out, steps=options.steps, prompts=prompts)


if __name__ == "__main__":
    main()
