"""Replace a module's call by planned steps, without changing the module itself."""

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
from memplan.rewriting.compiled import compile_parts
from memplan.rewriting.engine import Engine, GuardedError
from memplan.rewriting.keys import Key, Keys, UnkeyedError, argument_of
from memplan.trace.recording.session import one_at_a_time, recording_suspended
from memplan.trace.structure import take_apart


class Runnable(Protocol):
    """Result of a planner: a schedule and the captured step."""

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
        """Partition for fused kernels, if the planner computed it."""
        ...


Planner = Callable[[Call, bool], Runnable | None]
"""(call, whether parameters have gradients before it) -> planned step; None: run the model unplanned."""

_planning = threading.local()
_MAX_PLANS = 64
"""Most cached plans; the least recently used are dropped."""
_MAX_VARIANTS = 8
"""Most plans for calls with the same key that differ in values of inputs."""
_SIMILAR_PLANS = 8
"""Number of plans for calls that differ in a single attribute from which on the user is warned."""


def install(model: nn.Module, planner: Planner) -> Installed:
    """Make calls of a module run as planned.

    The first call with a new key (see `keys`) under grad mode is planned; later ones reuse the plan. The module runs
    unplanned where nothing requires grad and under a transform of torch.func. `torch.compile` of the module leaves its
    calls to the plan; a compiled function that calls the module inlines it without the plan, with a warning.
    `torch.export` and `torch.jit.trace` trace the module's own code. Parameters, attributes and methods stay the same.
    Copies and pickles of the module are not planned. The 64 most recently used plans are cached.

    Args:
        model: a module, or `memplan.with_loss` of one.
        planner: called once for each new key. It may call the module, which then runs unplanned and without its own
            hooks. A call runs unplanned if the planner raises UnkeyedError or the plan cannot be compiled.

    Raises:
        TargetError: the module is already planned or compiled.
    """
    return Installed(model, planner)


@dataclass(eq=False)
class _Variant:
    """Compiled plan of a call."""

    engine: Engine | None = None
    """None: the model runs unplanned."""
    captured: Captured | None = None
    unplanned: str = ""
    """Reason why the model runs unplanned, if planning failed."""
    reads: Reads | None = None
    """Python values that the model's code read during the capture."""
    used: int = 0
    """Number of the last call that used this variant."""
    kinds: Kinds = ()
    """Tensor subclasses of the results, if an input is of a subclass."""

    def are_reads_unchanged(self, moment: object = None) -> bool:
        """Return whether the Python values on which the plan depends are unchanged. ``moment``: see `Keys.moment`."""
        return self.reads is None or self.reads.are_unchanged(moment)

    def fits_call(self, call: Call) -> bool:
        """Return whether a call goes through the traced branches."""
        return self.captured is None or self.captured.takes_traced_branches(call)


_Kind = tuple[Key, bool]
"""A key, and whether parameters have gradients when the call begins."""


class _PlanCache:
    """LRU cache of variants by kind of call."""

    def __init__(self) -> None:
        self._variants: dict[_Kind, tuple[_Variant, ...]] = {}
        """Variants by kind of call, the most recently used first."""
        self._lock = threading.Lock()
        """Several threads may call the module."""
        self._calls = itertools.count(1)
        """Counts all calls: the time at which a variant was last used."""

    def variants_of(self, kind: _Kind) -> tuple[_Variant, ...]:
        """Return the variants of a kind, the most recently used first."""
        return self._variants.get(kind, ())

    def use(self, kind: _Kind, variant: _Variant) -> None:
        """Mark a variant as the most recently used of its kind."""
        variant.used = next(self._calls)
        variants = self._variants.get(kind, ())
        if variants[:1] == (variant,):
            return
        with self._lock:
            variants = self._variants.get(kind, ())
            if variant in variants:
                self._variants[kind] = (variant, *(other for other in variants if other is not variant))

    def add(self, kind: _Kind, variant: _Variant) -> None:
        """Add a variant of a kind, and drop the least recently used variants of all kinds beyond the limit."""
        variant.used = next(self._calls)
        with self._lock:
            others = self._variants.get(kind, ())
            for other in others:
                if variant.reads is not None and other.reads is not None:
                    variant.reads.share(other.reads)
            self._variants[kind] = (variant, *others)
            by_use = sorted(itertools.chain.from_iterable(self._variants.values()), key=lambda variant: variant.used)
            dropped = by_use[:-_MAX_PLANS]
            if dropped:
                remaining = {
                    key: tuple(variant for variant in variants if variant not in dropped)
                    for key, variants in self._variants.items()
                }
                self._variants = {key: variants for key, variants in remaining.items() if variants}
        self._close(dropped)

    def drop(self, variant: _Variant) -> None:
        """Remove a variant without an engine from the cache."""
        with self._lock:
            for kind, variants in list(self._variants.items()):
                self._variants[kind] = tuple(other for other in variants if other is not variant)

    def clear(self) -> None:
        """Drop all variants."""
        dropped = self.all()
        with self._lock:
            self._variants.clear()
        self._close(dropped)

    def all(self) -> list[_Variant]:
        """Return the variants of all kinds."""
        with self._lock:
            return [variant for variants in self._variants.values() for variant in variants]

    def kinds(self) -> list[tuple[_Kind, tuple[_Variant, ...]]]:
        """Return each kind of call with its variants."""
        with self._lock:
            return list(self._variants.items())

    def _close(self, dropped: list[_Variant]) -> None:
        """Close the engines of dropped variants whose program no cached engine shares."""
        used = {variant.engine.text for variant in self.all() if variant.engine is not None}
        for variant in dropped:
            if variant.engine is not None and variant.engine.text not in used:
                variant.engine.close()


class Installed:
    """A module whose calls run as planned; see `install`."""

    def __init__(self, model: nn.Module, planner: Planner) -> None:
        if _torch.call_of_module(model) is not None:
            raise TargetError(
                "A model whose calls are planned or compiled already",
                expected="one that runs in eager mode",
                do="Call fitted.undo(), or leave out model.compile()",
            )
        self._model = weakref.ref(model, lambda _: self._forget())
        self._planner = planner
        """Called once for each new kind of call."""
        self.calls = Calls()
        """Counts of planned and unplanned calls."""
        self._keys = Keys(model)
        """Returns the key of a call: calls with equal keys run by the same plan."""
        self._cache = _PlanCache()
        """The plans so far."""
        self._warned: set[str] = set()
        """Texts of the warnings so far."""
        self._call_outside_of_graph = _graph_breaking_call()
        """Runs a call within a compiled function, outside of Dynamo's graph."""
        self._restore: Callable[[], None] = _torch.set_call(model, self._call)
        """Puts back the module's own call."""
        self._unwatch = _watch_compiler(self)
        """Ends the reports of Dynamo's compilations."""

    def undo(self) -> None:
        """Restore the module's own call. Backward passes of earlier calls still run as planned."""
        self._restore()
        self._forget()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines of the cached plans."""
        return tuple(variant.engine for variant in self._cache.all() if variant.engine is not None)

    def release(self) -> None:
        """Drop all references to tensors of the last call. The next call computes its key and guards from scratch."""
        self._keys.release()
        for variant in self._cache.all():
            if variant.reads is not None:
                variant.reads.release()

    def _forget(self) -> None:
        """Drop all references to the model."""
        self._unwatch()
        self._keys, self._restore, self._planner = Keys(nn.Module()), lambda: None, lambda call, has_gradients: None
        self._cache.clear()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call. Dynamo does not compile it, except for `torch.export`."""
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            return self._call_outside_of_graph(self, *args, **kwargs)
        return self._call_now(*args, **kwargs)

    def _call_now(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call as planned, unless an active trace, transform or mode must see the model's own ops."""
        model = self._model()
        assert model is not None, "the module itself calls this"
        being_planned = getattr(_planning, "modules", ())
        if model in being_planned:
            return model.forward(*args, **kwargs)
        if being_planned or is_capturing() or torch.compiler.is_compiling() or _torch.is_jit_tracing():
            return _torch.original_call(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.calls.without_grad()
            return _torch.original_call(model)(*args, **kwargs)
        reason = _torch.surroundings()
        if reason is None and _torch.is_transformed():
            reason = "it is under a transform of torch.func, such as vmap or grad"
        if reason is not None:
            self._count_unplanned(reason, any(parameter.requires_grad for parameter in model.parameters()))
            return _torch.original_call(model)(*args, **kwargs)
        if _torch.has_hooks(model):
            return _torch.call_with_hooks(model, self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call by its plan, after planning a new kind of call; or unplanned, if the call cannot be planned."""
        model = self._model()
        assert model is not None
        call = call_of(args, kwargs)
        try:
            variant = self._find_or_plan(model, call)
        except UnkeyedError as error:
            variant = _Variant(unplanned=str(error))
        reason = variant.unplanned
        if variant.engine is not None:
            try:
                output = variant.engine.run(model, call)
            except GuardedError as error:  # the guarded value may be random, and differ in each call
                reason = f"{error}, and did not now"
            else:
                self.calls.planned()
                return as_kinds(output, variant.kinds)
        try:
            output = model.forward(*args, **kwargs)
        except BaseException:
            if variant.engine is None:  # a later call with other values may succeed, and can be planned then
                self._cache.drop(variant)
            raise
        output_tensors, _ = take_apart(output)
        needs_gradient = bool(reason) and any(tensor.requires_grad for tensor in output_tensors)
        self._count_unplanned(reason, needs_gradient, above=1)
        return output

    def _count_unplanned(self, reason: str, needs_gradient: bool, *, above: int = 0) -> None:
        """Count a call that runs unplanned, and warn of the reason once. ``above`` is the number of frames between the
        caller and `_call`."""
        if needs_gradient:
            self.calls.unplanned(reason)
            self._warn(f"a call runs unplanned: {reason}", above=above)
        else:
            self.calls.without_grad()

    def prepare(self, call: Call, has_gradients: bool) -> None:
        """Plan a call in advance. ``has_gradients``: whether parameters have gradients when the call begins. Raises
        BudgetError if no plan fits."""
        model = self._model()
        assert model is not None, "a plan is prepared while its module exists"
        with suppress(UnkeyedError), one_at_a_time:  # the call itself will warn
            kind: _Kind = self._keys.key(model, call), has_gradients
            self._cache.add(kind, self._plan(model, call, kind))

    def _find_or_plan(self, model: nn.Module, call: Call) -> _Variant:
        """Return the cached plan of a call, or plan the call; a call without gradients is not planned."""
        key = self._keys.key(model, call)
        kind = key, self._keys.have_gradients()
        variant = self._find_cached(kind, call)
        if variant is not None:
            return variant
        if not any(tensor.requires_grad for tensor in (*self._keys.parameters(), *call.tensors)):
            return _Variant()  # runs unplanned
        with one_at_a_time:
            variant = self._find_cached(kind, call)  # another thread may have planned it
            if variant is None:
                variant = self._plan(model, call, kind)
                self._cache.add(kind, variant)
        return variant

    def _find_cached(self, kind: _Kind, call: Call) -> _Variant | None:
        """Return the cached plan of a call, None if it has to be planned. Raises RecordingError if there are plans for
        too many branches that values of inputs decide."""
        other_branches, moment = list[_Variant](), self._keys.moment
        for variant in self._cache.variants_of(kind):
            if variant.are_reads_unchanged(moment):
                if variant.fits_call(call):
                    self._cache.use(kind, variant)
                    return variant
                other_branches.append(variant)
        if len(other_branches) >= _MAX_VARIANTS:
            raise _too_many_branches(call, tuple(other_branches))
        return None

    def _plan(self, model: nn.Module, call: Call, kind: _Kind) -> _Variant:
        """Plan a call and compile the plan. If either fails, the result says why such calls run unplanned."""
        self._warn_of_changing_argument(call, kind)
        _, has_gradients = kind
        outer = getattr(_planning, "modules", ())
        _planning.modules = (*outer, model)
        try:
            with recording_suspended():
                kinds = output_kinds(model, call)
            # a capture starts from leaves
            leaves = tuple(tensor if tensor.is_leaf else tensor.detach().requires_grad_() for tensor in call.tensors)
            planned = self._planner(replace(call, tensors=leaves), has_gradients)
        except (UnkeyedError, InputError) as error:
            return _Variant(unplanned=str(error), reads=reads_of(error))
        finally:
            _planning.modules = outer
        if planned is None:
            return _Variant()
        reads = planned.captured.reads
        if reads is not None and not reads.are_unchanged():
            changed = f"what forward() reads changed while it was planned: the {reads.differences()[0]}"
            return _Variant(unplanned=changed, reads=reads)
        try:
            functions = None
            if planned.schedule.choices.fused:
                functions = compile_parts(planned.fused or fused(planned.schedule))
            engine = Engine(planned.captured, planned.schedule, functions)
            return _Variant(engine, planned.captured, reads=reads, kinds=kinds)
        except CompileError as error:  # do not end a training of hours because of its last batch
            return _Variant(unplanned=str(error), reads=reads)

    def _warn_of_changing_argument(self, call: Call, kind: _Kind) -> None:
        """Warn of an argument or attribute that changes in each call, so that each call is planned. It is the only
        difference between this call and the calls of `_SIMILAR_PLANS` - 1 cached plans."""
        key, has_gradients = kind
        plans_by_difference = Counter[str | int]()  # the name of an attribute, or the number of an argument's leaf
        for (other_key, other_has_gradients), variants in self._cache.kinds():
            leaves = key.differing_leaves(other_key) if other_has_gradients == has_gradients else None
            if leaves is None:
                continue
            for variant in variants:
                reads = variant.reads
                attributes = [] if reads is None or reads.are_unchanged() else reads.differences()
                differences: list[str | int] = [*attributes, *leaves]
                if len(differences) == 1:
                    plans_by_difference[differences[0]] += 1
        for changing, plans in plans_by_difference.items():
            if plans + 1 < _SIMILAR_PLANS:
                continue
            if isinstance(changing, int):
                name, advice = argument_of(call, changing), "pass that number as a tensor"
            else:
                name = f"the {changing}"
                advice = ("keep what changes all the time in a tensor, registered by register_buffer(), or out of the "
                          "model and its functions")  # fmt: skip
            text = f"{_SIMILAR_PLANS} calls that differ in {name} alone were each planned anew, which takes time"
            self._warn(f"{text}: {advice}", above=3)

    def warn_of_compiler(self, function: str, modules: list[nn.Module]) -> None:
        """Warn if Dynamo inlines the model into the graph of a function: the plan does not run there."""
        model = self._model()
        if any(submodule is model for module in modules for submodule in module.modules()):
            text = f"torch.compile takes {type(model).__name__} into its graph of {function}, without its plan"
            self._warn(f"{text}: leave that function uncompiled, or call fitted.undo()")

    def _warn(self, text: str, *, above: int = 0) -> None:
        """Warn once, at the line of the user's call. ``above``: number of frames between the caller and `_run`."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"memplan: {text}", stacklevel=6 + above)  # 6: from here to the caller of the module


def _watch_compiler(installed: Installed) -> weakref.finalize[..., Installed]:
    """Report each compilation of Dynamo's to ``installed`` while that is alive. Call the result to stop."""
    weak_method = weakref.WeakMethod(installed.warn_of_compiler)

    def report(function: str, modules: list[nn.Module]) -> None:
        """Callback before Dynamo compiles a function that can call these modules."""
        warn = weak_method()
        if warn is not None:
            warn(function, modules)

    stop = weakref.finalize(installed, _torch.before_compiling(report))
    stop.atexit = False
    return stop


@cache
def _graph_breaking_call() -> Callable[..., Any]:
    """Return `Installed._call_now` as a function at which Dynamo breaks the graph, instead of compiling the model."""
    return torch.compiler.disable(
        Installed._call_now,
        reason="memplan: its calls run by its plan, which torch.compile would drop; fitted.undo() takes the plan away",
    )


def _too_many_branches(call: Call, variants: tuple[_Variant, ...]) -> RecordingError:
    """Return the error for a call whose input values decide another branch than in all ``variants``."""
    conditions = (condition for variant in variants if variant.captured for condition in variant.captured.conditions)
    inputs = dict.fromkeys(call.name_of(c.input) for c in conditions if not c.holds(call.tensors))
    return RecordingError(
        f"Values of {', '.join(inputs)} decide what is computed, differently in each call: {len(variants)} plans were "
        "made for calls that differ in nothing else",
        expected="values that decide between few cases, such as whether a mask is all ones",
        do="Compute with tensors: torch.where() for a branch, a count that stays a tensor, without int() or item()",
    )
