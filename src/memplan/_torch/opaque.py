"""Calls that are opaque in a traced graph: one op for the call, one for its derivative.

Seen in torch 2.11, 2.13 and 2.15: ``_forward_cls`` of contexts, names of the functions that
`torch.library.register_autograd` makes, ``func`` of UnsupportedOperatorException,
``torch._C._DisablePythonDispatcher``. Seen in 2.11 and 2.13 alone: frames of ``torch.autograd.function`` in tracebacks
(``cls`` in ``Function.apply``, ``self`` in that of its backward).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.function as functions
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

Kernel = Callable[..., Any]
_LIBRARY = torch.library.Library("memplan", "FRAGMENT")
OPAQUE = "memplan.opaque.default"
OPAQUE_BACKWARD = "memplan.opaque_backward.default"
_CALL = "opaque(Tensor[] inputs, str key) -> Tensor[]"
_BACKWARD = "opaque_backward(Tensor handle, Tensor?[] gradients, Tensor[] kept, str key) -> Tensor[]"
_GENERATED = "GeneratedBackwardFor_"
_NAMED = re.compile(r"\b(\w+)(?:::|\.)(\w+)")


def define_opaque(call: Kernel, fake_call: Kernel, backward: Kernel, fake_backward: Kernel) -> None:
    """Define the two ops by their kernels and fake kernels. The argument ``key`` identifies the function to call.

    ``call(inputs, key) -> [*results, handle]``; ``backward(handle, gradients, kept, key) -> gradients``.
    """
    for schema, kernel, fake in ((_CALL, call, fake_call), (_BACKWARD, backward, fake_backward)):
        name = schema.split("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"memplan::{name}", fake, lib=_LIBRARY)


class _Entry(torch.autograd.Function):
    """Autograd node in front of the inputs of a `Recorded` call: the call's derivative stops there."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("torch.autograd.grad stops before this node")


class Recorded:
    """A call that ran under autograd in a separate graph, so that its derivative can be computed separately."""

    def __init__(self, function: Kernel, tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> None:
        """Run ``function(tensors) -> results``. ``needed``: which of the tensors need a gradient."""
        with torch.enable_grad():
            start = torch.zeros((), requires_grad=True)
            differentiable = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
            entries = _Entry.apply(start, *differentiable) if differentiable else ()
            self._into = [get_gradient_edge(entry) for entry in entries]
            """Where the gradient of each tensor that needs one leaves the graph."""
            remaining = iter(entries)
            inputs = [next(remaining) if n else t.detach() for t, n in zip(tensors, needed, strict=True)]
            results = function(inputs)
        self.smooth = tuple(result.requires_grad for result in results)
        """Whether each result has a derivative."""
        self._out: list[GradientEdge | None] = [
            get_gradient_edge(result) if result.requires_grad else None for result in results
        ]
        """Where the gradient of each result enters it; None for a result without a derivative."""
        self.results = [result.detach() for result in results]
        """Detached from the graph."""

    def gradients(self, gradients: Sequence[torch.Tensor | None], *, keep: bool = False) -> list[torch.Tensor | None]:
        """Return the gradients of the call's inputs that need one, from the ``gradients`` of its results.

        Frees the call's graph unless ``keep``.
        """
        edges, known_gradients = list[GradientEdge](), list[torch.Tensor]()
        for edge, gradient in zip(self._out, gradients, strict=True):
            if edge is not None and gradient is not None:
                edges.append(edge)
                known_gradients.append(gradient)
        if not edges or not self._into:
            return [None] * len(self._into)
        return list(torch.autograd.grad(edges, self._into, known_gradients, retain_graph=keep, allow_unused=True))


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Run ops without dispatch modes and Python decompositions, as outside of a trace: dropout is decomposed in C++."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def culprit(error: BaseException) -> Any:
    """Return the user's autograd Function or custom op in which tracing failed, or None.

    Looked up in the traceback's frames, else in the error's ``func``, else by the names in its message.
    """
    trace = error.__traceback__
    while trace is not None:
        function = _function_of(trace.tb_frame)
        if isinstance(function, type) and not function.__module__.startswith("torch."):
            return function
        op_of_formula = None if function is None else _op_of_formula(getattr(function, "__name__", ""))
        if op_of_formula is not None:
            return op_of_formula
        trace = trace.tb_next
    func = getattr(error, "func", None)
    if func is not None:
        return _op(func.namespace, func._schema.name.split("::")[1])
    named_ops = (_op(namespace, name) for namespace, name in _NAMED.findall(str(error).split("\n")[0]))
    return next((op for op in named_ops if op is not None), None)


def _function_of(frame: Any) -> Any:
    """Return the autograd Function whose method a frame runs, or None. Up to torch 2.13 the frame is that of ``apply``;
    torch 2.15 calls forward and backward from C++, whose first argument is the context."""
    code, variables = frame.f_code, frame.f_locals
    if code.co_filename == functions.__file__ and code.co_name == "apply":
        return variables.get("cls") or getattr(variables.get("self"), "_forward_cls", None)
    first = variables.get(code.co_varnames[0]) if code.co_argcount else None
    return getattr(type(first), "_forward_cls", None) if isinstance(first, functions.BackwardCFunction) else None


def _op_of_formula(name: str) -> Any:
    """Return the op whose registered derivative has this name: a prefix, then namespace, name and overload of the op
    joined by "_"; None if there is no such op. Each part may contain a "_" itself, so all splits are tried."""
    if not name.startswith(_GENERATED):
        return None
    words = name.removeprefix(_GENERATED).split("_")
    for name_begins in range(1, len(words)):
        for name_ends in range(name_begins + 1, len(words) + 1):
            op = _op("_".join(words[:name_begins]), "_".join(words[name_begins:name_ends]))
            if op is not None:
                return op
    return None


def _op(namespace: str, name: str) -> Any:
    """Return the custom op with this name, or None; ops of torch and of memplan do not count."""
    if namespace in ("aten", "prim", "prims", "torch", "memplan"):
        return None
    with contextlib.suppress(AttributeError, RuntimeError):
        return getattr(getattr(torch.ops, namespace), name)
    return None


def calls_op(function: Any, packet: Any) -> bool:
    """Return whether a called function is the op ``packet`` or an overload of that op."""
    return function is packet or getattr(function, "overloadpacket", None) is packet


_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def autocast_of_now() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function whose result is a context with the present autocast, also where dispatch keys exclude it."""
    enabled = {device: torch.get_autocast_dtype(device) for device in _AUTOCAST if torch.is_autocast_enabled(device)}
    return lambda: _autocast(enabled) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _autocast(enabled: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Enable autocast on each device with its dtype, and include its dispatch keys where the running op excludes
    them."""
    with contextlib.ExitStack() as stack:
        for device, dtype in enabled.items():
            key = _AUTOCAST[device]
            before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
            stack.callback(torch._C._dispatch_tls_set_dispatch_key_excluded, key, before)
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield
