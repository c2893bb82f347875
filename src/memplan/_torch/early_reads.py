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
    schedule, waits = _Schedule(list(graph.nodes), frozenset(freed)), dict[fx.Node, list[fx.Node]]()
    for node in schedule.nodes:
        if _is_pointwise(node) and _bytes(node) >= SMALL:
            candidates = (
                at for at in schedule.kernels_before_use(node) if schedule.freed_bytes(node, at) >= GAIN * _bytes(node)
            )
            if (first := next(candidates, None)) is not None:
                waits.setdefault(schedule.nodes[first], []).append(node)
    return waits


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
        return [at for at, node in enumerate(self.nodes) if _is_kernel(node)]

    @cached_property
    def roots(self) -> Mapping[fx.Node, frozenset[int]]:
        """Storages that each op reads, counting views and fused pointwise ops as part of their readers."""
        roots_of = dict[fx.Node, frozenset[int]]()
        for node in self.nodes:
            fused = _is_view(node) or (_is_pointwise(node) and not _has_own_memory(node))
            roots_of[node] = self._storages_read(node, roots_of) if fused else _storages(node)
        return roots_of

    @staticmethod
    def _storages_read(node: fx.Node, roots: Mapping[fx.Node, frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*(roots[operand] for operand in node.all_input_nodes))

    @cached_property
    def readers(self) -> Mapping[int, Sequence[fx.Node]]:
        """Ops that read each storage, directly or through fused ops."""
        readers_of = dict[int, list[fx.Node]]()
        for node in self.nodes:
            for memory in self._storages_read(node, self.roots):
                readers_of.setdefault(memory, []).append(node)
        return readers_of

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage; 0 for those that cannot be freed."""
        sizes = {
            storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for node in self.nodes
            for tensor in _tensors(node)
        }
        stay = (node for node in self.nodes if node.op == "placeholder" and node not in self.freeable)
        return sizes | {memory: 0 for node in stay for memory in _storages(node)}

    @cached_property
    def ancestors_of(self) -> Mapping[fx.Node, int]:
        """Ops that each op depends on, directly or not, as a bit set of positions."""
        ancestors = dict[fx.Node, int]()
        for node in self.nodes:
            ancestors[node] = 0
            for operand in node.all_input_nodes:
                ancestors[node] |= ancestors[operand] | 1 << self.position[operand]
        return ancestors

    def kernels_before_use(self, node: fx.Node) -> list[int]:
        """Return the positions of the kernels after `node` that all its users depend on."""
        common = reduce(and_, (self.ancestors_of[user] for user in _users(node)), -1)
        return [at for at in self.kernels if at > self.position[node] and common >> at & 1]

    def freed_bytes(self, node: fx.Node, at: int) -> int:
        """Return the bytes of storages that, from position `at` on, only `node` and its fused users read."""
        own = {node, *_transitive_users(node)}

        def is_free(memory: int) -> bool:
            later = (reader for reader in self.readers[memory] if self.position[reader] >= at)
            return all(reader in own and reader.op != "output" for reader in later)

        return sum(self.sizes[memory] for memory in self.roots[node] if is_free(memory))


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
    value = node.meta.get("val")
    return [part for part in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(part, Tensor)]
