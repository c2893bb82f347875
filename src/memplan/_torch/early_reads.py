"""Choose pointwise ops to compute early, because their operands would otherwise stay alive and take more memory.

Inductor fuses pointwise ops into the kernel that reads them. If that kernel runs much later, the operands stay alive
until then: for a slice of a larger gradient, as `cat` and slicing leave them, the whole gradient.

MONAI's VNet (64 voxels a side) has its smallest peak at 465 MB with this and at 473 without; ResNet-18, a 3D U-Net and
a GPT have the same plans at nine budgets each.

Seen in torch 2.13: ``torch._ops.OpOverload``, ``overloadpacket`` and ``is_view`` of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_

import torch
from torch import Tensor, fx

from memplan._torch.tensors import storage_key

_aten = torch.ops.aten
KERNELS = frozenset([_aten.convolution, _aten.convolution_backward, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm])
"""Ops that Inductor does not fuse with others: a value needed before such an op is written to memory before it."""
GAIN = 1.25
"""Least ratio of freed bytes to result bytes for computing an op early, since writing the result by itself costs time.
Chosen, not measured."""
SMALL = 1 << 20
"""Bytes: smaller results stay fused into their readers. Chosen, not measured."""


def to_compute_first(graph: fx.Graph, freed: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Choose pointwise ops to compute before a kernel of torch although they are read after it, where this frees
    operands that take more memory than the result.

    Args:
        graph: core ops in the order of a schedule.
        freed: arguments of the graph that can be freed after their last use.

    Returns:
        Kernel -> the ops to compute before it.
    """
    schedule, first_ops = _Schedule(list(graph.nodes), frozenset(freed)), dict[fx.Node, list[fx.Node]]()
    for node in schedule.nodes:
        if not _is_pointwise(node) or _bytes(node) < SMALL:
            continue
        for at in schedule.kernels_before_use(node):
            if schedule.freed_bytes(node, at) >= GAIN * _bytes(node):
                first_ops.setdefault(schedule.nodes[at], []).append(node)
                break
    return first_ops


@dataclass(frozen=True)
class _Schedule:
    """The nodes of a graph in schedule order, and the storages that each reads."""

    nodes: Sequence[fx.Node]
    freeable: frozenset[fx.Node]
    """Arguments of the graph that can be freed."""

    @cached_property
    def position(self) -> Mapping[fx.Node, int]:
        return {node: at for at, node in enumerate(self.nodes)}

    @cached_property
    def kernels(self) -> Sequence[int]:
        """Positions of the kernels of torch, which Inductor does not fuse with other ops."""
        return [at for at, node in enumerate(self.nodes) if _is_kernel(node)]

    @cached_property
    def roots(self) -> Mapping[fx.Node, frozenset[int]]:
        """Op -> keys of the storages that a reader of its result reads: those of the op's operands if the op is fused
        into its readers, as views and pointwise ops are, else the op's own."""
        roots_of = dict[fx.Node, frozenset[int]]()
        for node in self.nodes:
            fused = _is_view(node) or (_is_pointwise(node) and not _has_own_memory(node))
            roots_of[node] = self._storages_read(node, roots_of) if fused else _storages(node)
        return roots_of

    @staticmethod
    def _storages_read(node: fx.Node, roots: Mapping[fx.Node, frozenset[int]]) -> frozenset[int]:
        """Keys of the storages that an op reads through its operands, by the `roots` of these."""
        return frozenset().union(*(roots[operand] for operand in node.all_input_nodes))

    @cached_property
    def readers(self) -> Mapping[int, Sequence[fx.Node]]:
        """Key of a storage -> ops that read it, directly or through fused ops."""
        readers_of = dict[int, list[fx.Node]]()
        for node in self.nodes:
            for memory in self._storages_read(node, self.roots):
                readers_of.setdefault(memory, []).append(node)
        return readers_of

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Key of a storage -> its bytes; 0 for those that cannot be freed."""
        sizes = {
            storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for node in self.nodes
            for tensor in _tensors(node)
        }
        stay = (node for node in self.nodes if node.op == "placeholder" and node not in self.freeable)
        return sizes | {memory: 0 for node in stay for memory in _storages(node)}

    @cached_property
    def ancestors_of(self) -> Mapping[fx.Node, int]:
        """Op -> the ops that it depends on, directly or not, as a bit set: bit i is the op at position i."""
        ancestors = dict[fx.Node, int]()
        for node in self.nodes:
            ancestors[node] = 0
            for operand in node.all_input_nodes:
                ancestors[node] |= ancestors[operand] | 1 << self.position[operand]
        return ancestors

    def kernels_before_use(self, node: fx.Node) -> list[int]:
        """Return the positions of the kernels after ``node`` that all its users depend on."""
        common_ancestors = reduce(and_, (self.ancestors_of[user] for user in _users(node)), -1)  # a bit set
        return [at for at in self.kernels if at > self.position[node] and common_ancestors >> at & 1]

    def freed_bytes(self, node: fx.Node, at: int) -> int:
        """Return the bytes of storages that, from position ``at`` on, only ``node`` and its fused users read."""
        fused = {node, *_transitive_users(node)}

        def is_free(storage: int) -> bool:
            """Return whether no other op reads a storage from ``at`` on."""
            later_readers = (reader for reader in self.readers[storage] if self.position[reader] >= at)
            return all(reader in fused and reader.op != "output" for reader in later_readers)

        return sum(self.sizes[storage] for storage in self.roots[node] if is_free(storage))


def _transitive_users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, and those of each pointwise op and view among them: all ops that read the node's
    storage, where pointwise ops are fused into their readers."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if _is_pointwise(user) or _is_view(user):
                    stack.append(user)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, with views replaced by their users."""
    for user in node.users:
        if _is_view(user):
            yield from _users(user)
        else:
            yield user


def _is_kernel(node: fx.Node) -> bool:
    """Return whether a kernel of torch computes the node, which Inductor does not fuse with other ops."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in KERNELS


def _has_own_memory(node: fx.Node) -> bool:
    """Return whether a pointwise op's result is written to memory anyway: returned, or read by a kernel of torch."""
    return any(user.op == "output" or _is_kernel(user) for user in _users(node))


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _storages(node: fx.Node) -> frozenset[int]:
    return frozenset(storage_key(tensor.untyped_storage()) for tensor in _tensors(node))


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(node))


def _tensors(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors that are a node's value, one or several."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [part for part in parts if isinstance(part, Tensor)]
