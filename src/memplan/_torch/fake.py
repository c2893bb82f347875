"""Fake tensors: the dispatch mode that records a step, its cache of results, and constants with known values.

Everything here was seen in torch 2.11 and 2.13, unless a comment says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch._subclasses
import torch._subclasses.fake_tensor as fake_tensor
from torch._ops import HigherOrderOperator
from torch._prims import rng_prims
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
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
from memplan._patched import ABSENT, patched_throughout
from memplan._torch.eager import Dispatch, is_composite, no_modes
from memplan._torch.library_ops import COMPOSED, tables_as_without_recording
from memplan._torch.modules import NoFakeTensor
from memplan._torch.patches import patched
from memplan._torch.subclasses import subclasses_hidden, wraps_tensors
from memplan._torch.tensors import (
    INDICES_ATTRIBUTE,
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

_DTENSOR_RANDOM = getattr(rng_prims, "run_dtensor_rng_op", None)
"""Op that draws a shard's random numbers on a card, from the state that the ranks share. Not in torch 2.11."""
_WAIT = "_c10d_functional::wait_tensor"
"""Op that returns its argument; its fake implementation returns a new tensor, for compilers."""
# In place, elementwise, never resizing: with operands of the target's shape there is no shape to propagate.
_ELEMENTWISE_IN_PLACE = """
    add sub mul div addcmul addcdiv lerp copy zero fill sqrt rsqrt reciprocal neg abs exp log pow clamp clamp_min
    clamp_max relu sigmoid tanh uniform normal bernoulli
"""
_IN_PLACE = frozenset(f"aten::{name}_" for name in _ELEMENTWISE_IN_PLACE.split())


# Their values follow from their arguments, and are computed for small results, so that shapes and branches which depend
# on them are right (`torch.arange(2, x.dim()).tolist()` is a common way to name dimensions).
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ["arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor", "ones_like", "full_like"]
)
_UNFILLED = frozenset(f"aten::{name}" for name in ["new_empty", "new_empty_strided", "empty_like"])
_CONSTANT_NUMEL = 8192
_ARANGE = "aten::arange"
_POSITIONS_NUMEL = 1 << 18
"""Most elements of position ids whose values are followed, through the ops `_OF_POSITIONS` alone: whether positions are
consecutive decides how attention is masked (transformers, masking_utils.py, find_packed_sequence_indices)."""
_ELEMENTWISE = frozenset(f"aten::{name}" for name in ["add", "sub", "ne", "eq"])
_OF_POSITIONS = _ELEMENTWISE | frozenset(
    f"aten::{name}"
    for name in ["alias", "all", "cat", "clone", "cumsum", "detach", "select", "slice", "unsqueeze", "view", "_to_copy"]
)
"""Ops whose results are no larger than their operands together, where these need no broadcasting."""


def _long_constants(func: Any, args: tuple[Any, ...]) -> list[FakeTensor]:
    """Return the operands with known values that have too many elements for this op to compute with them."""
    name, tensors = func._schema.name, list[FakeTensor]()
    for arg in args:
        tensors += [item for item in (arg if isinstance(arg, (list, tuple)) else (arg,)) if type(item) is FakeTensor]
    long = [tensor for tensor in tensors if tensor.constant is not None and tensor.numel() > _CONSTANT_NUMEL]
    if not long or name not in _OF_POSITIONS:
        return long
    broadcasts = any(tensor.dim() > 1 and tensor.shape != long[0].shape for tensor in tensors)
    return long if broadcasts and name in _ELEMENTWISE else []  # such a result can have many more elements


@contextlib.contextmanager
def pickled_fakes(reduce: Callable[[torch.Tensor], tuple[Any, ...]]) -> Iterator[None]:
    """Let pickle write fake tensors by ``reduce(tensor)``, which returns a value as `__reduce_ex__` does; by default
    they cannot be pickled. `copy.copy`, which calls the same method, works as before."""
    default = FakeTensor.__reduce_ex__

    def reduce_ex(tensor: FakeTensor, protocol: Any) -> Any:
        """Replace `FakeTensor.__reduce_ex__`, which pickle and `copy.copy` call."""
        is_copy = sys._getframe(1).f_globals.get("__name__") == "copy"
        return default(tensor, protocol) if is_copy else reduce(tensor)

    with patched(FakeTensor, __reduce_ex__=reduce_ex):
        yield


@contextlib.contextmanager
def _hidden(inside: Callable[[], bool]) -> Iterator[None]:
    """Make `torch._subclasses.FakeTensor` evaluate to `NoFakeTensor` for code outside of torch and outside of an op.

    Libraries check for that class to take another path when they are traced; the recording needs the usual path.
    ``inside``: whether an op is being dispatched. Modules imported within the context get the real class at its end.
    """
    package: Any = torch._subclasses
    if "FakeTensor" not in vars(package):  # hidden already
        yield
        return

    def module_getattr(name: str) -> Any:
        """Look up ``torch._subclasses.FakeTensor``: the real class for torch itself, else `NoFakeTensor`."""
        if name != "FakeTensor":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return FakeTensor if caller.partition(".")[0] == "torch" or inside() else NoFakeTensor

    before = list(sys.modules)
    try:
        with patched(package, FakeTensor=ABSENT, __getattr__=module_getattr):
            yield
    finally:
        after = list(sys.modules)
        # new modules come last; sets of thousands of names take longer than the recording of a few ops
        modules_removed = after[: len(before)] != before
        for name in set(after).difference(before) if modules_removed else after[len(before) :]:
            for attribute, value in list(vars(sys.modules[name]).items()):
                if value is NoFakeTensor:
                    setattr(sys.modules[name], attribute, FakeTensor)


def _is_elementwise_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op changes only the values of its first argument, a fake tensor without known values."""
    if func._schema.name not in _IN_PLACE or kwargs.get("generator") is not None:
        return False
    target = args[0]
    if not isinstance(target, FakeTensor) or target.constant is not None:
        return False
    operands = [arg for arg in args[1:] if isinstance(arg, torch.Tensor)]
    return all(isinstance(operand, FakeTensor) and operand.shape == target.shape for operand in operands)


_FOREACH = [importlib.import_module(name) for name in ("torch.utils._foreach_utils", "torch.optim.optimizer")]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _key_of(value: Any) -> Any:
    """Return a hashable key of the properties of an argument that determine an op's result shape, strides and dtype.
    Raises TypeError if the argument is of a kind for which results are not cached."""
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
    """Cache of results of functional ops, keyed by shapes, strides and dtypes.

    A model repeats its layers, an optimizer its update for every parameter. FakeTensorMode has such a cache, too, with
    a key of some twenty fields a tensor; this cache covers the plain case in a fifth of the time.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[bool, tuple[Any, ...]] | None] = {}
        """By key: whether the op returns a single tensor, and (shape, stride, dtype) of each result."""
        self._functional: dict[Any, bool] = {}
        """By op: whether it is an op of ATen that neither writes to nor aliases an argument."""

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the key of a call, or None if its result cannot be cached, as for ops that write or alias an
        argument."""
        functional = self._functional.get(func)
        if functional is None:
            schema = func._schema
            aliases = [a.alias_info for a in (*schema.arguments, *schema.returns)]
            functional = all(info is None for info in aliases) and schema.name.startswith("aten::")
            self._functional[func] = functional
        if not functional:
            return None
        try:
            default = torch.get_default_dtype()
            return (func, default, _key_of(args), tuple([(name, _key_of(value)) for name, value in kwargs.items()]))
        except TypeError:
            return None

    def recall(self, key: Any, mode: FakeTensorMode) -> Any:
        """Return new fake tensors of ``mode`` like those of the cached call, or NotImplemented."""
        entry = self._results.get(key)
        if entry is None:
            return NotImplemented
        single, metadata = entry
        metas = [None if output is None else _meta_empty(*output) for output in metadata]
        with no_dispatch():
            results = [None if meta is None else FakeTensor(mode, meta, _CPU) for meta in metas]
        return results[0] if single else tuple(results)

    def remember(self, key: Any, args: Any, result: Any) -> None:
        """Cache the shapes of a result if each of its tensors is new, dense, on the CPU and fills its storage, so that
        `recall` can rebuild it from shape, strides and dtype alone."""
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
    """Return an empty meta tensor, created outside of all modes."""
    with no_dispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


Dispatched = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_OUTSIDE = "_memplan_outside"


def replace_sparse_parts(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Replace the indices and values of sparse tensor ``target`` by those of ``source``, as an in-place op does.

    Known values of the indices are replaced, too. Returns ``target``.
    """
    target.data = source
    setattr(target, INDICES_ATTRIBUTE, known_indices(source))
    return target


class _FakeSparse:
    """Fakes of sparse tensors from before the recording, built from fakes of their indices and values.

    torch's own fakes of sparse tensors, and of their copies, have no elements. Seen in torch 2.13.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._fakes = WeakIdKeyDictionary()
        """By real tensor: its fake."""

    def replaced(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an op with each real sparse tensor replaced by its fake."""
        return tuple(
            [self._fake_of(arg) if is_sparse(arg) and not isinstance(arg, FakeTensor) else arg for arg in args]
        )

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a real sparse tensor, the same object in each call."""
        fake = self._fakes.get(tensor)
        if fake is None:
            if tensor.layout != torch.sparse_coo:
                raise compressed_layout_error()
            real = sparse_parts(tensor)
            parts = [self._mode.from_tensor(part) for part in real]
            coalesced = tensor.is_coalesced()
            fake = sparse_coo(parts[0], parts[1], tensor.shape, coalesced=coalesced, known=real[0])
            setattr(fake, _OUTSIDE, True)
            self._fakes[tensor] = fake
        return fake


def is_from_outside(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was created before the recording: real, or the fake of a real sparse tensor."""
    return not isinstance(tensor, FakeTensor) or hasattr(tensor, _OUTSIDE)


class Replacements(Protocol):
    """Composite ops that decompose differently on the recorded device; see `memplan.trace.semantics`."""

    @property
    def instead(self) -> Mapping[Any, Callable[..., Any]]:
        """Op -> replacement for the op's decomposition."""
        ...

    @property
    def whole(self) -> frozenset[Any]:
        """Ops that are not decomposed."""
        ...

    def taking_apart(self) -> contextlib.AbstractContextManager[None]:
        """Context around the decomposition or replacement of an op."""
        ...


def _names_requiring_gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    values = zip(func._schema.arguments, args, strict=False)
    named = {**{argument.name: value for argument, value in values}, **kwargs}
    return tuple(
        name
        for name, value in named.items()
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
    )


_STATE_OF_HOST, _STATE_OF_CARD = 5056, 16
"""Bytes of the tensors that `torch.get_rng_state` and `torch.cuda.get_rng_state` return, both on the host."""


def _not_bounded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented


class FakeMode(FakeTensorMode):
    """A fake tensor mode with a callback around every aten op: a second mode would cost another dispatch an op."""

    def __init__(self, dispatch: Dispatch, bound: Dispatched | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._observe = dispatch
        self._inside = False
        """Whether an op is being observed: ops that its fake implementation calls are not."""
        self._lock = threading.RLock()
        """Acquired by a thread while it dispatches an op, so that the records of two threads do not mix."""
        self._selected = False
        """Whether the size of the running op's result depends on values, and is a bound."""
        self.suspended = False
        """Whether ops run unobserved; see `suspending`."""
        self._memo = _Memo()
        self._fakes_of_outside = WeakIdKeyDictionary()
        """By real tensor from outside of the recording: its fake."""
        self._sparse = _FakeSparse(self)
        self.replacements: Replacements | None = None
        """None to decompose composite ops as torch does."""
        self._wrapped: tuple[Any, tuple[str, ...]] = None, ()
        """The last op that a wrapper subclass dispatched, and the names of its arguments that require a gradient."""
        self.on_launch: Callable[[str, Sequence[torch.Tensor]], None] | None = None
        """Called with each kernel that an op of `memplan.kernels` launches: its name and its tensors."""
        self.placing: Callable[[torch.device], contextlib.AbstractContextManager[None]] | None = None
        """Context around an op with ``device="cuda"``, which marks its result as on the card; it runs on the CPU."""
        self._bound: Dispatched = bound or _not_bounded
        """Returns a result of bounded size for an op whose shape depends on values, or NotImplemented."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        """Return the mode itself: it is an attribute of each of its tensors, and subclasses copy attributes."""
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method below in torch._disable_dynamo, which costs more than all of our code in it.
        return False

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        if any(map(wraps_tensors, types)):  # its own dispatch runs the op on the tensors inside
            if not isinstance(func, HigherOrderOperator):
                self._wrapped = func, _names_requiring_gradients(func, args, kwargs or {})
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        with self._lock, subclasses_hidden(types, args, kwargs):
            return self._dispatch_locked(func, types, args, kwargs or {})

    def _higher_order(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """Run the op inside of a higher-order op that saves or sets the random state, as compiled checkpoints and
        `DTensor` use them."""
        with self:
            if func is run_and_save_rng_state:
                op, *args = args
                size = _STATE_OF_HOST if self.placing is None else _STATE_OF_CARD
                return torch.empty(size, dtype=torch.uint8, device=_CPU), op(*args, **kwargs)
            if func is run_with_rng_state:
                _, op, *args = args
                return op(*args, **kwargs)
            if func is _DTENSOR_RANDOM:
                _, _, op, *args = args
                return op(*args, **kwargs)
        raise NotImplementedError(f"{func.name()} on tensors without data")

    def _dispatch_locked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Dispatch an op while this thread holds the lock: decompose it, run it as a part of another op, or observe
        it."""
        if torch.is_inference_mode_enabled() and not self._inside and is_composite(func):
            # outside of inference mode, composite ops arrive decomposed
            replacements = self.replacements
            if replacements is None:
                with self:
                    return func.decompose(*args, **kwargs)
            if func not in replacements.whole:
                with replacements.taking_apart(), self:
                    return replacements.instead.get(func, func.decompose)(*args, **kwargs)
        composed = None if self._inside else COMPOSED.get(func._schema.name)
        if composed is not None:
            with self, torch.no_grad():  # the op's own derivative counts
                result = composed(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self._inside:  # called by the fake implementation of another op, which is observed instead
            return self._fake_result(func, types, args, kwargs)
        device = kwargs.get("device")
        if device is not None and device != _CPU and torch.device(device).type == "cpu":  # "cpu:0", the same device
            kwargs = {**kwargs, "device": _CPU}
        if self.placing is not None and device is not None and torch.device(device).type == "cuda":
            with self.placing(torch.device(device)):
                return self._dispatch_locked(func, types, args, {**kwargs, "device": _CPU})
        return self._dispatch_observed(func, types, args, kwargs)

    def _dispatch_observed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Hand an op to the recorder, which gets a function that runs it on fake tensors."""
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
        """Return a `FakeTensor.__torch_dispatch__` that acquires the lock: in the step's threads without this mode,
        fake tensors dispatch themselves."""
        dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__

        def locked_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with self._lock:
                return dispatch(cls, func, types, args, kwargs)

        return classmethod(locked_dispatch)

    def _fake_result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on fake tensors. A result whose shape depends on values gets a bounded size."""
        args = tuple([self._with_value(arg) for arg in args])
        long: list[tuple[FakeTensor, Any]] = [(tensor, tensor.constant) for tensor in _long_constants(func, args)]
        for tensor, _ in long:
            tensor.constant = None
        try:
            result = self.dispatch(func, types, args, kwargs)
            if func._schema.name in _UNFILLED and isinstance(result, FakeTensor):
                result.constant = None  # its memory is uninitialized
            return result
        except DynamicOutputShapeException:
            bounded = self._bound(func, args, kwargs)
            if bounded is NotImplemented:
                raise
            self._selected = True
            return bounded
        finally:
            aliased = func._schema.is_mutable or any(value.alias_info for value in func._schema.returns)
            for tensor, constant in long:
                tensor.constant = constant
                if aliased:  # what is written through the result is not followed
                    self.fake_tensor_converter.invalidate_constant_aliases(constant)

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor from outside the recording, the same object as long as the tensor lives."""
        if tensor not in self._fakes_of_outside:
            fake = self._with_value(tensor)
            if not isinstance(fake, FakeTensor) and not is_sparse(fake):  # a tensor whose values are not tracked
                fake = self.from_tensor(fake)
            self._fakes_of_outside[tensor] = fake
        return self._fakes_of_outside[tensor]

    def _with_value(self, arg: Any) -> Any:
        """Return a fake tensor with known values for a small real tensor; other arguments unchanged."""
        if type(arg) is not torch.Tensor or arg.numel() > _CONSTANT_NUMEL or arg.requires_grad:
            return arg
        if arg.layout != torch.strided or arg.device != _CPU or arg.is_complex():
            return arg
        return self.fake_tensor_converter.from_real_tensor(self, arg, make_constant=True)

    def needs_of_wrapped(self, func: Any) -> tuple[str, ...]:
        """Return the names of the arguments for which an op computes gradients, if a wrapper subclass, such as
        `DTensor`, runs it on the tensors inside, which require no gradient themselves; else ()."""
        wrapped, names = self._wrapped
        if func is not wrapped:
            return ()
        self._wrapped = None, ()  # a later op of the same name may be on plain tensors
        return names

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a fake tensor of this mode."""
        return getattr(tensor, "fake_mode", None) is self

    @property
    def inside(self) -> bool:
        """Return whether an op is being dispatched."""
        return self._inside

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Treat ops in this context as parts of a running op: they are not observed, and ``tensor.device`` is the real
        device (the CPU)."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def suspending(self) -> Iterator[None]:
        """Suspend the recording: ops in this context are not observed, and ops raise whose result's size depends on
        values."""
        before, bound = self.suspended, self._bound
        self.suspended, self._bound = True, _not_bounded
        try:
            with self.within(), no_modes():
                yield
        finally:
            self.suspended, self._bound = before, bound

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Enter the mode for the user's code, with the patches of torch that it needs. (It enters itself again for
        inner calls.)"""
        with (
            patched_throughout(fake_tensor, CONSTANT_NUMEL_LIMIT=_POSITIONS_NUMEL),
            # torch logs a traceback of each error that it raises here; the recording reports the error in one message
            patched_throughout(fake_tensor.log, disabled=True),
            _hidden(lambda: self._inside),
            tables_as_without_recording(),
            # optimizers use foreach functions for tensors of these types alone
            patched_throughout(FakeTensor, __torch_dispatch__=self._one_thread_at_a_time()),
            patched_throughout(
                _FOREACH[0], _foreach_supported_types=[*_FOREACH[0]._foreach_supported_types, FakeTensor]
            ),
            patched_throughout(
                _FOREACH[1], _foreach_supported_types=[*_FOREACH[1]._foreach_supported_types, FakeTensor]
            ),
            self,
        ):
            yield

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Enter the mode in a thread that the step starts.

        The lock keeps other threads from dispatching meanwhile: torch's mode has one list, for all threads, of the
        modes below it.
        """
        with self._lock:
            self.__enter__()
        try:
            yield
        finally:
            with self._lock:
                self.__exit__(None, None, None)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on fake tensors by the cheapest method: return its argument (in-place ops), a cached result,
        computed values (small results of `_FACTORIES`), or torch's fake implementation."""
        if func._schema.name == _WAIT or _is_elementwise_in_place(func, args, kwargs):
            return args[0]
        key = self._memo.key(func, args, kwargs)
        if key is not None:
            known = self._memo.recall(key, self)
            if known is not NotImplemented:
                return known
        self._selected = False
        result = self._fake_result(func, types, args, kwargs)
        max_numel = _POSITIONS_NUMEL if func._schema.name == _ARANGE else _CONSTANT_NUMEL
        if func._schema.name in _FACTORIES and isinstance(result, FakeTensor) and result.numel() <= max_numel:
            with no_modes():
                real_args = [torch.empty(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
                real = func(*real_args, **kwargs)
            if result.device.type == "cpu" and real.stride() == result.stride():
                return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)
        if key is not None and not self._selected:  # bounds can differ between lines of the user's code
            self._memo.remember(key, (args, kwargs), result)
        return result
