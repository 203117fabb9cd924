"""How long a loader's connections last: as long as what may be brought over them."""

import dataclasses

import pytest

from loraport import admin
from services.loader import service
from services.loader.config import AdmissionConfig, LoaderConfig
from services.loader.fetch.limits import FetchLimits
from services.loader.receive import MIN_BYTES_PER_S, PATIENCE_S
from services.loader.turns import WAIT_FOR_TURN_S
from services.shared.config import from_mapping
from tests.unit.loader.test_config import NEEDED

GRACE = "grpc.max_connection_age_grace_ms"


def door(largest: int, limits: FetchLimits) -> dict[str, int]:
    config = from_mapping(LoaderConfig, NEEDED, where="test")
    config = dataclasses.replace(config, admission=AdmissionConfig(max_weights_bytes=largest))
    return dict(service.door(config, limits))


@pytest.mark.parametrize("largest", [1, 1 << 30, 8 << 30])
def test_the_largest_upload_at_the_least_rate_outlives_its_connection(largest: int) -> None:
    limits = FetchLimits()
    options = door(largest, limits)
    brought_s = WAIT_FOR_TURN_S + PATIENCE_S + largest / MIN_BYTES_PER_S
    fetched_s = WAIT_FOR_TURN_S + limits.total_s(largest) + limits.total_s(64 << 10)
    assert options[GRACE] / 1000 >= max(brought_s, fetched_s) + 300
    assert options["grpc.max_connection_age_ms"] == 1_800_000


def test_a_client_waits_for_the_largest_upload_at_the_least_rate() -> None:
    largest = AdmissionConfig().max_weights_bytes
    assert PATIENCE_S + largest / MIN_BYTES_PER_S < admin.TRANSFER_TIMEOUT_S


def test_a_grace_is_no_longer_than_the_transport_takes() -> None:
    assert door(1 << 50, FetchLimits())[GRACE] == service.LONGEST_MS < 1 << 31
