"""Fake tensors: the mode that records, and what it remembers.

Everything here was seen in torch 2.11 and 2.13, unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch._subclasses
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from memplan._interrupts import safe_point
from memplan._torch.eager import Dispatch, is_composite, no_modes
from memplan._torch.modules import NoFakeTensor
from memplan._torch.patches import patched
from memplan._torch.subclasses import undressed
from memplan._torch.tensors import (
    KNOWN,
    compressed_layout_error,
    is_sparse,
    known_indices,
    sparse_coo,
    sparse_parts,
    storage_key,
)

DATA_DEPENDENT = (DynamicOutputShapeException, DataDependentOutputException)
"""Exceptions that a fake tensor raises where an output's shape, or a branch, depends on values."""

READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")

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
    f"aten::{name}"
    for name in ["arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor", "ones_like", "full_like"]
)
_UNFILLED = frozenset(f"aten::{name}" for name in ["new_empty", "new_empty_strided", "empty_like"])
_CONSTANT_NUMEL = 8192


@contextlib.contextmanager
def pickled_fakes(reduce: Callable[[torch.Tensor], tuple[Any, ...]]) -> Iterator[None]:
    """Let pickle write fake tensors as ``reduce`` says; it cannot write them by itself. `copy.copy` is as before."""
    plain = FakeTensor.__reduce_ex__

    def reduced(tensor: FakeTensor, protocol: Any) -> Any:
        copies = sys._getframe(1).f_globals.get("__name__") == "copy"
        return plain(tensor, protocol) if copies else reduce(tensor)

    with patched(FakeTensor, __reduce_ex__=reduced):
        yield


@contextlib.contextmanager
def _hidden(inside: Callable[[], bool]) -> Iterator[None]:
    """`torch._subclasses.FakeTensor` is another class to all but torch itself, and what runs inside of an op.

    Modules that are imported meanwhile take from there what they will have for good: torch's own the class that it is,
    and those of others get it afterwards.
    """
    package: Any = torch._subclasses
    if "FakeTensor" not in vars(package):  # hidden already
        yield
        return

    def found(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        return FakeTensor if asking.partition(".")[0] == "torch" or inside() else NoFakeTensor

    before = set(sys.modules)
    del package.FakeTensor
    package.__getattr__ = found
    try:
        yield
    finally:
        del package.__getattr__
        package.FakeTensor = FakeTensor
        for name in set(sys.modules) - before:
            for attribute, value in list(vars(sys.modules[name]).items()):
                if value is NoFakeTensor:
                    setattr(sys.modules[name], attribute, FakeTensor)


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op writes its first argument in place without any change that a fake tensor could show."""
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
    """Return a hashable stand-in for an argument: all of it that the metadata of a result can depend on.

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
        """Return new fake tensors like those of the call remembered, or NotImplemented."""
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


Dispatched = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_OUTSIDE = "_memplan_outside"


def become(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Give a sparse tensor the parts of another, as an op in place does. Return it."""
    target.data = source
    setattr(target, KNOWN, known_indices(source))
    return target


class _FakeSparse:
    """Fakes of the sparse tensors from outside of a recording that it meets, made of fakes of their parts.

    torch's own have no elements, and neither has a copy of a sparse tensor, of which `sparse_coo` makes one that has.
    Seen in torch 2.13.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made = WeakIdKeyDictionary()

    def replaced(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an op with fakes of the sparse tensors among them."""
        if not any(is_sparse(arg) and not isinstance(arg, FakeTensor) for arg in args):
            return args
        return tuple(self._of(arg) if is_sparse(arg) and not isinstance(arg, FakeTensor) else arg for arg in args)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._made.get(tensor)
        if made is None:
            if tensor.layout != torch.sparse_coo:
                raise compressed_layout_error()
            real = sparse_parts(tensor)
            parts = [self._mode.from_tensor(part) for part in real]
            coalesced = tensor.is_coalesced()
            made = sparse_coo(parts[0], parts[1], tensor.shape, coalesced=coalesced, known=real[0])
            setattr(made, _OUTSIDE, True)
            self._made[tensor] = made
        return made


def is_from_outside(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was there before a recording: it is real, or the fake of a sparse one that is."""
    return not isinstance(tensor, FakeTensor) or hasattr(tensor, _OUTSIDE)


class Replacements(Protocol):
    """Composite ops that have other parts where the tensors are taken to be; see `memplan.trace.semantics`."""

    @property
    def instead(self) -> Mapping[Any, Callable[..., Any]]:
        """Return what to call instead of decomposing an op."""
        ...

    @property
    def whole(self) -> frozenset[Any]:
        """Ops that are not to be taken apart."""
        ...

    def taking_apart(self) -> contextlib.AbstractContextManager[None]:
        """Enter this around an op that is taken apart, or around what is called instead."""
        ...


def _not_bounded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented


class FakeMode(FakeTensorMode):
    """Fake tensors, with a callback around every aten op. One mode, not two: each costs a dispatch an op."""

    def __init__(self, dispatch: Dispatch, bound: Dispatched | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._observe = dispatch
        self._inside = False
        self._alone = threading.RLock()
        """Held by the thread of a step that dispatches an op: what is noted of it is one piece."""
        self._selected = False
        """Whether the result of the running op was bounded."""
        self.suspended = False
        """Whether what runs now is no part of the recording."""
        self._memo = _Memo()
        self._of_outside = WeakIdKeyDictionary()
        self._sparse = _FakeSparse(self)
        self.replacements: Replacements | None = None
        self.going: Callable[[torch.device], contextlib.AbstractContextManager[None]] | None = None
        """Around an op that makes a tensor on a card: what says that it lies there."""
        self._bound: Dispatched = bound or _not_bounded
        """What stands for the result of an op whose shape depends on values; NotImplemented where nothing does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        """Return the mode itself: it is an attribute of each of its tensors, and subclasses copy attributes."""
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method below in torch._disable_dynamo, which costs more than our whole bookkeeping.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        with self._alone, undressed(types, args, kwargs):
            return self._dispatched_alone(func, types, args, kwargs or {})

    def _dispatched_alone(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() and not self._inside and is_composite(func):
            replaced = self.replacements
            if replaced is None:
                with self:
                    return func.decompose(*args, **kwargs)
            if func not in replaced.whole:
                with replaced.taking_apart(), self:
                    return replaced.instead.get(func, func.decompose)(*args, **kwargs)
        if self._inside:  # a fake implementation that calls other ops: part of the op outside
            return self._described(func, types, args, kwargs)
        device = kwargs.get("device")
        if self.going is not None and device is not None and torch.device(device).type == "cuda":
            with self.going(torch.device(device)):
                return self._dispatched_alone(func, types, args, {**kwargs, "device": _CPU})
        return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        safe_point()
        self._inside = True
        seen, fake_tensor.FakeTensor = fake_tensor.FakeTensor, FakeTensor
        try:
            args = self._sparse.replaced(args)
            return self._observe(func, args, kwargs, lambda op: self._run(op, types, args, kwargs))
        finally:
            fake_tensor.FakeTensor = seen
            self._inside = False

    def _one_thread_at_a_time(self) -> Any:
        """Return how fake tensors are dispatched in threads of the step, where no mode is: while no other thread is."""
        dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__

        def alone(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with self._alone:
                return dispatch(cls, func, types, args, kwargs)

        return classmethod(alone)

    def _described(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        args = tuple([self._with_value(arg) for arg in args])
        try:
            result = self.dispatch(func, types, args, kwargs)
            if func._schema.name in _UNFILLED and isinstance(result, FakeTensor):
                result.constant = None  # else what lies in that memory would be its values
            return result
        except DynamicOutputShapeException:
            bounded = self._bound(func, args, kwargs)
            if bounded is NotImplemented:
                raise
            self._selected = True
            return bounded

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor from outside, the same for as long as that is there."""
        if tensor not in self._of_outside:
            known = self._with_value(tensor)
            of_shape = not isinstance(known, FakeTensor) and not is_sparse(known)
            self._of_outside[tensor] = self.from_tensor(known) if of_shape else known
        return self._of_outside[tensor]

    def _with_value(self, arg: Any) -> Any:
        """Return what stands for a small real tensor that comes from outside: its values are known."""
        if type(arg) is not torch.Tensor or arg.numel() > _CONSTANT_NUMEL or arg.requires_grad:
            return arg
        if arg.layout != torch.strided or arg.device != _CPU or arg.is_complex():
            return arg
        return self.fake_tensor_converter.from_real_tensor(self, arg, make_constant=True)

    @property
    def inside(self) -> bool:
        """Return whether an op is being dispatched."""
        return self._inside

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Take what is done in here for a part of an op: tensors say where they are, and nothing is observed."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def suspending(self) -> Iterator[None]:
        """What runs in here is no part of the recording: no op is observed, and fake tensors have no values."""
        before, bound = self.suspended, self._bound
        self.suspended, self._bound = True, _not_bounded
        try:
            with self.within(), no_modes():
                yield
        finally:
            self.suspended, self._bound = before, bound

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Enter the mode for the user's code, with what goes with it. (It enters itself again for inner calls.)"""
        with (
            patched(fake_tensor, CONSTANT_NUMEL_LIMIT=_CONSTANT_NUMEL),
            # it logs a traceback of every error that it raises; whoever records answers them with one message
            patched(fake_tensor.log, disabled=True),
            _hidden(lambda: self._inside),
            # the foreach functions are for these types alone, and a fake tensor stands for one of them
            patched(FakeTensor, __torch_dispatch__=self._one_thread_at_a_time()),
            patched(_FOREACH[0], _foreach_supported_types=[*_FOREACH[0]._foreach_supported_types, FakeTensor]),
            patched(_FOREACH[1], _foreach_supported_types=[*_FOREACH[1]._foreach_supported_types, FakeTensor]),
            self,
        ):
            yield

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Enter the mode in a thread that the step starts, but never while another thread dispatches: what a mode was
        entered over is kept in one list for all threads."""
        with self._alone:
            self.__enter__()
        try:
            yield
        finally:
            with self._alone:
                self.__exit__(None, None, None)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _changes_nothing(func, args, kwargs):
            return args[0]
        key = self._memo.key(func, args, kwargs)
        if key is not None:
            known = self._memo.recall(key, self)
            if known is not NotImplemented:
                return known
        self._selected = False
        result = self._described(func, types, args, kwargs)
        if func._schema.name in _FACTORIES and isinstance(result, FakeTensor) and result.numel() <= _CONSTANT_NUMEL:
            with no_modes():
                like = [torch.empty(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
                real = func(*like, **kwargs)
            if result.device.type == "cpu" and real.stride() == result.stride():
                return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)
        if key is not None and not self._selected:  # how much is selected is said for each line
            self._memo.remember(key, (args, kwargs), result)
        return result
