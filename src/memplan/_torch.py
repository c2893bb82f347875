"""The only file that touches private or unstable torch names. Each says in which versions it was seen.

Everything here was seen in torch 2.11 and 2.13, unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._subclasses
import torch._subclasses.fake_tensor as fake_tensor
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

DATA_DEPENDENT = (DynamicOutputShapeException, DataDependentOutputException)
"""What a fake tensor raises where an output's shape, or a branch, depends on values."""

Run = Callable[[Any], Any]
Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any], Run], Any]

MARK = "memplan#"
READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default

# In place, elementwise, never resizing: with operands of the result's own shape there is nothing to propagate.
_IN_PLACE = frozenset(
    f"aten::{name}_"
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "addcmul",
        "addcdiv",
        "lerp",
        "copy",
        "zero",
        "fill",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "neg",
        "abs",
        "exp",
        "log",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
        "relu",
        "sigmoid",
        "tanh",
        "uniform",
        "normal",
        "bernoulli",
    ]
)


# Their values follow from their arguments: kept where small, so that shapes and branches computed from them are right
# (`torch.arange(2, x.dim()).tolist()` is a common way to name dimensions).
_FACTORIES = frozenset(
    f"aten::{name}" for name in ["arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor"]
)
_CONSTANT_NUMEL = 64


class _NoFakeTensor:
    """What `torch._subclasses.FakeTensor` is to the user's code while it is recorded.

    Libraries look there to take another path when they are traced (transformers builds masks that it would skip);
    but the path to record is the one that really runs.
    """


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op writes its first argument in place without any change that a fake tensor could show."""
    if func._schema.name not in _IN_PLACE or kwargs.get("generator") is not None:
        return False
    target = args[0]
    if not isinstance(target, FakeTensor) or target.constant is not None:
        return False
    shape = target.shape
    for arg in args[1:]:
        if isinstance(arg, torch.Tensor) and (not isinstance(arg, FakeTensor) or arg.shape != shape):
            return False
    return True


_FOREACH = [importlib.import_module(name) for name in ("torch.utils._foreach_utils", "torch.optim.optimizer")]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _key_of(value: Any) -> Any:
    """A hashable stand-in for an argument: all of it that the metadata of a result can depend on.

    Raises:
        TypeError: an argument that this is not sure of.
    """
    if isinstance(value, torch.Tensor):
        if (
            type(value) is not FakeTensor
            or value.layout != torch.strided
            or value.constant is not None
            or value.is_complex()
        ):
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal, and promote differently
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(item) for item in value])
    raise TypeError


class _Memo:
    """Results of ops that make new tensors from old ones, remembered by shapes, strides and dtypes.

    A model repeats its layers, an optimizer its update for every parameter. FakeTensorMode has such a memory, too,
    with a key of some twenty fields a tensor; this one covers the plain case in a fifth of the time.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[bool, tuple[Any, ...]] | None] = {}
        self._functional: dict[Any, bool] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Key of a call, None where it cannot be remembered."""
        functional = self._functional.get(func)
        if functional is None:
            schema = func._schema
            touched = [a.alias_info for a in (*schema.arguments, *schema.returns)]
            functional = all(info is None for info in touched) and schema.name.startswith("aten::")
            self._functional[func] = functional
        if not functional:
            return None
        try:
            default = torch.get_default_dtype()
            return (
                func,
                default,
                _key_of(args),
                tuple([(name, _key_of(value)) for name, value in kwargs.items()]),
            )
        except TypeError:
            return None

    def recall(self, key: Any, mode: FakeTensorMode) -> Any:
        """New fake tensors like those of the call remembered, or NotImplemented."""
        found = self._results.get(key)
        if found is None:
            return NotImplemented
        single, metadata = found
        made = [None if m is None else _fake_empty(mode, *m) for m in metadata]
        return made[0] if single else tuple(made)

    def remember(self, key: Any, args: Any, result: Any) -> None:
        """Remember a result, if all of it is new, dense and on the CPU."""
        single = isinstance(result, torch.Tensor)
        outputs = (result,) if single else result
        if not isinstance(outputs, tuple):
            return
        seen = {storage_key(t.untyped_storage()) for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        metadata: list[Any] = []
        for output in outputs:
            if output is None:
                metadata.append(None)
                continue
            if type(output) is not FakeTensor or output.layout != torch.strided or output.is_complex():
                return
            storage = output.untyped_storage()
            if storage_key(storage) in seen or output.constant is not None or output.storage_offset():
                return
            if output.device.type != "cpu":
                return
            seen.add(storage_key(storage))
            metadata.append((output.shape, output.stride(), output.dtype))
            if storage.nbytes() != _meta_empty(*metadata[-1]).untyped_storage().nbytes():
                return
        self._results[key] = (single, tuple(metadata))


def _meta_empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    with no_dispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _fake_empty(mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
    meta = _meta_empty(shape, stride, dtype)
    with no_dispatch():
        return FakeTensor(mode, meta, torch.device("cpu"))


class FakeMode(FakeTensorMode):
    """Fake tensors, with a callback around every aten op. One mode, not two: each costs a dispatch an op."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._observe = dispatch
        self._inside = False
        self._memo = _Memo()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method below in torch._disable_dynamo, which costs more than our whole bookkeeping.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and not self._inside and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if self._inside:  # a fake implementation that calls other ops: part of the op outside
            return self.dispatch(func, types, args, kwargs)
        self._inside = True
        shown, torch._subclasses.FakeTensor = torch._subclasses.FakeTensor, FakeTensor
        seen, fake_tensor.FakeTensor = fake_tensor.FakeTensor, FakeTensor
        try:
            return self._observe(func, args, kwargs, lambda op: self._run(op, types, args, kwargs))
        finally:
            torch._subclasses.FakeTensor = shown
            fake_tensor.FakeTensor = seen
            self._inside = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The mode, entered for the user's code, with what goes with it. (It enters itself again for inner calls.)"""
        hide: Any = _NoFakeTensor
        with (
            patched(fake_tensor, CONSTANT_NUMEL_LIMIT=_CONSTANT_NUMEL),
            # it logs a traceback of every error that it raises; whoever records answers them with one message
            patched(fake_tensor.log, disabled=True),
            patched(torch._subclasses, FakeTensor=hide),
            # the foreach functions are for these types alone, and a fake tensor stands for one of them
            patched(_FOREACH[0], _foreach_supported_types=[*_FOREACH[0]._foreach_supported_types, FakeTensor]),
            patched(_FOREACH[1], _foreach_supported_types=[*_FOREACH[1]._foreach_supported_types, FakeTensor]),
            self,
        ):
            yield

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _changes_nothing(func, args, kwargs):
            return args[0]
        key = self._memo.key(func, args, kwargs)
        if key is not None:
            known = self._memo.recall(key, self)
            if known is not NotImplemented:
                return known
        result = self.dispatch(func, types, args, kwargs)
        if func._schema.name in _FACTORIES and isinstance(result, FakeTensor) and result.numel() <= _CONSTANT_NUMEL:
            with no_modes():
                real = func(*args, **kwargs)
            return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)
        if key is not None:
            self._memo.remember(key, (args, kwargs), result)
        return result


def _is_composite(func: Any) -> bool:
    """Whether an op is made of others. In inference mode it reaches a dispatch mode whole, else in its parts."""
    return isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


class EagerMode(TorchDispatchMode):
    """A callback around every aten op that really runs."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()
        self._observe = dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._observe(func, args, kwargs, lambda op: op(*args, **kwargs))


def no_modes() -> contextlib.AbstractContextManager[None]:
    """A context in which no dispatch mode sees what runs."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # pyright: ignore[reportReturnType]  # an untyped generator context


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> Any:
    """The autograd node that the engine is running, or None."""
    return torch._C._current_autograd_node()


def node_sequence(node: Any) -> int:
    """The sequence number that a node got when its forward op ran (2**64 - 1 for gradient accumulation)."""
    return node._sequence_nr()


def sequence_number() -> int:
    """Sequence number of the autograd node made last on this thread, -1 before the first."""
    return torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def storage_key(storage: torch.UntypedStorage) -> int:
    """A key that is unique among live storages."""
    return storage._cdata


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of, its values last."""
    with no_modes() if not isinstance(tensor, FakeTensor) else contextlib.nullcontext():
        if tensor.layout == torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """C++ reference counts of the tensor and of its storage."""
    counts = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), counts  # pyright: ignore[reportAttributeAccessIssue]  # no stub


def marker(name: str) -> contextlib.AbstractContextManager[Any]:
    """A named range in the profiler's record of this thread."""
    return _RecordFunctionFast(MARK + name)


class Profile:
    """What torch's profiler saw of the CPU allocator, and of the ranges that `marker` opened.

    ``events``: (address, bytes (negative: released), time in ns, innermost marker or ""), in order of time.
    ``ranges``: marker -> (start, end) in ns.
    """

    def __init__(self, profile: Any) -> None:
        self.events: list[tuple[int, int, int, str]] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        stack = [(event, "") for event in profile.profiler.kineto_results.experimental_event_tree()]
        while stack:
            event, mark = stack.pop()
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    self.events.append((fields.ptr, fields.alloc_size, event.start_time_ns, mark))
            elif event.tag == _EventType.TorchOp and event.name.startswith(MARK):
                mark = event.name[len(MARK) :]
                self.ranges[mark] = (event.start_time_ns, event.end_time_ns)
            stack.extend((child, mark) for child in event.children)
        self.events.sort(key=lambda event: event[2])


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of a class or module replaced for a while."""
    absent = object()
    before = {name: owner.__dict__.get(name, absent) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def eager_instead_of_compiled(said: Callable[[], None]) -> Iterator[None]:
    """Compiled modules and functions run eagerly; ``said`` is called when something is compiled or runs compiled."""
    from torch._dynamo import eval_frame  # a fake mode has imported it already; measuring does not need it

    compile_, call = torch.compile, eval_frame.OptimizedModule.__call__

    def compile_and_say(*args: Any, **kwargs: Any) -> Any:
        said()
        return compile_(*args, **kwargs)

    def call_and_say(self: Any, *args: Any, **kwargs: Any) -> Any:
        said()
        with warnings.catch_warnings():
            # it warns of global hooks on modules: ours
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            return call(self, *args, **kwargs)

    with (
        torch.compiler.set_stance("force_eager"),
        patched(torch, compile=compile_and_say),
        patched(eval_frame.OptimizedModule, __call__=call_and_say),
    ):
        yield


def called_by_engine() -> bool:
    """Whether the autograd engine calls the op that is dispatched, rather than a backward written in Python."""
    return _caller() == "_engine_run_backward"


def called_for_the_loss() -> bool:
    """Whether the op that is dispatched makes the gradient of the loss itself, before the engine starts."""
    return _caller() == "_make_grads"


_DISPATCHING = frozenset(
    {"__torch_dispatch__", "<lambda>", "dispatch", "run_marked", "_note", "_place_of", "_is_engine_sum", "_caller",
     "called_by_engine", "called_for_the_loss"}
)  # fmt: skip


def _caller() -> str:
    """Name of the innermost function outside of our dispatch."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _DISPATCHING:
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


def tensor_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name of each argument of an op that takes tensors."""
    return [(i, a.name) for i, a in enumerate(func._schema.arguments) if "Tensor" in str(a.type)]


def is_mutable(func: Any) -> bool:
    """Whether an op writes one of its arguments."""
    return func._schema.is_mutable


@contextlib.contextmanager
def modules_converted_as_real() -> Iterator[None]:
    """`Module.to` and its kin treat fake parameters as real ones: new data for the same parameter.

    For a fake parameter they swap tensors, which our weak references forbid, and which a real one never sees.
    """
    apply = torch.nn.Module._apply

    def apply_as_real(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        seen, fake_tensor.FakeTensor = fake_tensor.FakeTensor, _NoFakeTensor
        try:
            return apply(self, *args, **kwargs)
        finally:
            fake_tensor.FakeTensor = seen

    with patched(torch.nn.Module, _apply=apply_as_real):
        yield


@contextlib.contextmanager
def rejections_counted(counted: Callable[[int], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Tell how often `torch.nn.init.trunc_normal_` draws again: it does until no value is out of range.

    ``counted(times)`` is entered around each call. Seen in torch 2.13 and 2.15; 2.11 draws once.
    """
    draw = torch.nn.init._no_grad_trunc_normal_

    def draw_counted(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *rest: Any, **more: Any) -> Any:
        outside = 1.0 - (math.erf((b - mean) / std / math.sqrt(2)) - math.erf((a - mean) / std / math.sqrt(2))) / 2
        times, expected = 0, outside * tensor.numel()
        while expected >= 1 and times < 100:
            times, expected = times + 1, expected * outside
        with counted(times):
            return draw(tensor, mean, std, a, b, *rest, **more)

    with patched(torch.nn.init, _no_grad_trunc_normal_=draw_counted):
        yield
