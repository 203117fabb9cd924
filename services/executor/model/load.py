"""Loads a checkpoint with the decoder that `families.py` chooses for it."""

from __future__ import annotations

import json
from pathlib import Path

import structlog
import torch

from services.executor.kernels.cpu_step import CpuStep
from services.executor.model.config import ConfigUnsupported
from services.executor.model.families import NATIVE, Wanted, choose_path
from services.executor.model.interface import Decoder, ModelUnsupported
from services.executor.model.native import load_native
from services.executor.model.products import Products, product_dtype

log = structlog.get_logger()


def load_decoder(
    directory: Path, *, dtype: torch.dtype, max_context: int | None = None, wanted: Wanted = "auto",
    cpu_products: Products = "native", device: torch.device | str = "cpu", step: CpuStep | None = None,
) -> Decoder:  # fmt: skip
    """Load a local Hugging Face directory. `max_context` caps the tokens of a request; `wanted` forces a decoder.

    `cpu_products` says what it is computed in; see `products.py`. The native decoder rounds its weights to `dtype` all
    the same, the transformers one then has them as they are in the checkpoint. `step` is used on a CPU.

    Raises:
        ModelUnsupported: neither decoder, or not the one that is wanted, computes the checkpoint exactly.
    """
    try:
        path = choose_path(json.loads((directory / "config.json").read_text()), wanted=wanted)
    except (OSError, ValueError, TypeError, ConfigUnsupported) as error:
        raise ModelUnsupported(f"{directory}: {error}") from error
    products = product_dtype(dtype, cpu_products) if torch.device(device).type == "cpu" else dtype
    log.info("decoder chosen", path=path.name, reason=path.reason, products=str(products).removeprefix("torch."))
    if path.name == NATIVE:
        usable = step if torch.device(device).type == "cpu" else None
        return load_native(
            directory, dtype=dtype, max_context=max_context, products=products, device=device, step=usable
        )
    # Imported here: transformers takes seconds, and the native path does without it.
    from services.executor.model.hf import load_transformers

    return load_transformers(directory, dtype=products, max_context=max_context, device=device)
