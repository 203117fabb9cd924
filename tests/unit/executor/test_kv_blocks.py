import pytest

from services.executor.kv_blocks import BlockCounts, BlockPool

N = [bytes([i]) * 32 for i in range(8)]


def test_allocate_is_all_or_nothing_and_never_hands_out_the_null_block() -> None:
    pool = BlockPool(5, block_size=4)
    assert pool.allocate(5) is None
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.available == 0
    pool.check()


def test_named_blocks_are_cached_and_shared_until_room_is_needed() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = pool.allocate(2)
    for block, name in zip(blocks, N, strict=False):
        pool.publish(block, name, owner="r")
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=1, cached=2, held=0)
    shared = pool.match(N)
    assert shared == blocks
    pool.acquire(shared)
    pool.acquire(shared)
    pool.release(shared)
    assert pool.counts().held == 2
    pool.release(shared)
    assert pool.take_freed() == []
    assert len(pool.allocate(3)) == 3
    assert pool.match(N) == []
    assert sorted(pool.take_freed()) == sorted(blocks)
    pool.check()


def test_the_tail_of_a_chain_is_forgotten_before_its_head() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, N, strict=False):
        pool.publish(block, name, owner=None)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(N) == blocks[:2]


def test_forget_drops_one_owners_names_and_keeps_held_blocks() -> None:
    pool = BlockPool(6, block_size=4)
    mine, other = pool.allocate(2), pool.allocate(1)
    pool.publish(mine[0], N[0], owner="a")
    pool.publish(mine[1], N[1], owner="a")
    pool.publish(other[0], N[2], owner="b")
    pool.release(mine[1:])
    assert pool.forget("a") == 2
    assert pool.match(N[:1]) == []
    assert pool.match(N[2:]) == other
    pool.check()
    pool.release(mine[:1])
    assert pool.counts().free == 4
    pool.check()


class Counted(list):
    """A list that counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


def test_forgetting_an_owner_looks_at_its_blocks_only() -> None:
    pool = BlockPool(1000, block_size=4)
    blocks = pool.allocate(999)
    pool.publish(blocks[0], N[0], owner="a")
    pool._name, pool._owner = Counted(pool._name), Counted(pool._owner)
    assert (pool.forget("a"), pool.forget("b")) == (1, 0)
    assert pool._name.looks + pool._owner.looks < 10


def test_a_name_taken_leaves_the_second_block_private() -> None:
    pool = BlockPool(4, block_size=4)
    first, second = pool.allocate(2)
    pool.publish(first, N[0], owner=None)
    pool.publish(second, N[0], owner=None)
    pool.release([second])
    assert pool.match(N) == [first]
    pool.check()


def test_misuse_is_an_error() -> None:
    pool = BlockPool(4, block_size=4)
    with pytest.raises(ValueError, match="more often"):
        pool.release([1])
    with pytest.raises(ValueError, match="not held"):
        pool.publish(1, N[0], owner=None)
    with pytest.raises(ValueError, match="not held"):
        pool.discard([2])
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1, block_size=4)
