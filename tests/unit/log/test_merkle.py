"""The Merkle tree against RFC 6962's published vectors, a tree built by its definition, and mutations."""

import hashlib

import pytest

from loraport.log import merkle

MOST = 130
# The leaves and roots that Certificate Transparency's reference tests publish.
LEAVES = [bytes.fromhex(text) for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657")] + [
    bytes.fromhex("606162636465666768696a6b6c6d6e6f")
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
# (index, size, proof) and (old, new, proof) of the same tests; leaves are counted from 0 here.
INCLUSION = [
    (0, 1, []),
    (
        0,
        8,
        [
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ],
    ),
    (
        5,
        8,
        [
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ],
    ),
    (2, 3, ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"]),
    (
        1,
        5,
        [
            "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ],
    ),
]
CONSISTENCY = [
    (1, 1, []),
    (
        1,
        8,
        [
            "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
        ],
    ),
    (
        6,
        8,
        [
            "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
            "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
            "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        ],
    ),
    (
        2,
        5,
        [
            "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
            "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        ],
    ),
]


class Tree:
    """A log's memory: the hashes of complete subtrees, made by appending only."""

    def __init__(self, bodies: list[bytes]) -> None:
        self.nodes: dict[merkle.Node, bytes] = {}
        for size, body in enumerate(bodies):
            left = [self.nodes[node] for node in merkle.merged(size)]
            self.nodes |= dict(merkle.new_nodes(size, merkle.leaf_hash(body), left))

    def root(self, size: int) -> bytes:
        return merkle.fold([self.nodes[node] for node in merkle.cover(0, size)])

    def inclusion(self, index: int, size: int) -> list[bytes]:
        return merkle.prove(merkle.inclusion_ranges(index, size), self.nodes.__getitem__)

    def consistency(self, old: int, new: int) -> list[bytes]:
        return merkle.prove(merkle.consistency_ranges(old, new), self.nodes.__getitem__)


def by_definition(bodies: list[bytes]) -> bytes:
    """MTH of RFC 6962 §2.1, word by word."""
    if not bodies:
        return hashlib.sha256().digest()
    if len(bodies) == 1:
        return hashlib.sha256(b"\x00" + bodies[0]).digest()
    split = 1
    while split * 2 < len(bodies):
        split *= 2
    return hashlib.sha256(b"\x01" + by_definition(bodies[:split]) + by_definition(bodies[split:])).digest()


BODIES = [f"leaf {i}".encode() for i in range(MOST)]
TREE = Tree(BODIES)
HASHES = [merkle.leaf_hash(body) for body in BODIES]


@pytest.mark.parametrize("size", range(1, 9))
def test_published_roots(size: int) -> None:
    assert merkle.root(map(merkle.leaf_hash, LEAVES[:size])).hex() == ROOTS[size - 1]
    assert Tree(LEAVES).root(size).hex() == ROOTS[size - 1]


@pytest.mark.parametrize(("index", "size", "proof"), INCLUSION)
def test_published_inclusion_proofs(index: int, size: int, proof: list[str]) -> None:
    made = Tree(LEAVES).inclusion(index, size)
    assert [item.hex() for item in made] == proof
    leaf = merkle.leaf_hash(LEAVES[index])
    assert merkle.verify_inclusion(leaf, index, size, made, bytes.fromhex(ROOTS[size - 1]))


@pytest.mark.parametrize(("old", "new", "proof"), CONSISTENCY)
def test_published_consistency_proofs(old: int, new: int, proof: list[str]) -> None:
    made = Tree(LEAVES).consistency(old, new)
    assert [item.hex() for item in made] == proof
    roots = bytes.fromhex(ROOTS[old - 1]), bytes.fromhex(ROOTS[new - 1])
    assert merkle.verify_consistency(old, new, made, *roots)


def test_the_empty_tree_has_the_hash_of_nothing() -> None:
    assert merkle.root([]) == hashlib.sha256(b"").digest() == merkle.EMPTY_ROOT


def test_roots_are_those_of_the_definition() -> None:
    frontier = merkle.Frontier()
    for size in range(1, MOST + 1):
        frontier.append(HASHES[size - 1])
        assert TREE.root(size) == by_definition(BODIES[:size]) == frontier.root()


def test_every_leaf_of_every_tree_is_proved_and_no_other() -> None:
    for size in range(1, MOST + 1):
        root = TREE.root(size)
        for index in range(size):
            proof = TREE.inclusion(index, size)
            assert len(proof) <= (size - 1).bit_length()
            assert merkle.verify_inclusion(HASHES[index], index, size, proof, root)
            assert not merkle.verify_inclusion(HASHES[(index + 1) % MOST], index, size, proof, root)


def test_every_tree_is_proved_a_prefix_of_every_larger_one() -> None:
    for new in range(1, MOST + 1):
        for old in range(1, new + 1):
            proof = TREE.consistency(old, new)
            assert len(proof) <= new.bit_length() + 1
            assert merkle.verify_consistency(old, new, proof, TREE.root(old), TREE.root(new))
            assert merkle.verify_consistency(0, new, [], merkle.EMPTY_ROOT, TREE.root(new))


def _flips(data: bytes) -> list[bytes]:
    return [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(len(data))]


@pytest.mark.parametrize(("index", "size"), [(0, 1), (0, 2), (4, 5), (6, 7), (64, 65), (77, 130), (129, 130)])
def test_no_byte_of_an_inclusion_proof_may_change(index: int, size: int) -> None:
    leaf, proof, root = HASHES[index], TREE.inclusion(index, size), TREE.root(size)
    assert not any(merkle.verify_inclusion(other, index, size, proof, root) for other in _flips(leaf))
    assert not any(merkle.verify_inclusion(leaf, index, size, proof, other) for other in _flips(root))
    for place, item in enumerate(proof):
        for other in _flips(item):
            assert not merkle.verify_inclusion(leaf, index, size, [*proof[:place], other, *proof[place + 1 :]], root)
        assert not merkle.verify_inclusion(leaf, index, size, proof[:place] + proof[place + 1 :], root)
    assert not merkle.verify_inclusion(leaf, index, size, [*proof, root], root)
    for other in (index - 1, index + 1, index + size):
        assert not merkle.verify_inclusion(leaf, other, size, proof, root)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 3), (4, 8), (6, 8), (64, 130), (77, 130), (129, 130), (5, 5)])
def test_no_byte_of_a_consistency_proof_may_change(old: int, new: int) -> None:
    proof, roots = TREE.consistency(old, new), (TREE.root(old), TREE.root(new))
    for other in _flips(roots[0]):
        assert not merkle.verify_consistency(old, new, proof, other, roots[1])
    for other in _flips(roots[1]):
        assert not merkle.verify_consistency(old, new, proof, roots[0], other)
    for place, item in enumerate(proof):
        for other in _flips(item):
            changed = [*proof[:place], other, *proof[place + 1 :]]
            assert not merkle.verify_consistency(old, new, changed, *roots)
        assert not merkle.verify_consistency(old, new, proof[:place] + proof[place + 1 :], *roots)
    assert not merkle.verify_consistency(old, new, [*proof, roots[0]], *roots)
    assert not merkle.verify_consistency(new + 1, new, proof, *roots)


def test_what_cannot_be_proved_is_refused() -> None:
    for index, size in ((0, 0), (1, 1), (-1, 2)):
        with pytest.raises(ValueError, match="index"):
            merkle.inclusion_ranges(index, size)
    for old, new in ((0, 1), (2, 1)):
        with pytest.raises(ValueError, match="sizes"):
            merkle.consistency_ranges(old, new)
    with pytest.raises(ValueError, match="not a subtree"):
        merkle.cover(1, 3)
    assert not merkle.verify_inclusion(b"short", 0, 1, [], b"short")
    assert not merkle.verify_consistency(3, 5, [], TREE.root(3), TREE.root(5))
