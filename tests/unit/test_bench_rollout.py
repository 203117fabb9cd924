"""The rollout bench in small: its judge is the registry's own, and its figures move the way they must."""

from bench.rollout import Traffic, many, share
from services.registry.rollout.states import State


def test_identical_revisions_are_promoted_and_a_slow_one_is_not() -> None:
    same = many(20, 3, Traffic())
    assert share(same) == 0
    assert share(same, state=State.RETAINING) >= 95
    assert sum(item.naive for item in same) >= 1, "a plain test that is looked at often would have gone back"
    slow = many(10, 4, Traffic(slow=1.5))
    assert share(slow, within=400) == 100


def test_a_bench_is_a_function_of_its_seed() -> None:
    first = many(4, 5, Traffic(slow=1.2))
    assert first == many(4, 5, Traffic(slow=1.2))
    assert first != many(4, 6, Traffic(slow=1.2))
