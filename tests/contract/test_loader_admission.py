"""What an operator may set about what is let in: a tenant's bytes of a day, and the norm of an update."""

from pathlib import Path
from unittest.mock import MagicMock

import grpc
import pytest

from services.loader import service
from services.loader.fetch.limits import FetchLimits
from services.loader.receive import MAX_CONFIG_BYTES
from services.shared.rpc.status import from_rpc_error
from tests.bundle_files import tensors, weights
from tests.loader_rig import reason, running


async def test_a_tenants_bytes_of_a_day(tmp_path: Path, address: str, folder: Path) -> None:
    size = len(weights(tensors())) + MAX_CONFIG_BYTES
    day = size * 3 // 2
    limits = {"admission": {"max_weights_bytes": size - MAX_CONFIG_BYTES, "tenant_bytes_per_day": day}}
    async with running(tmp_path, address, folder, **limits) as rig:
        first, second = (rig.registry.register(seed=seed) for seed in (301, 302))
        assert (await rig.upload(first)).admitted
        with pytest.raises(grpc.RpcError) as caught:
            await rig.upload(second)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value, unavailable="INTERNAL")
        assert error.reason == "QUOTA_EXCEEDED"
        assert error.retry_after_s == pytest.approx((2 * size - day) * 86400 / day, rel=0.01)
        assert (await rig.upload(first)).admitted, "what was judged already costs nothing"
        other = rig.registry.register(seed=303, tenant="globex")
        assert (await rig.upload(other)).admitted, "the budget is the tenant's own"
        assert rig.registry.revisions[second.revision_id].reasons == [], "a full budget is no verdict"


async def test_small_weights_do_not_bring_their_configs_for_nothing(tmp_path: Path, address: str, folder: Path) -> None:
    """Aborted uploads of one session: each may send a config, which is announced nowhere."""
    size = len(weights(tensors()))
    limits = {"admission": {"max_weights_bytes": size, "tenant_bytes_per_day": 3 * (size + MAX_CONFIG_BYTES)}}
    async with running(tmp_path, address, folder, **limits) as rig:
        bundle = rig.registry.register(seed=306)
        refused = [await reason(rig.upload(bundle, content=b"")) for _ in range(4)]
        assert refused == ["INVALID_REQUEST"] * 3 + ["QUOTA_EXCEEDED"]


async def test_the_limit_of_an_update_is_the_operators(tmp_path: Path, address: str, folder: Path) -> None:
    async with running(tmp_path, address, folder, admission={"max_update_norm": 1e-6}) as rig:
        bundle = rig.registry.register(seed=304)
        answer = await rig.upload(bundle)
        assert not answer.admitted
        assert {violation.code for violation in answer.violations} == {"UPDATE_NORM"}
    async with running(tmp_path, address, folder, admission={"max_update_norm": 0}) as rig:
        assert (await rig.upload(rig.registry.register(seed=305))).admitted


async def test_connections_last_as_long_as_the_largest_upload(
    tmp_path: Path, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MagicMock(wraps=service.Server)
    monkeypatch.setattr(service, "Server", opened)
    async with running(tmp_path, address, folder, admission={"max_weights_bytes": 8 << 30}) as rig:
        assert opened.call_args.kwargs["options"] == service.door(rig.service._config, FetchLimits())
