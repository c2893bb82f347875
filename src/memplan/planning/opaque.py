"""What cannot be traced, or not with the same bits: kept as it is, called once, planned around.

A custom autograd function that leaves torch (numpy, a library of its own), an op without a fake implementation, and
torch's LSTM and GRU (their kernels save more than tensors) become one op of the graph each. It runs the very code that
eager mode runs, under autograd, and returns a handle on what that saved; the op of its derivative takes the handle.
What the results look like, and how much the handle holds, is found by running the model once, without gradients; for
torch's own, without data.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from memplan import _torch
from memplan.errors import DataDependentError, RecordingError
from memplan.planning.results import INSTEAD, RESULTS
from memplan.trace.place import format_frame, user_frame
from memplan.trace.structure import Structure, take_apart

_ALWAYS = ("lstm", "gru")


@dataclass(frozen=True)
class Like:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """Of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Opaque:
    """One call that stays as it is."""

    key: str
    title: str
    where: str | None = field(compare=False)
    layer: str = field(compare=False)
    function: Callable[..., Any]
    arguments: Structure
    needed: tuple[bool, ...]
    """Which of its tensors need a gradient."""
    inputs: tuple[Like, ...]
    results: tuple[Like, ...]
    smooth: tuple[bool, ...]
    """Which of its results have one."""
    returned: Structure
    held: int
    """Bytes that the handle holds: what is saved and is neither argument nor result."""
    kept: tuple[int, ...]
    """What is saved of arguments and results: positions among the arguments, then the results."""
    around: Callable[[], AbstractContextManager[Any]] = field(compare=False)
    """The autocast under which it is called."""

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.layer, self.where) if part)
        return f"{self.title}{f' ({place})' if place else ''}: cannot be traced, called as it is, once"

    def run(self, tensors: Sequence[torch.Tensor]) -> _torch.Recorded:
        """Call it."""
        return _torch.Recorded(lambda given: self.called(given)[0], tensors, self.needed)

    def called(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Structure]:
        """What it returns for these tensors, taken apart."""
        args, kwargs = self.arguments.rebuild(tensors)
        with self.around():
            return take_apart(self.function(*args, **kwargs))


_KNOWN: weakref.WeakValueDictionary[str, Opaque] = weakref.WeakValueDictionary()


# -- the two ops


def _call(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    found = _KNOWN[key]
    recorded = found.run(inputs)
    taken = {_torch.storage_key(one.untyped_storage()) for one in inputs}
    results = list[torch.Tensor]()
    for result, like in zip(recorded.results, found.results, strict=True):
        if Like.of(result) != like:
            raise DataDependentError(
                f"{found.title} returned {tuple(result.shape)}, and {like.shape} when the step was planned",
                expected="results whose shapes and strides follow from those of the arguments",
                do="Leave that layer out of the plan",
                layer=found.layer,
                where=found.where,
            )
        storage = _torch.storage_key(result.untyped_storage())
        results.append(result.clone() if storage in taken else result)
        taken.add(storage)
    handle = torch.zeros((), dtype=torch.uint8)
    handle.recorded = recorded  # pyright: ignore[reportAttributeAccessIssue]  # lives as long as the handle
    recorded.results.clear()
    return [*results, handle]


def _call_without_data(inputs: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    found = _KNOWN[key]
    handle = torch.empty(max(found.held, 1), dtype=torch.uint8).as_strided((), ())
    return [*(like.empty() for like in found.results), handle]


def _backward(
    handle: torch.Tensor, gradients: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    found = _KNOWN[key]
    made = handle.recorded.gradients(gradients)  # pyright: ignore[reportAttributeAccessIssue]  # see _call
    taken = {_torch.storage_key(one.untyped_storage()) for one in gradients if one is not None}
    results = list[torch.Tensor]()
    for gradient, like in zip(made, _receivers(found), strict=True):
        wanted = like.empty().zero_() if gradient is None else gradient
        if Like.of(wanted) != like or _torch.storage_key(wanted.untyped_storage()) in taken:
            wanted = like.empty().copy_(wanted)
        taken.add(_torch.storage_key(wanted.untyped_storage()))
        results.append(wanted)
    return results


def _backward_without_data(
    handle: torch.Tensor, gradients: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    return [like.empty() for like in _receivers(_KNOWN[key])]


def _receivers(found: Opaque) -> list[Like]:
    return [like for like, one in zip(found.inputs, found.needed, strict=True) if one]


_torch.define_opaque(_call, _call_without_data, _backward, _backward_without_data)


class _Traced(torch.autograd.Function):
    """How a call stands in a graph that is traced: one op, and one for its derivative."""

    @staticmethod
    def forward(ctx: Any, found: Opaque, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *results, handle = torch.ops.memplan.opaque.default(list(tensors), found.key)
        both = (*tensors, *results)
        ctx.found, ctx.handle, ctx.kept = found, handle, [both[at] for at in found.kept]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one, smooth in zip(results, found.smooth, strict=True) if not smooth))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found: Opaque = ctx.found
        made = iter(torch.ops.memplan.opaque_backward.default(ctx.handle, list(gradients), ctx.kept, found.key))
        return None, *(next(made) if needed else None for needed in found.needed)


# -- finding out


class Around:
    """What is opaque in a model, and, once that is known, what each call of it looks like."""

    def __init__(self) -> None:
        self.marked: list[Any] = []
        """Functions and ops that are opaque."""
        self.found: list[Opaque] = []
        self._examples: list[Opaque] = []
        """Calls of what is marked, in order, from running the model."""
        self._next = 0

    def mark(self, culprit: Any) -> bool:
        """Take something for opaque; whether that is new."""
        if culprit is None or culprit in self.marked:
            return False
        self.marked.append(culprit)
        return True

    def learn(self, run: Callable[[], Any]) -> None:
        """Run the model once to see what calls of what is marked look like."""
        self._examples = []
        if self.marked:
            with self._replaced(self._exemplary, _nowhere):
                run()

    @contextmanager
    def tracing(self, layer: Callable[[], str]) -> Iterator[None]:
        """A context in which what is opaque becomes an op of the graph. It is entered for each pass of the trace."""
        self._next, self.found = 0, []
        with self._replaced(self._traced, layer):
            yield

    @contextmanager
    def _replaced(self, call: Callable[..., Any], layer: Callable[[], str]) -> Iterator[None]:
        packets = [one for one in self.marked if not isinstance(one, type)]

        class Replacing(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                known = getattr(func, "__name__", "") in _ALWAYS and isinstance(func, type(torch.lstm))
                if (known and call.__name__ == "_traced") or any(_torch.calls_op(func, one) for one in packets):
                    return call(str(getattr(func, "__name__", func)), func, args, kwargs or {}, layer(), known)
                return func(*args, **(kwargs or {}))

        def replacement(cls: Any) -> Any:
            apply = cls.apply
            return staticmethod(lambda *args: call(cls.__qualname__, apply, args, {}, layer(), False))

        with ExitStack() as stack:
            for cls in (one for one in self.marked if isinstance(one, type)):
                stack.enter_context(_torch.patched(cls, apply=replacement(cls)))
            stack.enter_context(Replacing())
            yield

    def _exemplary(
        self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str, known: bool
    ) -> Any:
        tensors, arguments = take_apart((args, kwargs))
        smooth = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        try:
            found, results = _example(title, function, arguments, tensors, smooth, layer)
        except Exception:  # some code refuses tensors that need a gradient, and is given none
            found, results = _example(title, function, arguments, tensors, [False] * len(tensors), layer)
        self._examples.append(found)
        return found.returned.rebuild(results)

    def _traced(self, title: str, function: Callable[..., Any], args: Any, kwargs: Any, layer: str, known: bool) -> Any:
        tensors, arguments = take_apart((args, kwargs))
        needed = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
        if known:
            with _torch.without_data(RESULTS, INSTEAD):
                empty = [Like.of(tensor).empty() for tensor in tensors]
                found, _ = _example(title, function, arguments, empty, needed, layer)
        else:
            found = self._example_of(title, tensors, layer)
            found = replace(found, function=function, arguments=arguments, needed=needed, layer=layer)
        found = self._registered(found)
        return found.returned.rebuild(_Traced.apply(found, *tensors))

    def _example_of(self, title: str, tensors: Sequence[torch.Tensor], layer: str) -> Opaque:
        """What the same call looked like when the model ran."""
        at, self._next = self._next, self._next + 1
        inputs = tuple(Like.of(tensor) for tensor in tensors)
        example = self._examples[at] if at < len(self._examples) else None
        if (
            example is None
            or example.title != title
            or [one.shape for one in example.inputs] != [one.shape for one in inputs]
        ):
            raise RecordingError(
                f"{title} was called otherwise when the model ran than when it was traced",
                expected="calls that follow from the shapes of the inputs",
                do="Leave that layer out of the plan",
                layer=layer,
                where=format_frame(user_frame()),
            )
        return replace(example, inputs=inputs)

    def _registered(self, found: Opaque) -> Opaque:
        """The same under a key of its own: with the same key in every process, so that plans can be kept."""
        looks = (found.inputs, found.results, found.needed, found.smooth, found.held, found.kept)
        digest = hashlib.sha256(repr(looks).encode()).hexdigest()[:8]
        number, key = 1, ""
        while not key or (key in _KNOWN and _KNOWN[key] != found):
            key = f"{found.title} {len(self.found)} {digest}" + (f" {number}" if number > 1 else "")
            found, number = replace(found, key=key), number + 1
        found = _KNOWN.setdefault(key, found)
        self.found.append(found)
        return found


def _example(
    title: str,
    function: Callable[..., Any],
    arguments: Structure,
    tensors: Sequence[torch.Tensor],
    needed: Sequence[bool],
    layer: str,
) -> tuple[Opaque, list[torch.Tensor]]:
    """Run a call to see what it looks like; and its results."""
    found = Opaque(
        "", title, format_frame(user_frame()), layer, function, arguments, tuple(needed),
        tuple(Like.of(tensor) for tensor in tensors), (), (), arguments, 0, (), _torch.autocast_of_now(),
    )  # fmt: skip
    saved: list[torch.Tensor] = []
    structures: list[Structure] = []

    def call(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        results, structure = found.called(given)
        structures.append(structure)
        return results

    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        recorded = _torch.Recorded(call, tensors, needed)
    for attributes in recorded.attributes():
        saved += take_apart(attributes)[0]
    results = recorded.results
    sizes = {_torch.storage_key(one.untyped_storage()): int(one.untyped_storage().nbytes()) for one in saved}
    places = [_torch.storage_key(one.untyped_storage()) for one in (*tensors, *results)]
    found = replace(
        found,
        results=tuple(Like.of(result) for result in results),
        smooth=recorded.smooth,
        returned=structures[0],
        held=sum(size for key, size in sizes.items() if key not in places),
        kept=tuple(at for at, key in enumerate(places) if key in sizes),
    )
    return found, list(results)


def _nowhere() -> str:
    return ""
