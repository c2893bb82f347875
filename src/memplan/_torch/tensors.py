"""Read private facts of a tensor, of an op and of the autograd engine.

Everything here was seen in torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._C._functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan._frames import callers
from memplan._torch.eager import no_modes
from memplan._torch.installed import torch_version
from memplan.errors import RecordingError

_ATEN = torch.ops.aten
IN_PLACE_ON_ZEROS = {
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter.value: _ATEN.scatter_.value,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.index_fill.int_Scalar: _ATEN.index_fill_.int_Scalar,
    _ATEN.index_fill.int_Tensor: _ATEN.index_fill_.int_Tensor,
    _ATEN.put.default: _ATEN.put_.default,
    _ATEN.masked_scatter.default: _ATEN.masked_scatter_.default,
}
"""Out-of-place ops by which derivative formulas write into zeros under a dispatch mode -> the in-place ops that they
call without a mode."""

_WITH_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_OF_BOUNDS = frozenset({"ClampBackward0"} if torch_version() < (2, 14) else ())
_OF_TIES = (
    "ClampBackward0", "ClampMinBackward1", "ClampMaxBackward1", "MaximumBackward0", "MinimumBackward0",
    "FmaxBackward0", "FminBackward0",
)  # fmt: skip
IN_PLACE_IN_FORMULAS: dict[Any, tuple[Any, frozenset[str]]] = {
    _ATEN.logical_and.default: (_ATEN.logical_and_.default, _OF_BOUNDS),
    _ATEN.logical_or.default: (_ATEN.logical_or_.default, _OF_BOUNDS),
    _ATEN.masked_fill.Scalar: (_ATEN.masked_fill_.Scalar, frozenset({"Atan2Backward0", *_OF_TIES})),
    _ATEN.sub.Tensor: (_ATEN.sub_.Tensor, frozenset({_WITH_LOGITS})),
    _ATEN.mul.Tensor: (_ATEN.mul_.Tensor, frozenset({_WITH_LOGITS, "BinaryCrossEntropyBackward0"})),
    _ATEN.add.Tensor: (_ATEN.add_.Tensor, frozenset({"AminmaxBackward0"})),
}
"""Out-of-place ops by which derivative formulas change their own temporaries under a dispatch mode -> (the in-place op
that they call without a mode, the autograd nodes that do so).

Source: torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`, of torch 2.13. From torch 2.14 on, the
gradient of equal elements is shared out and then filled in place, and bounds are compared into new tensors.
"""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, by a single call of ``torch._foreach_copy_``."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def in_backward() -> bool:
    """Return whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> Any:
    """Return the autograd node that the engine is running, or None."""
    return torch._C._current_autograd_node()


def sends_two_gradients(node: Any) -> bool:
    """Return whether an autograd node sends two gradients to the same input of another node, so that the engine adds
    them."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def node_sequence(node: Any) -> int:
    """Return the sequence number of an autograd node, set when its forward op ran (2**64 - 1 for gradient
    accumulation)."""
    return node._sequence_nr()


def sequence_number() -> int:
    """Return the sequence number of this thread's newest autograd node; -1 before the first."""
    return torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique among live storages."""
    return storage._cdata


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an "efficient zero tensor" of torch: zeros without memory."""
    return tensor._is_zerotensor()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values, as in a recording."""
    return isinstance(tensor, FakeTensor)


def is_sparse(value: Any) -> bool:
    """Return whether a value is a tensor of a sparse layout."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided and bool(_part_methods(value.layout))


def sparse_length(tensor: torch.Tensor) -> int:
    """Return how many elements a sparse tensor stores."""
    return tensor._nnz()


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of indices and values that a sparse tensor consists of, the values last."""
    with _unrecorded(tensor) if isinstance(tensor, FakeTensor) else no_modes():
        return [getattr(tensor, name)() for name in _part_methods(tensor.layout)]


@contextlib.contextmanager
def _unrecorded(tensor: FakeTensor) -> Iterator[None]:
    """Run ops on a fake tensor without recording them, by marking them as parts of another op (see
    `FakeMode.within`)."""
    mode: Any = tensor.fake_mode
    before = getattr(mode, "_inside", None)
    if before is None:
        yield
        return
    mode._inside = True
    try:
        yield
    finally:
        mode._inside = before


def _part_methods(layout: torch.layout) -> tuple[str, ...]:
    """Return the names of the methods that return the indices and values of a sparse tensor; () for a dense layout."""
    if layout == torch.sparse_coo:
        return "_indices", "_values"
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return "crow_indices", "col_indices", "values"
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return "ccol_indices", "row_indices", "values"
    return ()


def compressed_layout_error() -> RecordingError:
    """Return the error to raise for a tensor in a compressed sparse layout."""
    return RecordingError(
        "a sparse tensor in a compressed layout (CSR, CSC, BSR or BSC)",
        expected="dense tensors, or sparse ones in coordinates (torch.sparse_coo)",
        do="Make the tensor by torch.sparse_coo_tensor, or use memplan.measure, which runs the step",
    )


@functools.cache
def runs_on_sparse(func: Any) -> bool:
    """Return whether the CPU has a kernel of an op for sparse tensors with coordinates."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "SparseCPU")


INDICES_ATTRIBUTE = "_memplan_indices"
"""Name of the attribute of a sparse tensor that holds the values of its indices, or None if they are unknown."""


def sparse_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: Sequence[int],
    *,
    coalesced: bool,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a sparse tensor with these fake indices and values, without any op that a recording sees.

    ``known``: the values of the indices, if known; by default those that the fake indices carry, if any.
    """
    result = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        indices.shape[0], values.dim() - 1, list(shape), indices, values, dtype=values.dtype, layout=torch.sparse_coo,
        device=torch.device("cpu"), pin_memory=False, is_coalesced=coalesced,
    )  # fmt: skip
    setattr(result, INDICES_ATTRIBUTE, getattr(indices, "constant", None) if known is None else known)
    return result


def known_indices(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a sparse tensor's indices, or None if `sparse_coo` did not know them."""
    return getattr(tensor, INDICES_ATTRIBUTE, None)


def distinct_columns(indices: torch.Tensor) -> torch.Tensor:
    """Return the distinct columns of real indices, sorted."""
    with no_modes():
        return torch.unique(indices, dim=1)


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors inside a tensor subclass that wraps others (a quantized weight), by attribute name.

    ``{"": tensor}`` for a tensor with memory of its own. Seen in torch 2.11, 2.13 and 2.15:
    ``torch.utils._python_dispatch.is_traceable_wrapper_subclass``.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return {"": tensor}
    names: Any = tensor.__tensor_flatten__()[0]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # else a mesh of devices
            for inner_name, inner in inner_tensors(part).items():
                tensors[f"{name}.{inner_name}" if inner_name else name] = inner
    return tensors


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of the wrappers of `torch.func`'s transforms, and this rank's shard of a `DTensor`."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the C++ reference counts of the tensor and of its storage, as a tuple."""
    storage_count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage_count  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def called_by_engine() -> bool:
    """Return whether the dispatched op is called by the autograd engine itself, not by a backward in Python."""
    return _caller() == "_engine_run_backward"


def called_for_the_loss() -> bool:
    """Return whether the dispatched op creates the initial gradient of the loss, before the engine starts."""
    return _caller() == "_make_grads"


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _caller() -> str:
    """Return the name of the innermost function outside of memplan on the stack."""
    for frame in callers():
        if not frame.f_code.co_filename.startswith(_OURS):
            return frame.f_code.co_name
    return ""


def tensor_arguments(func: Any) -> list[tuple[int, str]]:
    """Return (position, name) of each argument of an op that takes tensors."""
    return [(i, argument.name) for i, argument in enumerate(arguments(func)) if "Tensor" in str(argument.type)]


def arguments(func: Any) -> list[Any]:
    """Return the arguments of an op's schema: each has a name, a default_value and kwarg_only."""
    return func._schema.arguments


def schema_of(func: Any) -> str:
    """Return the schema of an op: ``aten::relu(Tensor self) -> Tensor``."""
    return str(func._schema)


def op_named(name: str) -> Any:
    """Return the op with a qualified name ("aten.add.Tensor"), or None if this torch has no such op."""
    parts = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, IndexError, RuntimeError):
        return None


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view is a view of; other tensors unchanged. Seen in torch 2.11 and 2.13: ``_base``."""
    return tensor if tensor._base is None else tensor._base


def is_view(value: Any) -> bool:
    """Return whether a value is a tensor that is a view of another for autograd. Seen in torch 2.11 and 2.13:
    ``_base``."""
    return isinstance(value, torch.Tensor) and value._base is not None


def is_mutable(func: Any) -> bool:
    """Return whether an op writes one of its arguments."""
    return func._schema.is_mutable


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an op's arguments by name, defaults included."""
    schema = arguments(func)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    positional = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {**defaults, **positional, **kwargs}


def written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return (position, name) of each argument that an op writes."""
    with_alias = [(i, argument) for i, argument in enumerate(arguments(func)) if argument.alias_info is not None]
    return [(i, argument.name) for i, argument in with_alias if argument.alias_info.is_write]


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an op draws random numbers. Attention is tagged as random, but draws only if its dropout
    is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in arguments(func)]
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or by_name.get("dropout_p", 0.0) != 0


# -- random numbers from another generator

_DRAW_NOTHING = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
"""Ops that may draw on a card, and do not on the CPU."""


def drawing_from(op: Any, generator: torch.Generator) -> Callable[..., Any] | None:
    """Return a CPU version of an op that draws random numbers from ``generator``: the op itself if it draws none; None
    if the op has no generator argument."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()) or op in _DRAW_NOTHING:
        return op
    if op is torch.ops.aten.native_dropout.default:
        return lambda x, p, train: _dropout(x, p, train, generator)
    name = "generator" if op._overloadname == "default" else f"{op._overloadname}_generator"
    if any(argument.name == "generator" for argument in op._schema.arguments):
        drawing = op
    elif name in op.overloadpacket.overloads():
        drawing = getattr(op.overloadpacket, name)
    else:
        return None
    return lambda *args, **kwargs: drawing(*args, **{**kwargs, "generator": generator})


def _dropout(x: torch.Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return (result, mask) of dropout, with the mask drawn from a generator.

    Source: aten/src/ATen/native/Dropout.cpp, `native_dropout_cpu`.
    """
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x.mul(mask).mul_(1 / (1 - p)), mask
