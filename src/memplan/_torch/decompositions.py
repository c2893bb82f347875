"""torch's own decompositions of ops into core ops, traced for one call.

Seen in torch 2.13: ``torch._decomp.global_decomposition_table``, ``make_fx`` in ``torch.fx.experimental.proxy_tensor``,
``FakeTensorMode``, ``OpOverload._can_decompose``, ``decompose`` and ``_schema``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg


@dataclass(frozen=True, slots=True)
class CoreCall:
    """A call of a core op in a decomposition."""

    target: str
    """As ``aten.add.Tensor``."""
    args: tuple[Any, ...]
    """Tensors are nodes of the traced graph, at any depth."""
    kwargs: Mapping[str, Any]
    outputs: tuple[fx.Node | None, ...]
    """None where nothing reads a result."""
    multiple: bool
    is_view: bool


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The calls that compute an op, in order."""

    inputs: tuple[fx.Node, ...]
    """Placeholder of each tensor argument."""
    calls: tuple[CoreCall, ...]
    constants: Mapping[fx.Node, Tensor]
    outputs: tuple[Any, ...]
    """Nodes; None for a result that is no tensor."""


def decomposition(
    target: Any, arguments: Sequence[Tensor], call: Callable[[Sequence[Any]], tuple[Any, Mapping[str, Any]]],
    is_kept: Callable[[str], bool], own: Mapping[Any, Callable[..., Any]],
) -> Decomposition | None:  # fmt: skip
    """Trace torch's decomposition of an op, as far as possible into ops of which ``is_kept(name)`` is true.

    Args:
        target: the op.
        arguments: its tensor arguments, of which sizes, strides and dtypes count.
        call: returns the op's (args, kwargs) with these tensors.
        is_kept: whether the op with this name is not decomposed further.
        own: op -> decomposition to use instead of torch's.

    Returns:
        None if torch has no decomposition of the op.
    """
    from torch._decomp import global_decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    decompositions = {**global_decomposition_table["post_autograd"], **own}
    function = decompositions.get(target) or (target.decompose if target._can_decompose() else None)
    if function is None:
        return None
    table = {
        op: decomposed
        for op, decomposed in decompositions.items()
        if isinstance(op, torch._ops.OpOverload) and not is_kept(str(op)) and not _is_view(op)
    }

    def run(*tensors: Tensor) -> Any:
        args, kwargs = call(tensors)
        result = function(*args, **kwargs)
        return list(result) if isinstance(result, (tuple, list)) else result

    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in arguments]
        graph = make_fx(run, decomposition_table=table)(*fakes)
    graph.graph.eliminate_dead_code()
    return _read(graph)


def _is_view(op: Any) -> bool:
    """Return whether an op's result is a view of an operand, or may be."""
    is_unsafe_view = op is torch.ops.aten._unsafe_view.default
    return is_unsafe_view or any(
        out.alias_info is not None and not out.alias_info.is_write for out in op._schema.returns
    )


def _read(module: fx.GraphModule) -> Decomposition:
    """Return the calls of a traced decomposition, with its arguments, constants and results."""
    nodes = list(module.graph.nodes)
    calls, constants = list[CoreCall](), dict[fx.Node, Tensor]()
    for node in nodes:
        if node.op == "get_attr":
            constants[node] = getattr(module, str(node.target)).detach()
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        value = node.meta["val"]
        multiple = isinstance(value, (tuple, list))
        outputs: list[fx.Node | None] = [node]
        if multiple:
            outputs = [None] * len(value)
            for getitem in node.users:  # operator.getitem(node, index)
                outputs[getitem.args[1]] = getitem
        target = node.target
        calls.append(CoreCall(str(target), node.args, node.kwargs, tuple(outputs), multiple, _is_view(target)))
    results = nodes[-1].args[0]
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    outputs_of_op = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    return Decomposition(inputs, tuple(calls), constants, outputs_of_op)


def mapped(value: Any, change: Callable[[fx.Node], Any]) -> Any:
    """Return the arguments of a call with each node, at any depth, replaced by ``change(node)``."""
    return map_arg(value, change)


def tensor_of(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node."""
    return node.meta["val"]
