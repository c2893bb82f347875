"""Functions of tensors as fused kernels: traced into core ops, lowered by Inductor.

Seen in torch 2.11, 2.13 and 2.15: ``torch.fx.experimental.proxy_tensor.make_fx``,
``torch._inductor.compile_fx.compile_fx_inner`` and what it reads of an output node (``user_visible_output_idxs``,
``original_output_strides``), ``torch._inductor.decomposition.select_decomp_table``,
``torch._inductor.virtualized.V``, ``torch._guards.TracingContext`` and ``tracing``,
``torch.fx._lazy_graph_module._LazyGraphModule``,
``torch.fx.experimental.symbolic_shapes.ShapeEnv``, ``GraphLowering.codegen`` and ``GraphLowering.compile_to_module`` in
``torch._inductor.graph``, ``torch._inductor.async_compile.AsyncCompile``, the names in the code that is written
(``call``, ``empty_strided_cpu``, ``reinterpret_tensor``, ``assert_size_stride``; of code for a card
``empty_strided_cuda``, ``copy_if_misaligned``, ``get_raw_stream`` which is ``torch._C._cuda_getCurrentRawStream``,
``device``, ``torch.cuda._DeviceGuard``, ``start_graph`` and ``end_graph``), ``set_stack_trace`` and
``preserve_node_meta`` in ``torch.fx.traceback``, ``torch._inductor.exc`` and
``torch._inductor.cpp_builder.get_cpp_compiler``, ``torch.utils._triton.has_triton``. Seen in 2.11, 2.13 and 2.14:
``constants`` and ``torchbind_constants``
of ``GraphLowering``, ``write`` and ``load_by_key_path`` of ``torch._inductor.codecache.PyCodeCache``. Seen in 2.13 and
2.15, and in 2.11 of no use for ops that draw:
``preserve_node_ordering`` and ``control_deps_autograd`` in ``torch._inductor.fx_passes.control_dependencies``.
"""

from __future__ import annotations

import builtins
import copy
import gc
import importlib
import itertools
import logging
import operator
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._triton import has_triton

from memplan._patched import patched_throughout
from memplan._torch.compiled import tune_in_reserved_memory
from memplan._torch.early_reads import to_compute_first
from memplan._torch.engine import without_autocast
from memplan._torch.patches import only_in_this_thread, patched
from memplan._torch.scheduled import MARK, Kernel, kernels_recorded
from memplan._torch.tensors import is_random, storage_key

Boxed = Callable[[list[Any]], Sequence[Tensor]]
"""Empties the list of its arguments, so that each can be freed after its last use."""

_COPY = torch.ops.aten.copy_.default
_inductor_lock = threading.RLock()
"""Held while functions of Inductor are replaced."""


@dataclass(frozen=True, eq=False)
class Lowerable:
    """A function of tensors as a graph of core ops."""

    graph: fx.GraphModule
    examples: tuple[Tensor, ...]
    """Arguments without data."""
    mode: Any
    """The fake mode of the examples."""
    backward: bool
    """Whether it belongs to the backward pass, which Inductor fuses differently."""

    @cached_property
    def code(self) -> Code:
        """The code that Inductor generates for the graph. Cached: lowering takes seconds, and planning and running need
        the code."""
        return _generate_code(self)


@dataclass(frozen=True)
class Traced:
    """A function as core ops, none of which changes its arguments."""

    graph: fx.GraphModule
    mode: Any
    written: tuple[int, ...]
    """Indices of arguments that the function copies into; the copied values follow its results."""


def fake_mode() -> Any:
    """Return a fake mode with an empty `ShapeEnv`, without which Inductor caches nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, mode: Any, place: str = "cpu"
) -> Tensor:
    """Return a fake tensor on device ``place``. For a card, torch has to be built with CUDA: other builds abort once
    the tensor requires a gradient."""
    with mode:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=place)


def traced(
    function: Callable[..., Sequence[Tensor]],
    examples: Sequence[Tensor],
    mode: Any,
    own: Mapping[Any, Callable[..., Any]],
) -> Traced:
    """Trace a function of tensors into the core ops that Inductor lowers to kernels.

    A copy into an argument is removed from the graph; the copied value becomes a further result (`Traced.written`).

    Args:
        function: takes and returns tensors. It may copy into its arguments.
        examples: fake tensors of ``mode``.
        mode: of `fake_mode`.
        own: op -> decomposition, besides Inductor's; returning NotImplemented leaves the op as it is.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    for module in ("compile_fx", "lowering"):  # some decompositions use these modules without importing them
        importlib.import_module(f"torch._inductor.{module}")
    with _inductor_settings(), mode, traceback.preserve_node_meta():
        graph = make_fx(function, decomposition_table={**select_decomp_table(), **own})(*examples)
    nodes = list(graph.graph.nodes)
    inputs, output = [node for node in nodes if node.op == "placeholder"], nodes[-1]
    copied_values: dict[int, Any] = {}  # by index of the argument
    for node in nodes:
        if node.op == "call_function" and node.target is _COPY and node.args[0] in inputs:
            argument, value = node.args[:2]
            copied_values[inputs.index(argument)] = value
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
    output.args = ((*output.args[0], *copied_values.values()),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Traced(graph, mode, tuple(copied_values))


def decomposition(op: Any) -> Callable[..., Any] | None:
    """Return Inductor's decomposition of an op, or None."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table().get(op)


def mark(number: int) -> None:
    """Mark all ops traced from now on with a number, which `Origin.mark` has for the ops of a kernel."""
    # As a stack trace, the only metadata of a node that every graph pass copies to new nodes.
    traceback.set_stack_trace([f"{MARK}{number}"])


def inputs_ops_results(of: Traced) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Return the nodes of a traced function: (arguments, ops, results). The results end with the new values of the
    arguments that it writes."""
    nodes = list(of.graph.graph.nodes)
    results: Any = nodes[-1].args[0]
    inputs = [node for node in nodes if node.op == "placeholder"]
    return inputs, [node for node in nodes if node.op not in ("placeholder", "output")], list(results)


def read_by(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the inputs of `nodes` that are not among `nodes`, in the order of their first use."""
    own = set(nodes)
    return list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in own))


def readers(nodes: Sequence[fx.Node], of: Collection[fx.Node]) -> list[fx.Node]:
    """Return the ops among ``nodes`` that read the storage of any node in ``of``, and the `getitem` nodes of their
    results."""
    storages = {_memory(node) for node in of}
    reading = [node for node in nodes if any(_memory(operand) in storages for operand in node.all_input_nodes)]
    return [*reading, *(user for node in reading for user in node.users if user.target is operator.getitem)]


def _memory(node: fx.Node) -> int | None:
    """Return the key of the storage of a node's value, or None if the value is no tensor."""
    value = node.meta.get("val")
    return storage_key(value.untyped_storage()) if isinstance(value, Tensor) else None


def lowerable(
    of: Traced, nodes: Sequence[fx.Node], makes: Sequence[fx.Node], freed: Collection[fx.Node] = (), *, backward: bool
) -> Lowerable:
    """Copy some ops of a traced function into a separate graph for Inductor to lower. The graph's arguments are the
    inputs of the ops (`read_by`).

    Args:
        of: the traced function.
        nodes: ops to compute, in this order.
        makes: ops among ``nodes`` whose values the new function returns.
        freed: arguments that can be freed after their last use; a backward pass orders its ops to free them early.
        backward: see `Lowerable`.
    """
    graph, twins, operands = fx.Graph(), dict[fx.Node, fx.Node](), read_by(nodes)
    for node in operands:
        twins[node] = graph.placeholder(node.name)
        twins[node].meta = dict(node.meta)
    for node in nodes:
        twins[node] = graph.node_copy(node, lambda operand: twins[operand])
    results = tuple(twins[node] for node in makes)
    output = graph.output(results)
    # results keep the layouts of the traced graph, which their readers expect
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    output.meta["original_output_strides"] = [tuple(result.meta["val"].stride()) for result in results]
    module = _LazyGraphModule(of.graph, graph)  # whose own Python code nobody calls
    _keep_order(module, to_compute_first(graph, [twins[node] for node in freed]) if backward else {})
    return Lowerable(module, tuple(node.meta["val"] for node in operands), of.mode, backward)


def _keep_order(module: fx.GraphModule, first: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Add control dependencies, since Inductor orders ops by memory and fusion alone.

    Each op that draws random numbers runs after the one before it, else it would draw the other's numbers; each key
    of ``first`` runs after the ops in its value.
    """
    from torch._inductor.fx_passes import control_dependencies
    from torch.utils._ordered_set import OrderedSet

    drawing = [node for node in module.graph.nodes if is_random(node.target, node.args, node.kwargs)]
    waits = {node: OrderedSet([before]) for before, node in pairwise(drawing)}
    waits |= {node: OrderedSet(nodes) for node, nodes in first.items()}
    if waits and hasattr(control_dependencies, "control_deps_autograd"):
        in_graph_order = {node: waits[node] for node in module.graph.nodes if node in waits}
        control_dependencies.preserve_node_ordering(module.graph, in_graph_order)
        module.recompile()


@dataclass(frozen=True)
class Code:
    """Code that Inductor generates for a function."""

    text: str
    """The Python code that calls the kernels, and the kernels' sources. Empty if nothing is computed."""
    kernels: tuple[Kernel, ...] | None
    """The kernels in call order; None if memplan cannot read them from this version of Inductor."""
    function: Boxed
    """Function that runs the kernels."""
    deferred: tuple[_DeferredModule, ...]
    """The modules of the text, each compiled by `_DeferredModule.compiled`."""


class _DeferredModule:
    """Generated code that is compiled at its first call, or earlier by `compiled`."""

    def __init__(self, text: str, constants: Mapping[str, Any]) -> None:
        self.text = text
        self._constants = constants
        self._function: Boxed | None = None
        """None before it is compiled."""

    def compiled(self) -> Boxed:
        """Return the compiled function; kernels compiled by an earlier process come from Inductor's cache on disk."""
        from torch._inductor.codecache import PyCodeCache

        function = self._function
        if function is None:
            module: Any = PyCodeCache.load_by_key_path(*PyCodeCache.write(self.text), attrs=dict(self._constants))
            tune_in_reserved_memory(module)
            function = self._function = module.call
        return function

    def call(self, arguments: list[Any]) -> Sequence[Tensor]:
        """Run the compiled function: Inductor calls this as it would call that of a compiled module."""
        return self.compiled()(arguments)


def code_of(part: Lowerable) -> Code:
    """Return the code that Inductor generates for a function, generated once and without compiling a kernel."""
    with _inductor_lock:
        return part.code


def kernels_of(part: Lowerable) -> Boxed:
    """Compile the kernels of a function, and return the function that runs them."""
    code = code_of(part)
    for module in code.deferred:
        module.compiled()
    return code.function


def _generate_code(part: Lowerable) -> Code:
    """Lower a function, and collect the text of each module instead of compiling it: planning needs the code and its
    kernels' sizes, not the compiled kernels."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    modules, compile_to_module = list[_DeferredModule](), GraphLowering.compile_to_module

    def defer_compilation(self: Any) -> Any:
        """Replace ``GraphLowering.compile_to_module``: generate a module's text, and compile it later."""
        modules.append(_DeferredModule(self.codegen()[0].value, {**self.constants, **self.torchbind_constants}))
        return modules[-1]

    with (
        patched(GraphLowering, compile_to_module=only_in_this_thread(defer_compilation, compile_to_module)),
        config.patch(fx_graph_cache=False),
        kernels_recorded() as record,
    ):
        function = _lower(part)
    return Code("".join(module.text for module in modules), record.kernels, function, tuple(modules))


def _lower(part: Lowerable) -> Any:
    """Run Inductor on a function's graph and return the function that calls the kernels."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    graph = copy.deepcopy(part.graph)  # lowering rewrites it
    with _inductor_settings(), V.set_fake_mode(part.mode), tracing(TracingContext(part.mode)):
        compiled = compile_fx_inner(graph, list(part.examples), is_backward=part.backward)
    del graph
    gc.collect()  # lowering leaves millions of objects in cycles, and during planning Python's collector is off
    return compiled


@contextmanager
def _eager_random_numbers() -> Iterator[None]:
    """Make compiled code draw the random numbers of eager mode: by the same kernels from the same state.

    In versions without control dependencies (torch 2.11) only a fixed op order keeps random draws in order, so no op
    may be moved; nor may a layout change, since numbers are drawn in the order of memory.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import control_dependencies

    settings: dict[str, Any] = {"fallback_random": True}
    if not hasattr(control_dependencies, "control_deps_autograd"):
        settings |= {"reorder_for_peak_memory": False, "layout_optimization": False}
    with config.patch(settings):
        yield


@contextmanager
def _inductor_settings() -> Iterator[None]:
    """Settings of Inductor for code whose memory follows a plan, and random numbers as in eager mode."""
    from torch._inductor import config

    settings: dict[str, Any] = {
        "layout_optimization": False,  # tensors keep the layouts of the trace
        "allow_buffer_reuse": False,  # dead buffers are freed, not kept for a later one
        # A value computed from more than two others is written to memory. Inductor's own threshold is four: up to
        # there each reader recomputes the value, which keeps all its operands alive (the sums of a residual stream).
        # With a threshold of one, one of nine nets takes less memory, and most move some percent more bytes.
        "realize_reads_threshold": 2,
        "triton.cudagraphs": False,  # each CUDA graph has a memory pool of its own
    }
    # The traced graph contains autocast's casts; autocast would add more, and mislead lowering about dtypes.
    with _eager_random_numbers(), config.patch(settings), without_autocast():
        yield


def is_of_compiler(error: Exception) -> bool:
    """Return whether Triton or Inductor raised the error, for example as it cannot compile a kernel for this card."""
    return type(error).__module__.startswith(("triton.", "torch._inductor."))


def is_of_other_layout(error: AssertionError) -> bool:
    """Return whether generated code failed its size and stride assertion on the result of an op."""
    return "expected size" in str(error)  # the message of assert_size_stride


def without_kernels(part: Lowerable, code: str) -> Boxed:
    """Return generated code as a function of fake tensors that allocates and frees as on the device, so that its memory
    can be recorded, and whose kernels do nothing."""
    if not code:
        return lambda arguments: part.graph(*arguments)
    run_code: Boxed = _loaded_without_kernels(code, {})["call"]

    def call(arguments: list[Any]) -> Sequence[Tensor]:
        # fake tensors need no device selected
        guard = only_in_this_thread(lambda _: nullcontext(), torch.cuda._DeviceGuard)
        with patched(torch.cuda, _DeviceGuard=guard):
            return run_code(arguments)

    return call


Launched = Callable[[str, Sequence[Tensor]], None]
"""Called with each kernel launch of generated code: the kernel's name, and the tensors that it reads and writes."""


PlaceOf = Callable[[Sequence[Any]], str]
"""Returns where generated code with these arguments allocates its buffers: "cpu" or "cuda"."""


def code_without_kernels(graph: Any, launched: Launched, place_of: PlaceOf) -> Any:
    """Return a replacement for the module that ``GraphLowering.compile_to_module`` returns for a graph on the CPU.

    Its ``call`` runs the code that Inductor generates on fake tensors: it allocates and frees the buffers. Instead of
    launching a kernel it calls ``launched``. ``place_of`` returns the device of the buffers.
    """
    namespace = _loaded_without_kernels(graph.codegen()[0].value, graph.constants | graph.torchbind_constants)
    for name in list(namespace):
        fused = _FUSED.match(name)
        if fused is not None:
            namespace[name] = _Kernel(f"inductor.{fused[1]}", launched)
    namespace["extern_kernels"] = _ExternKernels(namespace["extern_kernels"], launched)
    run = namespace["call"]

    def call(arguments: list[Any]) -> Sequence[Tensor]:
        """Run the generated code, with buffers on the device of its arguments."""
        namespace["empty_strided_cpu"] = partial(_empty_strided, place_of(arguments))
        return run(arguments)

    return SimpleNamespace(call=call, __file__="<fused code>")


def _loaded_without_kernels(code: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a generated module with its kernels and assertions replaced by no-ops, and the helpers that Inductor
    writes in C++ by equivalents for fake tensors; return its names."""
    imports = vars(builtins) | {"__import__": _import_without_kernels}
    namespace: dict[str, Any] = {"__builtins__": imports, **constants}
    exec(compile(code, "<fused code>", "exec"), namespace)
    namespace |= {name: _nothing for name in namespace if name.startswith("assert_")}
    namespace |= {
        "empty_strided_cpu": partial(_empty_strided, "cpu"),
        "empty_strided_cuda": partial(_empty_strided, "cuda"),
        "reinterpret_tensor": _reinterpreted,
        "copy_if_misaligned": lambda tensor: tensor,
        "get_raw_stream": _nothing,
        "device": lambda type, index=None: torch.device(type),  # the card's index does not matter
    }
    return namespace  # the functions of the code look names up in it


def _empty_strided(place: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=place)


class _Idle:
    """No-op replacement for kernels and the functions that compile them: each call and attribute returns itself."""

    def __call__(self, *_: Any, **__: Any) -> _Idle:
        return self

    def __getattr__(self, name: str) -> _Idle:
        return self


_FUSED = re.compile(r"(?:cpp|triton_[a-z]+)_(fused_\w+?)(?:_\d+)?$")
"""Matches the name of a kernel that Inductor generated; the group is the name without the backend and number."""


class _Kernel:
    """Replaces a kernel that Inductor generated: reports each launch."""

    def __init__(self, name: str, launched: Launched) -> None:
        self._name, self._launched = name, launched

    def __call__(self, *args: Any, **_: Any) -> None:
        self._launched(self._name, [arg for arg in args if isinstance(arg, Tensor)])

    run = __call__
    """Generated code launches Triton kernels by this method."""


class _ExternKernels:
    """Wraps ``extern_kernels``: torch's own kernels run, and each launch is reported with its output buffer."""

    def __init__(self, kernels: Any, launched: Launched) -> None:
        self._kernels, self._launched = kernels, launched

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            if "out" in kwargs:
                self._launched(f"aten.{name}.out", [kwargs["out"]])
            return result

        return call


_NOT_CALLED = {
    "torch._inductor.async_compile": SimpleNamespace(AsyncCompile=_Idle),
    "torch._C": SimpleNamespace(_cuda_getCurrentRawStream=_Idle()),  # other names in there are imported
    "torch._inductor.runtime.triton_heuristics": SimpleNamespace(start_graph=_Idle(), end_graph=_Idle()),
    "triton": SimpleNamespace(language=_Idle()),
    "triton.language": SimpleNamespace(language=_Idle()),
}
"""Module -> replacements for the names that generated code imports to run its kernels."""


def _import_without_kernels(name: str, *rest: Any, **more: Any) -> Any:
    """Import as `__import__` does, but return the module's replacement if that has all imported names."""
    replacement = _NOT_CALLED.get(name)
    if replacement is not None and all(hasattr(replacement, imported) for imported in rest[2] or ()):
        return replacement
    return builtins.__import__(name, *rest, **more)


def _reinterpreted(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """View a tensor's memory, from ``offset`` elements after its beginning."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*_: Any, **__: Any) -> None: ...


_numbers = itertools.count()


def compiled_as_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `torch.compile` with the usual settings, but with the random numbers of eager mode, so
    that results can be compared. (In torch 2.11 this also fixes the layouts of eager mode.)"""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # Dynamo runs a code object in eager mode from its ninth compilation on, so each function gets its own code object.
    code = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    compiled: Any = torch.compile(FunctionType(code, run.__globals__, closure=run.__closure__))

    def call(*args: Any, **kwargs: Any) -> Any:
        # torch logs ops that fail on fake tensors: the error is raised, too
        silenced = patched_throughout(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
        with _eager_random_numbers(), silenced:
            return compiled(*args, **kwargs)

    return call


def card_compiler_misses(place: str) -> str | None:
    """Return why Triton, Inductor's compiler for cards, cannot compile for a card (``place``: "cuda:0"), or None."""
    if not has_triton():
        major, minor = torch.cuda.get_device_capability(place)
        if major < _TRITON_SINCE:
            return f"the card has compute capability {major}.{minor}, and Triton begins with {_TRITON_SINCE}.0"
        return "no package triton was found that works"
    if os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))):  # as triton.runtime.build looks for it
        return None
    return "no C compiler was found for Triton: gcc, clang, or what the environment's CC names"


_TRITON_SINCE = 7


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call, or None."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return None
