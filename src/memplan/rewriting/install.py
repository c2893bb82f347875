"""Put planned steps in the place of a module's call; the module remains the user's own."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from memplan import _torch
from memplan.errors import CompileError, InputError, RecordingError, TargetError
from memplan.planning.capture.capture import Captured, is_capturing
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.reads.passes import reads_of
from memplan.planning.capture.reads.readable import Reads
from memplan.planning.capture.subclassed import Kinds, as_kinds, output_kinds
from memplan.planning.inductor.partition import Fused, fused
from memplan.planning.schedule.scheduler import Schedule
from memplan.rewriting.calls import Calls
from memplan.rewriting.compiled import compiled
from memplan.rewriting.engine import Engine, GuardedError
from memplan.rewriting.keys import Key, Keys, UnkeyedError, argument_of
from memplan.trace.recording.session import one_at_a_time, recording_suspended
from memplan.trace.structure import take_apart


class Runnable(Protocol):
    """Answer of a planner: a schedule and the captured step."""

    @property
    def captured(self) -> Captured:
        """Graph, and how its values correspond to the call's tensors."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Order in which ops run."""
        ...

    @property
    def fused(self) -> Fused | None:
        """Parts to compile, where these are known already."""
        ...


Planner = Callable[[Call, bool], Runnable | None]
"""A call, and whether gradients are held when it begins -> the step that runs instead; None: the model unplanned."""

_planning = threading.local()


_KINDS = 64
"""Number of kinds of calls whose plans are kept: those that were called last."""
_VARIANTS = 8
"""Number of plans for one kind of call, where values of inputs decide which is right."""
_ALIKE = 8
"""Number of plans for calls that differ in one thing alone, at which the user is warned."""


def install(model: nn.Module, planner: Planner) -> Installed:
    """Make calls of a module run as planned.

    A call under grad mode is planned when it is the first of its kind (see keys), and runs as planned from then on;
    where nothing requires grad, or under a transform, the module runs unplanned. `torch.compile` of the module leaves
    its calls to the plan; of a function that calls it, it takes the module into its own graph, and that is warned of.
    `torch.export` and `torch.jit.trace` trace it as it is written. It keeps its parameters, attributes and methods.
    Copies and pickles of it are not planned. Of all kinds of calls the last 64 are remembered.

    Args:
        model: a module, or `memplan.with_loss` of one.
        planner: called once for each kind of call. It may call the module, which then runs unplanned and without its
            own hooks. Where it raises UnkeyedError, or its answer cannot be compiled, such calls run unplanned.

    Raises:
        TargetError: the module is planned or compiled already.
    """
    return Installed(model, planner)


@dataclass(eq=False)
class _Variant:
    """Compiled plan for one kind of call."""

    engine: Engine | None = None
    """None: the model runs unplanned."""
    captured: Captured | None = None
    unplanned: str = ""
    """Why, where a plan was tried."""
    reads: Reads | None = None
    """What the model's code had read when it was captured."""
    used: int = 0
    """Number of the last call that it was for."""
    kinds: Kinds = ()
    """Subclass of each tensor that is returned, where an input is of one."""

    def holds(self, moment: object = None) -> bool:
        return self.reads is None or self.reads.hold(moment)

    def suits(self, call: Call) -> bool:
        return self.captured is None or self.captured.holds(call)


_Kind = tuple[Key, bool]
"""A key, and whether gradients are held."""


class _Table:
    """Variants of the kinds of calls; those that were not called for longest are forgotten."""

    def __init__(self) -> None:
        self._variants: dict[_Kind, tuple[_Variant, ...]] = {}
        self._lock = threading.Lock()
        self._calls = itertools.count(1)

    def of(self, kind: _Kind) -> tuple[_Variant, ...]:
        """Return the variants of a kind, the last used one first."""
        return self._variants.get(kind, ())

    def number(self) -> int:
        """Return the number of a call."""
        return next(self._calls)

    def use(self, kind: _Kind, variant: _Variant) -> None:
        """Note a call that a variant is for, which is not the last used one of its kind."""
        with self._lock:
            others = self._variants.get(kind, ())
            if variant in others:
                self._variants[kind] = (variant, *(one for one in others if one is not variant))

    def add(self, kind: _Kind, variant: _Variant) -> None:
        """Add a variant of a kind."""
        variant.used = next(self._calls)
        with self._lock:
            for one in self._variants.get(kind, ()):
                if variant.reads is not None and one.reads is not None:
                    variant.reads.share(one.reads)
            self._variants[kind] = (variant, *self._variants.get(kind, ()))
            every = sorted((one for found in self._variants.values() for one in found), key=lambda one: one.used)
            gone = every[:-_KINDS]
            for other, found in list(self._variants.items()) if gone else ():
                self._variants[other] = tuple(one for one in found if one not in gone)
                if not self._variants[other]:
                    del self._variants[other]
        self._close(gone)

    def drop(self, variant: _Variant) -> None:
        """Forget one that has no engine."""
        with self._lock:
            for kind, variants in list(self._variants.items()):
                self._variants[kind] = tuple(one for one in variants if one is not variant)

    def clear(self) -> None:
        """Forget all variants."""
        gone = self.all()
        with self._lock:
            self._variants.clear()
        self._close(gone)

    def all(self) -> list[_Variant]:
        """Return all variants."""
        with self._lock:
            return [variant for variants in self._variants.values() for variant in variants]

    def kinds(self) -> list[tuple[_Kind, tuple[_Variant, ...]]]:
        """Return all kinds and their variants."""
        with self._lock:
            return list(self._variants.items())

    def _close(self, gone: list[_Variant]) -> None:
        used = {variant.engine.text for variant in self.all() if variant.engine is not None}
        for variant in gone:
            if variant.engine is not None and variant.engine.text not in used:
                variant.engine.close()


class Installed:
    """See `install`."""

    def __init__(self, model: nn.Module, planner: Planner) -> None:
        if _torch.call_of_module(model) is not None:
            raise TargetError(
                "A model whose calls are planned or compiled already",
                expected="one that runs in eager mode",
                do="Call fitted.undo(), or leave out model.compile()",
            )
        self._model = weakref.ref(model, lambda _: self._forget())
        self._planner = planner
        self.calls = Calls()
        """Counts of its calls."""
        self._keys = Keys(model)
        self._table = _Table()
        self._told: set[str] = set()
        self._outside = _outside_of_compiled()
        self._restore: Callable[[], None] = _torch.set_call(model, self._call)
        self._unwatch = _watch_compiler(self)

    def undo(self) -> None:
        """Make the module run as before; calls whose backward pass is still to come are not disturbed."""
        self._restore()
        self._forget()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Remembered planned steps."""
        return tuple(variant.engine for variant in self._table.all() if variant.engine is not None)

    def release(self) -> None:
        """Hold no tensor of the last call: the next one reads anew what its key and its guards need."""
        self._keys.release()
        for variant in self._table.all():
            if variant.reads is not None:
                variant.reads.release()

    def _forget(self) -> None:
        """Drop all references to the model."""
        self._unwatch()
        self._keys, self._restore, self._planner = Keys(nn.Module()), lambda: None, lambda call, held: None
        self._table.clear()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            return self._outside(self, *args, **kwargs)
        return self._call_now(*args, **kwargs)

    def _call_now(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None, "it is called by its module"
        captured = getattr(_planning, "modules", ())
        if model in captured:
            return model.forward(*args, **kwargs)
        if captured or is_capturing() or torch.compiler.is_compiling() or _torch.is_jit_tracing():
            return _torch.original_call(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.calls.without_grad()
            return _torch.original_call(model)(*args, **kwargs)
        around = _torch.surroundings()
        if around is not None:
            self._aside(around, any(one.requires_grad for one in model.parameters()))
            return _torch.original_call(model)(*args, **kwargs)
        if _torch.is_transformed():
            needed = any(one.requires_grad for one in model.parameters())  # wrapped outputs do not say it
            self._aside("it is under a transform of torch.func, such as vmap or grad", needed)
            return _torch.original_call(model)(*args, **kwargs)
        if _torch.has_hooks(model):
            return _torch.call_with_hooks(model, self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        call = call_of(args, kwargs)
        try:
            variant = self._variant(model, call)
        except UnkeyedError as error:
            variant = _Variant(unplanned=str(error))
        why = variant.unplanned
        if variant.engine is not None:
            try:
                output = variant.engine.run(model, call)
            except GuardedError as error:  # e.g. what it checks is drawn at random, and is drawn anew
                why = f"{error}, and did not now"
            else:
                self.calls.planned()
                return as_kinds(output, variant.kinds)
        try:
            output = model.forward(*args, **kwargs)
        except BaseException:
            if variant.engine is None:  # such a call may yet be planned, with values for which the model runs
                self._table.drop(variant)
            raise
        self._aside(why, bool(why) and any(tensor.requires_grad for tensor in take_apart(output)[0]), above=1)
        return output

    def _aside(self, why: str, needed: bool, *, above: int = 0) -> None:
        """Count a call that runs as the model is written; the first one for this reason warns.

        Args:
            why: the reason.
            needed: whether a gradient is.
            above: functions between the caller and `_call`.
        """
        if needed:
            self.calls.unplanned(why)
            self._tell(f"a call runs unplanned: {why}", above=above)
        else:
            self.calls.without_grad()

    def prepare(self, call: Call, held: bool) -> None:
        """Plan such a call now instead of when it first comes. Raises BudgetError: no plan fits.

        Args:
            call: of the module.
            held: whether gradients are held when it begins.
        """
        model = self._model()
        assert model is not None, "it is prepared for its module"
        with suppress(UnkeyedError), one_at_a_time:  # it says why when such a call comes
            kind: _Kind = self._keys.key(model, call), held
            self._table.add(kind, self._planned(model, call, kind))

    def _variant(self, model: nn.Module, call: Call) -> _Variant:
        key = self._keys.key(model, call)
        kind = key, self._keys.are_gradients_held()
        found = self._found(kind, call)
        if found is None and not any(tensor.requires_grad for tensor in (*self._keys.parameters(), *call.tensors)):
            return _Variant()
        if found is None:
            with one_at_a_time:
                found = self._found(kind, call)
                if found is None:
                    found = self._planned(model, call, kind)
                    self._table.add(kind, found)
        return found

    def _found(self, kind: _Kind, call: Call) -> _Variant | None:
        """Return the variant for such a call, where there is one."""
        undecided, moment = list[_Variant](), self._keys.moment
        for at, variant in enumerate(self._table.of(kind)):
            if variant.holds(moment):
                if variant.suits(call):
                    variant.used = self._table.number()
                    if at:
                        self._table.use(kind, variant)
                    return variant
                undecided.append(variant)
        if len(undecided) >= _VARIANTS:
            raise _undecided(call, tuple(undecided))
        return None

    def _planned(self, model: nn.Module, call: Call, kind: _Kind) -> _Variant:
        self._tell_of_alike(call, kind)
        outer = getattr(_planning, "modules", ())
        _planning.modules = (*outer, model)
        try:
            with recording_suspended():
                kinds = output_kinds(model, call)
            planned = self._planner(_as_leaves(call), kind[1])
        except (UnkeyedError, InputError) as error:
            return _Variant(unplanned=str(error), reads=reads_of(error))
        finally:
            _planning.modules = outer
        if planned is None:
            return _Variant()
        reads = planned.captured.reads
        if reads is not None and not reads.hold():
            changed = f"what forward() reads changed while it was planned: the {reads.differing()[0]}"
            return _Variant(unplanned=changed, reads=reads)
        try:
            return _Variant(_engine(planned), planned.captured, reads=reads, kinds=kinds)
        except CompileError as error:  # perhaps hours into a training, for its last batch
            return _Variant(unplanned=str(error), reads=reads)

    def _tell_of_alike(self, call: Call, kind: _Kind) -> None:
        """Warn of something that differs in each call, so that each is planned anew."""
        found = Counter[str | int]()
        for (key, held), variants in self._table.kinds():
            places = kind[0].differing_leaves(key) if held == kind[1] else None
            for variant in variants if places is not None else ():
                names = [] if variant.holds() or variant.reads is None else variant.reads.differing()
                if len(names) + len(places or ()) == 1:
                    found[(names or places or [0])[0]] += 1
        for what, times in found.items():
            if times + 1 < _ALIKE:
                continue
            number = isinstance(what, int)
            self._tell(
                f"{_ALIKE} calls that differ in {argument_of(call, what) if number else f'the {what}'} alone were each "
                "planned anew, which takes time: "
                + ("pass that number as a tensor" if number else "keep what changes all the time in a tensor, "
                   "registered by register_buffer(), or out of the model and its functions"),
                above=3,
            )  # fmt: skip

    def tell_of_compiler(self, function: str, modules: list[nn.Module]) -> None:
        """Warn where Dynamo is about to take the model into a graph: it does not call modules, but compiles them."""
        model = self._model()
        if any(one is model for module in modules for one in module.modules()):
            text = f"torch.compile takes {type(model).__name__} into its graph of {function}, without its plan"
            self._tell(f"{text}: leave that function uncompiled, or call fitted.undo()")

    def _tell(self, text: str, *, above: int = 0) -> None:
        """Warn once, at the user's call. ``above``: functions between the caller and `_run`."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"memplan: {text}", stacklevel=6 + above)


def _watch_compiler(made: Installed) -> weakref.finalize[..., Installed]:
    """Let a module's calls hear of what Dynamo compiles, for as long as they are there."""
    tell = weakref.WeakMethod(made.tell_of_compiler)

    def said(function: str, modules: list[nn.Module]) -> None:
        method = tell()
        if method is not None:
            method(function, modules)

    ends = weakref.finalize(made, _torch.before_compiling(said))
    ends.atexit = False
    return ends


@cache
def _outside_of_compiled() -> Callable[..., Any]:
    """Return what Dynamo calls where it meets a planned module in code that it compiles: it would compile the model."""
    return torch.compiler.disable(
        Installed._call_now,
        reason="memplan: its calls run by its plan, which torch.compile would drop; fitted.undo() takes the plan away",
    )


def _engine(planned: Runnable) -> Engine:
    functions = None
    if planned.schedule.choices.fused:
        functions = compiled(planned.fused or fused(planned.schedule))
    return Engine(planned.captured, planned.schedule, functions)


def _undecided(call: Call, variants: tuple[_Variant, ...]) -> RecordingError:
    read = {
        call.name_of(condition.input): None
        for variant in variants
        for condition in (variant.captured.conditions if variant.captured is not None else ())
        if not condition.holds(call.tensors)
    }
    return RecordingError(
        f"Values of {', '.join(read)} decide what is computed, differently in each call: {len(variants)} plans were "
        "made for calls that differ in nothing else",
        expected="values that decide between few cases, such as whether a mask is all ones",
        do="Compute with tensors: torch.where() for a branch, a count that stays a tensor, without int() or item()",
    )


def _as_leaves(call: Call) -> Call:
    """Detach the call's tensors from the graph that made them: a capture starts from them."""
    leaves = tuple(one if one.is_leaf else one.detach().requires_grad_() for one in call.tensors)
    return replace(call, tensors=leaves)
