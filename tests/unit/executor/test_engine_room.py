"""An executor with nothing else to do makes room for a load."""

from __future__ import annotations

from pathlib import Path

from services.executor.engine.build import EngineSizes
from services.executor.engine.device_pool import POOL_DTYPE
from services.executor.engine.staging import stage
from tests.support.harness import open_world
from tests.support.tiny import make_adapter, make_base, read_bundle


def test_a_load_that_evicts_goes_on_when_nothing_else_happens(tmp_path: Path) -> None:
    """The evicted pages are erased first, and then nobody but the load itself is there to wake the device thread."""
    base = make_base(tmp_path / "base")
    for seed, name in enumerate("ab"):
        make_adapter(base, tmp_path / name, seed=seed, r=8, target_modules=["q_proj"])
    world = open_world(tmp_path / "base", EngineSizes(kv_bytes=2**20, pool_bytes=8 * 9472))
    assert world.engine.state().page_count == 1
    world.engine.start()
    try:
        for name in ("a", "b", "a"):
            bundle = read_bundle(base, tmp_path / name)
            staged = stage(bundle.host(), world.decoder.groups, dtype=POOL_DTYPE)
            world.engine.load(staged).result(timeout=60).release()
    finally:
        world.engine.close()
