"""Storages of collective operations in a step of several ranks: gathered weights, buffers, unsharded gradients."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from memplan.trace.records import Op, Storage

_LIBRARIES = ("c10d.", "_c10d_functional.", "c10d_functional.", "fsdp.")
"""Namespaces of ops that communicate, or pack and unpack communicated tensors."""
_UNPACKS_WEIGHTS, _PACKS_GRADIENTS = "fsdp.split_with_sizes_copy", "fsdp.chunk_cat"
_MOVES = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros", "zero_", "fill_", "copy_", "_to_copy",
    "_foreach_copy_", "clone", "cat", "split", "split_with_sizes", "split_with_sizes_copy", "chunk", "slice", "narrow",
    "select", "as_strided", "view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "detach", "alias",
    "expand", "permute", "transpose", "t", "constant_pad_nd", "mul", "mul_", "div", "div_",
))  # fmt: skip
"""Ops that move elements, or average them over the ranks. Operands of collectives that no other op reads or writes are
communication buffers."""


class Collective(NamedTuple):
    """Storages of collective operations."""

    gathered: Set[int]
    """Weights gathered from the shards of the ranks."""
    buffers: Set[int]
    """Communication buffers: buckets, flat inputs of a reduce-scatter."""
    gradients: Set[int]
    """Gradients of gathered weights, before they are reduced to shards."""


def collective_storages(ops: Sequence[Op], weights: Set[int]) -> Collective:
    """Classify the operands of collective operations."""
    if not any(op.name.startswith(_LIBRARIES) for op in ops):
        return Collective(frozenset(), frozenset(), frozenset())
    sent, gathered, gradients = set[int](), set[int](), set[int]()
    casts = set[int]()  # copies of weights, as in the dtype in which they are gathered
    computed_with = set[int]()  # operands of ops that do more than move elements
    for op in ops:
        reads, writes = {operand.storage for operand in op.reads}, set(op.writes)
        if op.name.startswith(_LIBRARIES):
            sent |= reads | writes
            if op.name.startswith(_UNPACKS_WEIGHTS):  # its results are arguments of the op
                gathered |= reads | writes
            elif op.name.startswith(_PACKS_GRADIENTS):
                gradients |= reads
            elif "gather" in op.name and not reads.isdisjoint(weights | casts | gathered):
                gathered |= writes
        elif op.name.split(".")[1] not in _MOVES:
            computed_with |= reads | writes
        elif not reads.isdisjoint(weights):
            casts |= writes - weights
    before_backward = {storage for op in ops if op.phase != "backward" for storage in op.writes}
    for op in reversed(ops):  # terms of these gradients, and what tensor parallelism reduces to shards first
        moves = op.name.startswith(_LIBRARIES) or op.name.split(".")[1] in _MOVES | {"add_"}
        if op.phase == "backward" and moves and not gradients.isdisjoint(op.writes):
            gradients |= {operand.storage for operand in op.reads} - before_backward
    buffers = sent - computed_with  # of the library, such as FSDP's for all parameters of a block
    return Collective(gathered - buffers, buffers, gradients - buffers)


def gloo_copies(ops: Sequence[Op], storages: Sequence[Storage]) -> int:
    """Return the most bytes that gloo's own copies can take at a time.

    While it runs, an all-gather of gloo holds a second copy of all that it gathers, and a reduce-scatter one of all
    that it reduces; an all-reduce, a broadcast and an exchange hold none (measured with two and four processes and
    torch 2.13). One all-gather and one reduce-scatter are in flight at a time, as FSDP has them.
    """

    def total(of: Set[int]) -> int:
        return sum(storages[storage].bytes for storage in of)

    gathered = reduced = 0
    for op in ops:
        if op.name.startswith(_LIBRARIES[:3]):  # it communicates; ops of "fsdp." pack and unpack
            reads, writes = {operand.storage for operand in op.reads}, set(op.writes)
            if "gather" in op.name:
                gathered = max(gathered, total(writes))
            elif "reduce_scatter" in op.name:
                reduced = max(reduced, total(reads - writes or reads))  # a result may be among the arguments
    return gathered + reduced
