"""Forward and backward of a module as one graph, traced through AOTAutograd.

Seen in torch 2.11, 2.13 and 2.15: ``torch._functorch.aot_autograd.aot_export_joint_with_descriptors``, the descriptors
in ``torch._functorch._aot_autograd.descriptors``, ``torch._guards.tracing`` (its fake mode is taken), ``py_kernels`` of
ops, ``torch.fx.traceback.current_meta`` (its entry ``custom`` goes to the nodes that are made meanwhile), the higher-
order op ``with_effects``, and the nodes' ``seq_nr`` and ``partitioner_tag``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import nn
from torch._C import DispatchKey
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from memplan._interrupts import in_place_of
from memplan._patched import patched_throughout
from memplan._torch.fake import READ_SCALAR
from memplan._torch.modules import has_shape
from memplan._torch.patches import eager_instead_of_compiled, patched
from memplan._torch.values import Condition, Values

_PLACE = "memplan_place"
_CALL = "memplan_call"


@dataclass(frozen=True, slots=True)
class Role:
    """Role of an input or output of the joint graph."""

    kind: str
    """parameter, buffer, input, tangent, output, mutation (of an input), gradient, token (of effects, without data) or
    unknown."""
    name: str = ""
    """Of a parameter or buffer; AOTAutograd's description of an unknown role."""
    index: int = -1
    """Of an input, or of the output that a tangent belongs to."""
    of: Role | None = None
    """The input that is mutated, or whose gradient this is."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph with the role of every placeholder and of every output (None for an absent gradient)."""

    module: torch.fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role | None, ...]
    conditions: tuple[Condition, ...]
    """Values of inputs on which the trace depends."""


Results = Mapping[str, Callable[[tuple[Any, ...], dict[str, Any], Any], Any]]
Instead = Mapping[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]]


def corrected_mode(
    results: Results, instead: Instead, values: Values | None = None, mode: FakeTensorMode | None = None
) -> FakeTensorMode:
    """Return a fake mode whose results have the sizes of the device's kernels.

    Its ``dispatch`` is replaced on the instance, since ops that take functions (a branch, a loop) accept no subclass of
    FakeTensorMode.

    Args:
        results: name of an op -> ``(args, kwargs, result) -> corrected result``.
        instead: name of an op -> ``(args, kwargs) -> result`` or NotImplemented.
        values: known values of tensors, by which scalars can be read.
        mode: the mode to change; None: a new mode.
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    dispatch, names = mode.dispatch, dict[Any, str]()

    def corrected(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch an op: by its replacement, as a read of a known scalar, or as torch does with a corrected result."""
        _refuse_constant_change(func, args, kwargs or {})
        name = names.get(func) or names.setdefault(func, str(func))  # str() is slow
        if name in instead:
            with mode:
                result = instead[name](args, kwargs or {})
            if result is not NotImplemented:
                return result
        if values is not None and func is READ_SCALAR:
            value = values.read(func, args)
            if value is not None:
                return value
        result = dispatch(func, types, args, kwargs)
        if values is not None:
            values.follow(func, args, kwargs or {}, result)
        if name not in results or result is NotImplemented:
            return result
        with mode:
            return results[name](args, kwargs or {}, result)

    mode.dispatch = corrected
    return mode


class ConstantChanged(Exception):
    """A tensor that is neither a parameter, a buffer nor an input is changed in place."""


def _refuse_constant_change(func: Any, args: Any, kwargs: Any) -> None:
    """Raise ConstantChanged where an op writes a real tensor, its first argument or ``out``: the traced graph would not
    repeat that."""
    if not is_op(func) or not func._schema.is_mutable:
        return
    for written in (*args[:1], *([kwargs["out"]] if "out" in kwargs else [])):
        if isinstance(written, torch.Tensor) and not isinstance(written, FakeTensor):
            raise ConstantChanged(str(func))


def has_kept_fake(error: Exception) -> bool:
    """Return whether a trace failed on a fake tensor that an earlier pass stored, such as a buffer created in the first
    forward(). Seen in torch 2.13 and 2.15, the other message in 2.11."""
    message = str(error)
    if isinstance(error, AssertionError):
        return "Unexpected fake" in message
    return isinstance(error, RuntimeError) and "cannot find FakeTensor" in message and "in tensor_tracker" in message


def joint_graph(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    results: Results,
    instead: Instead,
    *,
    conditional: bool = True,
    fake: Callable[[FakeTensorMode, int, torch.Tensor], torch.Tensor] | None = None,
    mode: FakeTensorMode | None = None,
) -> Joint:
    """Trace a module that takes and returns tensors, with fake tensors of the same shapes; nothing is computed.

    Random numbers and changes in place become functional ops. Composite ops are decomposed as in eager mode.
    Checkpointed functions are called once, compiled ones run eagerly. Autocast is off unless the module itself turns
    it on: eager mode's backward runs without it.

    Args:
        module: called with positional arguments; its arguments and results are tensors.
        inputs: example tensors; their values matter only where ``conditional``.
        results: name of an op -> ``(args, kwargs, result) -> result`` with the sizes that the device's kernel returns.
        instead: name of an op that fake tensors refuse, or are slow for -> ``(args, kwargs) -> result`` or
            NotImplemented.
        conditional: whether the trace may read values of small integer inputs; else of constants only.
        fake: ``(mode, number, input) -> fake tensor``; by default of the same sizes.
        mode: of the fake tensors; by default a new one.
    """
    # imported here, because they import all of Dynamo
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._inductor import config as inductor

    values = Values()
    mode = corrected_mode(results, instead, values, mode or _mode_of(module, inputs))
    with (
        _disable_current_modes(),
        contextlib.ExitStack() as stack,
        functorch.patch(backward_pass_autocast="off"),  # as after leaving the autocast of the forward pass
    ):
        stack.callback(vars(mode).pop, "dispatch")  # the mode may be the caller's
        if fake is None:
            fakes = _faked(inputs, mode)
        else:
            fakes = [fake(mode, number, tensor) for number, tensor in enumerate(inputs)]
        if conditional:
            for number, (fake_input, real) in enumerate(zip(fakes, inputs, strict=True)):
                values.take(fake_input, number, real)
        stack.enter_context(torch.enable_grad())
        # torch logs errors in fake kernels, which are raised, too
        stack.enter_context(patched_throughout(fake_tensor.log, disabled=True))
        # `annotate_place` is undone, so that later traces do not get its metadata
        stack.enter_context(patched(torch.fx.traceback, current_meta=dict(torch.fx.traceback.current_meta)))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(_eager_decompositions())
        stack.enter_context(_checkpoints_ignored())
        stack.enter_context(eager_instead_of_compiled(lambda: None))
        stack.enter_context(dynamo.patch(error_on_nested_fx_trace=False))
        stack.enter_context(inductor.patch(fallback_random=True))  # keeps random ops that nobody reads
        graph = aot_export_joint_with_descriptors(stack, module, tuple(fakes), {}).graph_module
        return _joint(graph, values)


def _joint(graph: torch.fx.GraphModule, values: Values) -> Joint:
    """Return a traced graph with the roles of its inputs and outputs, and the values that the trace depends on."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    return Joint(
        graph,
        tuple(_role(node.meta.get("desc")) for node in placeholders),
        tuple(None if role is None else _role(role) for role in output.meta["desc"]),
        tuple(values.conditions),
    )


def _mode_of(module: nn.Module, inputs: Sequence[torch.Tensor]) -> FakeTensorMode | None:
    """Return the fake mode of a model that is fake itself, since modes cannot be mixed; None for a real model."""
    tensors = (*module.parameters(), *module.buffers(), *inputs)
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


def _faked(inputs: Sequence[torch.Tensor], mode: FakeTensorMode) -> list[torch.Tensor]:
    """Return a fake tensor for each input.

    Inputs that share memory get separate fakes: such a graph is right whether or not inputs of a later call share
    memory, unless it changes an input. An input that requires a gradient and is passed twice is faked once.
    """
    fake_of: dict[int, torch.Tensor] = {}
    storages = set[int]()
    fakes: list[torch.Tensor] = []
    for tensor in inputs:
        storage = tensor.untyped_storage()._cdata
        if id(tensor) in fake_of and tensor.requires_grad:
            fakes.append(fake_of[id(tensor)])
            continue
        if storage in storages and not tensor.requires_grad:
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        storages.add(storage)
        fake_of[id(tensor)] = fake
        fakes.append(fake)
    return fakes


def _role(descriptor: Any) -> Role:
    """Convert AOTAutograd's descriptor of an input or output."""
    from torch._functorch._aot_autograd import descriptors

    match descriptor:
        case descriptors.ParamAOTInput():
            return Role("parameter", name=descriptor.target)
        case descriptors.BufferAOTInput():
            return Role("buffer", name=descriptor.target)
        case descriptors.PlainAOTInput():
            return Role("input", index=descriptor.idx)
        case descriptors.TangentAOTInput():
            return Role("tangent", index=_role(descriptor.output).index)
        case descriptors.PlainAOTOutput():
            return Role("output", index=descriptor.idx)
        case descriptors.InputMutationAOTOutput():
            return Role("mutation", of=_role(descriptor.mutated_input))
        case descriptors.GradAOTOutput():
            return Role("gradient", of=_role(descriptor.grad_of))
        case (
            descriptors.ForwardTokenAOTInput()
            | descriptors.BackwardTokenAOTInput()
            | descriptors.ForwardTokenAOTOutput()
            | descriptors.BackwardTokenAOTOutput()
        ):
            return Role("token")
    return Role("unknown", name=str(descriptor))


# -- where tracing differs from torch.compile


_TORCH_DECOMPOSITIONS_KEPT = ("dropout", "native_batch_norm", "cudnn_batch_norm")
"""Ops that stay decomposed in Python: dropout gets a mask of bools, norms do not change buffers silently."""
_DECOMPOSITION_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _decomposed_in_python() -> tuple[Any, ...]:
    """Return the ops that tracing would decompose in Python, unlike eager mode (upsampling, GRU)."""
    aten, decomposed_ops = torch.ops.aten, []
    for name in aten:
        if name in _TORCH_DECOMPOSITIONS_KEPT:
            continue
        packet = getattr(aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            modules = [getattr(op.py_kernels.get(key), "__module__", "") for key in _DECOMPOSITION_KEYS]
            if any(module.startswith(("torch._decomp", "torch._refs")) for module in modules):
                decomposed_ops.append(op)
    return tuple(decomposed_ops)


@contextlib.contextmanager
def _eager_decompositions() -> Iterator[None]:
    """Within this context, decompose ops as eager mode does: the decompositions in Python are removed."""
    removed: list[tuple[Any, Any, Any]] = []
    try:
        for op in _decomposed_in_python():
            for key in _DECOMPOSITION_KEYS:
                if key in op.py_kernels:
                    removed.append((op, key, op.py_kernels.pop(key)))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _checkpoints_ignored() -> Iterator[None]:
    """Call functions under `torch.utils.checkpoint` directly, without the checkpoint.

    Seen in torch 2.11, 2.13 and 2.15: ``checkpoint`` looks up these two names for each call. The reentrant kind gives
    no gradient where no argument needs one.
    """

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            """Call the function, with gradients only if an argument needs them."""
            needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
                return function(*args)

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Replace the generator that `checkpoint` advances before and after it calls the function: do nothing."""
        yield

    with patched(
        torch.utils.checkpoint, CheckpointFunction=Reentrant, _checkpoint_without_reentrant_generator=generator
    ):
        yield


@contextlib.contextmanager
def tensors_replaced(module: nn.Module, replacements: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace every parameter and buffer whose id() is a key, including tied parameters and shared modules, which
    `torch.func.functional_call` would not restore in the right order.

    Seen in torch 2.11, 2.13 and 2.15: ``nn.Module._parameters`` and ``._buffers``; in TorchScript's modules these are
    objects that set their own attributes.
    """
    slots: list[tuple[Any, str, torch.Tensor]] = [
        (table, name, tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in list(table.items())
        if tensor is not None and id(tensor) in replacements
    ]

    def restore() -> None:
        for table, name, tensor in slots:
            table[name] = tensor

    def replace() -> None:
        for table, name, tensor in slots:
            table[name] = replacements[id(tensor)]

    with in_place_of(replace, restore):
        yield


# -- metadata of nodes


def annotate_place(place: tuple[str, str | None], call: tuple[int, int | None]) -> None:
    """Annotate the graph nodes that are traced from now on.

    Args:
        place: layer and line of the user's code.
        call: number of the call of a torch function, and the autocast region whose cache keeps its casts
            (see `autocast_cache`).
    """
    torch.fx.traceback.current_meta["custom"] = {_PLACE: place, _CALL: call}


def place_of(node: torch.fx.Node) -> tuple[str, str | None]:
    """Return the layer and the line of code of a node (see `annotate_place`); ("", None) without annotation."""
    return (node.meta.get("custom") or {}).get(_PLACE, ("", None))


def cast_in(node: torch.fx.Node) -> int | None:
    """Return the autocast region in whose cache eager mode would keep a node's result, if autocast added the node as a
    cast for an op of the same call. None for other nodes, such as a cast in the user's code."""
    call, region = _call_and_region(node)
    return region if any(_call_and_region(user)[0] == call for user in node.users) else None


def call_of(node: torch.fx.Node) -> int | None:
    """Return the number of the call of a torch function that a node is part of."""
    return _call_and_region(node)[0]


def _call_and_region(node: torch.fx.Node) -> tuple[int | None, int | None]:
    """Return the ``call`` that `annotate_place` annotated a node with: (number of the call, autocast region)."""
    return (node.meta.get("custom") or {}).get(_CALL, (None, None))


def sequence_of(node: torch.fx.Node) -> int | None:
    """Return the sequence number that a forward node shares with the nodes of its derivative formula."""
    return node.meta.get("seq_nr")


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether a node was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def effect_of(node: torch.fx.Node) -> Any:
    """Return the op with side effects that a node wraps (``with_effects(token, op, ...)``); None for other nodes."""
    return node.args[1] if node.target is torch.ops.higher_order.with_effects else None


# -- tensors and ops that cannot be traced


def untraceable_reason(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be traced into a joint graph, as text that follows "is"; None for a dense tensor with
    data."""
    if not has_shape(tensor):
        return "not there yet: a lazy layer makes it in its first call"
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "without data"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    return None


def view_strides(tensor: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a view of this shape by torch's C++ kernel; tracing would use an implementation in
    Python."""
    with no_dispatch(), torch._C._DisablePythonDispatcher():
        plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return plain.view(shape).stride()


def function_of_functions(error: BaseException) -> str | None:
    """Return the name of the higher-order op (``cond``, ``while_loop``) that raised an error, by the files of the
    traceback; None if none did."""
    trace = error.__traceback__
    while trace is not None:
        head, name = os.path.split(trace.tb_frame.f_code.co_filename)
        if os.path.basename(head) == "_higher_order_ops" and name != "utils.py":
            return name.removesuffix(".py")
        trace = trace.tb_next
    return None


def is_op(target: Any) -> bool:
    """Return whether a node calls an op of tensors, rather than a function that takes functions (a branch, a loop)."""
    return isinstance(target, torch._ops.OpOverload)
