"""From a checkpoint's directory to an engine: the one place where the shell meets torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from services.executor.engine.build import EngineSizes, build_engine
from services.executor.engine.loop import Engine
from services.executor.engine.staging import Staged, stage
from services.executor.intake import HostAdapter
from services.executor.model.native import load_native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Booted:
    """An engine that has not started, and the function that arranges a revision's arrays for it."""

    engine: Engine
    stage: Callable[[HostAdapter], Staged]


def boot(
    directory: str,
    *,
    dtype: str,
    base_id: str,
    sizes: EngineSizes,
    max_context: int | None,
    threads: int,
    clock: Callable[[], float],
    on_fault: Callable[[BaseException], None],
) -> Booted:
    """Loads the checkpoint and builds the engine. Blocking: seconds to minutes.

    Raises:
        ModelUnsupported: the checkpoint asks for something that is not computed exactly.
        ValueError: a budget does not hold one block or one page.
        OSError: a file cannot be read.
    """
    if threads:
        torch.set_num_threads(threads)
    decoder = load_native(Path(directory), dtype=DTYPES[dtype], max_context=max_context)
    engine = build_engine(decoder, base_digest=base_id, sizes=sizes, clock=clock, on_fault=on_fault)
    return Booted(engine, partial(stage, groups=decoder.groups, dtype=decoder.info.dtype))
