"""A small base model and a few adapters, made on the spot, in the layout of the adapter cases.

Used where the shared cases are absent, so that the end-to-end tests run anywhere. Random weights, fixed seeds; nothing
here says what the right answers are, so tests that compare answers with stored ones still need the cases.
"""

import os
from pathlib import Path

ALPHAS = {"alpha_1": (8, 1), "alpha_8": (8, 8), "alpha_64": (8, 64), "plain_r64": (64, 64)}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_small_world(out: Path) -> None:
    """Writes `bases/tiny` and `bundles/<name>` below `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    base = out / "bases" / "tiny"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    write_tokenizer(base)
    for name, (rank, alpha) in ALPHAS.items():
        torch.manual_seed(7)
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=MODULES, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        for key, tensor in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(tensor, std=0.2)
        model.save_pretrained(out / "bundles" / name, save_embedding_layers=False)
        (out / "bundles" / name / "README.md").unlink(missing_ok=True)


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of 512 ids to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"line {i} of {i * i} words, and {i % 7} more" for i in range(400)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
