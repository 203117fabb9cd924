"""The split of traffic: even, sticky, monotone, and the same for everybody who computes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.shared.split import BUCKETS, arm_of, bucket_of, split_unit

SALT = bytes(range(16))
shares = st.integers(0, BUCKETS)
buckets = st.integers(0, BUCKETS - 1)
GOLDEN = [3742, 4495, 6528]


def test_the_buckets_are_these():
    """Routers of two releases split one rollout: a change of these numbers moves conversations between revisions."""
    units = [
        split_unit(session="chat-1", user="ann", request="r1"),
        split_unit(session="", user="ann", request="r1"),
        split_unit(session="", user="", request="r1"),
    ]
    assert units == ["session/chat-1", "user/ann", "request/r1"]
    assert [bucket_of(SALT, "acme", unit) for unit in units] == GOLDEN


@given(buckets, shares, shares)
def test_a_growing_share_takes_nobody_back(bucket, one, other):
    low, high = sorted((one, other))
    if arm_of(bucket, low) == "new":
        assert arm_of(bucket, high) == "new"


@given(shares)
def test_the_control_is_as_large_as_the_new_arm_or_all_that_is_left(share):
    arms = [arm_of(bucket, share) for bucket in range(BUCKETS)]
    assert arms.count("new") == share
    assert arms.count("control") == min(share, BUCKETS - share)


@given(buckets)
def test_no_share_is_nobody_and_all_is_everybody(bucket):
    assert arm_of(bucket, 0) == "old"
    assert arm_of(bucket, BUCKETS) == "new"


@given(st.binary(min_size=16, max_size=16), st.text(max_size=20), st.text(max_size=20))
def test_a_unit_has_one_bucket(salt, tenant, unit):
    assert bucket_of(salt, tenant, unit) == bucket_of(bytes(salt), str(tenant), str(unit))
    assert 0 <= bucket_of(salt, tenant, unit) < BUCKETS


@pytest.mark.parametrize("share", [100, 500, 2500])
def test_the_arms_get_their_parts_of_the_units(share):
    """20,000 sessions: a part is off by more than 5 standard deviations only if the hash is not even."""
    count = 20_000
    arms = [arm_of(bucket_of(SALT, "acme", f"session/{i}"), share) for i in range(count)]
    part = share / BUCKETS
    for arm in ("new", "control"):
        assert abs(arms.count(arm) - count * part) < 5 * (count * part * (1 - part)) ** 0.5


def test_tenants_and_rollouts_split_independently():
    """Who is early in one rollout is not early in the next: of 1 % in two, about 1 % of these are in both."""
    units = [f"session/{i}" for i in range(20_000)]
    early = {u for u in units if bucket_of(SALT, "acme", u) < 1000}
    for salt, tenant in ((b"another salt 16 ", "acme"), (SALT, "globex")):
        both = sum(bucket_of(salt, tenant, unit) < 1000 for unit in early)
        assert 120 < both < 280
