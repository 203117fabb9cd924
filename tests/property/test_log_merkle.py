"""Laws of the Merkle tree: it is what RFC 6962 defines, appending changes no earlier hash, a proof proves one thing."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from loraport.log import merkle


class Log:
    """The hashes that a log keeps, made by appending."""

    def __init__(self, count: int) -> None:
        self.leaves = [merkle.leaf_hash(str(i).encode()) for i in range(count)]
        self.nodes: dict[merkle.Node, bytes] = {}
        for size, leaf in enumerate(self.leaves):
            left = [self.nodes[node] for node in merkle.merged(size)]
            made = dict(merkle.new_nodes(size, leaf, left))
            assert not made.keys() & self.nodes.keys(), "a hash was written twice"
            self.nodes |= made

    def root(self, size: int) -> bytes:
        return merkle.fold([self.nodes[node] for node in merkle.cover(0, size)])


LOG = Log(5000)
sizes = st.integers(1, 5000)


@given(sizes, st.data())
def test_inclusion(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    proof = merkle.prove(merkle.inclusion_ranges(index, size), LOG.nodes.__getitem__)
    root = LOG.root(size)
    assert merkle.verify_inclusion(LOG.leaves[index], index, size, proof, root)
    other = data.draw(st.integers(0, 4999))
    # The proof's shape depends on the index and the size, so another pair may share it; then nothing is claimed but
    # what the root binds: the leaf and its place among its siblings.
    if other != index:
        assert not merkle.verify_inclusion(LOG.leaves[other], index, size, proof, root)
        assert not merkle.verify_inclusion(LOG.leaves[index], other, size, proof, root)


@given(sizes, sizes)
def test_consistency(one: int, two: int) -> None:
    old, new = sorted((one, two))
    proof = merkle.prove(merkle.consistency_ranges(old, new), LOG.nodes.__getitem__)
    roots = LOG.root(old), LOG.root(new)
    assert merkle.verify_consistency(old, new, proof, *roots)
    if old != new:
        assert not merkle.verify_consistency(old, new, proof, roots[1], roots[0])
        assert not merkle.verify_consistency(old, new, proof, roots[0], roots[0])


@given(st.lists(st.binary(max_size=8), max_size=40))
def test_roots_follow_the_definition(bodies: list[bytes]) -> None:
    def define(part: list[bytes]) -> bytes:
        if len(part) < 2:
            return hashlib.sha256(b"\x00" + part[0] if part else b"").digest()
        split = 1 << ((len(part) - 1).bit_length() - 1)
        return hashlib.sha256(b"\x01" + define(part[:split]) + define(part[split:])).digest()

    assert merkle.root(map(merkle.leaf_hash, bodies)) == define(bodies)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=8), st.binary(min_size=32, max_size=32), sizes, sizes)
def test_made_up_proofs_prove_nothing_and_break_nothing(proof: list[bytes], leaf: bytes, index: int, size: int) -> None:
    assert not merkle.verify_inclusion(leaf, index, size, proof, LOG.root(size))
    assert not merkle.verify_consistency(index, size, proof, leaf, LOG.root(size))
