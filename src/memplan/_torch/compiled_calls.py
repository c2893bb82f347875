"""`torch.compile` on fake tensors: Dynamo, AOTAutograd and Inductor work as in a real run, but compile no kernel.

Inductor's generated code runs without its kernels (`memplan._torch.inductor`): it allocates and frees its buffers, and
calls torch's own kernels, as in a real run.

Seen in torch 2.13: ``_callback_from_stance`` and ``_maybe_set_eval_frame`` of ``torch._dynamo.eval_frame``, which a
compiled function calls as it begins, and the second again as it ends; ``SKIP_DIRS`` and ``_recompile_re`` of
``torch._dynamo.trace_rules``; ``_compile_fx_inner`` of ``torch._inductor.compile_fx``; ``compile_to_module`` of
``GraphLowering``; ``_compile`` of ``torch._dynamo.convert_frame``, whose first argument is a code object;
``reset_code`` of ``torch._C._dynamo.eval_frame``; ``pick_vec_isa`` and ``InvalidVecISA``
of ``torch._inductor.cpu_vec_isa``; ``get_cpp_compiler`` of ``torch._inductor.cpp_builder``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from memplan._patched import patched_throughout
from memplan._torch.inductor import Launched, PlaceOf, code_without_kernels
from memplan._torch.patches import only_in_this_thread

_PACKAGE = Path(__file__).resolve().parents[1]


@contextmanager
def compiled_without_kernels(
    around_call: Callable[[], AbstractContextManager[None]],
    around_disabled: Callable[[], AbstractContextManager[None]],
    around_compiling: Callable[[], AbstractContextManager[None]],
    launched: Launched,
    place_of: PlaceOf,
) -> Iterator[None]:
    """Run compiled functions and modules by the code that Inductor generates for them, without its kernels.

    Args:
        around_call: returns the context of the outermost call of a compiled function. Torch must be unpatched there:
            Dynamo traces torch's own functions, and its guards compare them.
        around_disabled: returns the context of a nested call of a function that Dynamo does not trace, such as the
            hooks of sharded modules and AOTAutograd's own.
        around_compiling: returns the context in which Inductor lowers a graph.
        launched: called where the code would launch a kernel.
        place_of: returns the device on which a function with these arguments allocates.
    """
    with ExitStack() as stack:
        enter_inductor = functools.cache(  # by the first call of a compiled function
            lambda: stack.enter_context(_inductor_without_kernels(around_compiling, launched, place_of))
        )

        @contextmanager
        def around() -> Iterator[None]:
            """The context of an outermost call of a compiled function."""
            with around_call(), warnings.catch_warnings():
                enter_inductor()
                warnings.simplefilter("ignore")  # Dynamo warns of tensors without data
                yield

        with around_compiled_calls(around, around_disabled):
            yield


@contextmanager
def around_compiled_calls(
    around: Callable[[], AbstractContextManager[None]],
    around_disabled: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Enter ``around()`` around each outermost call of a function that `torch.compile` compiled, compilation included;
    and ``around_disabled()`` around nested calls of functions that Dynamo does not trace."""
    from torch._dynamo import convert_frame, eval_frame  # imported already by any optimizer or fake mode

    call = _OutermostCall(eval_frame, around, around_disabled)
    compile_frame = convert_frame._compile

    def compile_noted(*args: Any, **kwargs: Any) -> Any:
        """Replace Dynamo's ``_compile``: note that Dynamo is compiling meanwhile."""
        with call.compiling():
            return compile_frame(*args, **kwargs)

    try:
        with (
            patched_throughout(eval_frame, **call.replacements()),
            patched_throughout(convert_frame, _compile=only_in_this_thread(compile_noted, compile_frame)),
        ):
            yield
    finally:
        call.end()


@contextmanager
def _inductor_without_kernels(
    around_compiling: Callable[[], AbstractContextManager[None]], launched: Launched, place_of: PlaceOf
) -> Iterator[None]:
    """Lower graphs to code that runs without kernels; at the end, Dynamo's cache of the compiled functions is reset."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import convert_frame, trace_rules
    from torch._functorch import config as functorch_config

    # importing these takes seconds, for which a step that compiles nothing does not wait
    from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa
    from torch._inductor.graph import GraphLowering

    compile_frame, lower = convert_frame._compile, compile_fx._compile_fx_inner
    to_module, dispatch = GraphLowering.compile_to_module, FakeTensorMode.__torch_dispatch__
    no_vectors = cpu_vec_isa.InvalidVecISA()  # to know a processor's instructions, Inductor runs a C++ compiler
    codes = list[CodeType]()

    def compile_and_note(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        """Replace Dynamo's ``_compile``: note the code that it compiles."""
        codes.append(code)
        return compile_frame(code, *args, **kwargs)

    def lower_unseen(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Replace Inductor's ``_compile_fx_inner``: lower a graph for the CPU, in the context
        ``around_compiling()``."""
        with around_compiling():
            return lower(_for_host(graph), *args, **kwargs)

    def dispatch_for_host(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch an op on fake tensors with the CPU in place of a card."""
        return dispatch(self, func, types, args, map_aggregate(kwargs or {}, _host_for_card))

    def write_without_kernels(graph: Any) -> Any:
        """Replace ``GraphLowering.compile_to_module``: return code without kernels."""
        return code_without_kernels(graph, launched, place_of)

    try:
        with (
            # memplan's own functions run under a compiled one, as the mode that records
            patched_throughout(trace_rules, SKIP_DIRS=[*trace_rules.SKIP_DIRS, f"{_PACKAGE}/"]),
            config.patch(fx_graph_cache=False, max_autotune=False, max_autotune_gemm=False),
            patched_throughout(
                cpu_vec_isa, pick_vec_isa=only_in_this_thread(lambda: no_vectors, cpu_vec_isa.pick_vec_isa)
            ),
            patched_throughout(
                cpp_builder, get_cpp_compiler=only_in_this_thread(lambda: "g++", cpp_builder.get_cpp_compiler)
            ),
            functorch_config.patch(enable_autograd_cache=False),
            patched_throughout(convert_frame, _compile=only_in_this_thread(compile_and_note, compile_frame)),
            patched_throughout(FakeTensorMode, __torch_dispatch__=dispatch_for_host),
            patched_throughout(compile_fx, _compile_fx_inner=only_in_this_thread(lower_unseen, lower)),
            patched_throughout(GraphLowering, compile_to_module=only_in_this_thread(write_without_kernels, to_module)),
        ):
            trace_rules._recompile_re()
            yield
    finally:
        trace_rules._recompile_re()
        for code in dict.fromkeys(codes):  # the compiled code is for fake tensors, without kernels
            reset_code(code)


def _host_for_card(value: Any) -> Any:
    """Return the CPU instead of a CUDA device; other values unchanged."""
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _for_host(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace the card by the CPU where a graph names it."""
    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _host_for_card)
    return graph


class _OutermostCall:
    """Enters a context as the outermost compiled function begins, and exits it as that function ends."""

    def __init__(
        self,
        eval_frame: Any,
        around: Callable[[], AbstractContextManager[None]],
        around_disabled: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._callback_from_stance = eval_frame._callback_from_stance
        self._maybe_set_eval_frame = eval_frame._maybe_set_eval_frame
        """Dynamo's own functions, which `_find_callback` and `_set_callback` replace."""
        self._around, self._around_disabled = around, around_disabled
        self._frame: FrameType | None = None
        """Frame of the outermost compiled function, while it runs."""
        self._callback: Any = None
        """Dynamo's callback for that function."""
        self._context = ExitStack()
        """Holds ``around()`` while that function runs."""
        self._disabled: FrameType | None = None
        """Frame of the outermost nested function that Dynamo does not trace."""
        self._disabled_runs = False
        """Whether that function has set its callback, and now runs."""
        self._disabled_context = ExitStack()
        """Holds ``around_disabled()`` while that function runs."""
        self._compilations = 0
        """Number of nested contexts of `compiling`."""

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of ``torch._dynamo.eval_frame`` to replace, with their replacements."""
        return {
            "_callback_from_stance": only_in_this_thread(self._find_callback, self._callback_from_stance),
            "_maybe_set_eval_frame": only_in_this_thread(self._set_callback, self._maybe_set_eval_frame),
        }

    def _find_callback(self, wrapped: Any) -> Any:
        """Replace ``_callback_from_stance``, which each function that `torch.compile` or Dynamo's ``disable`` wraps
        calls first: return Dynamo's callback for that function.

        The outermost compiled function has a callable callback and enters ``around()``; in it, the outermost function
        that Dynamo does not trace has none and enters ``around_disabled()``.
        """
        callback = self._callback_from_stance(wrapped)
        if self._frame is None and callable(callback):
            self._frame, self._callback = sys._getframe(2), callback
            self._context.enter_context(self._around())
        elif self._frame is not None and self._disabled is None and not callback and not self._compilations:
            self._disabled, self._disabled_runs = sys._getframe(2), False
            self._disabled_context.enter_context(self._around_disabled())
        return callback

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within this context Dynamo compiles: functions that it does not trace are Dynamo's own, and are ignored."""
        self._compilations += 1
        try:
            yield
        finally:
            self._compilations -= 1

    def _set_callback(self, callback: Any) -> Any:
        """Replace ``_maybe_set_eval_frame``: exit the context of a function that ends. Returns the callback that was
        set before.

        Wrapped functions call it before they run, and again as they end, to restore the callback that was set before.
        """
        before = self._maybe_set_eval_frame(callback)
        frame = sys._getframe(2)
        if self._frame is frame and callback is not self._callback:
            self.end()
        elif self._disabled is frame:
            if self._disabled_runs:
                self._disabled = None
                self._disabled_context.close()
            self._disabled_runs = True
        return before

    def end(self) -> None:
        self._disabled = None
        self._disabled_context.close()
        self._frame = self._callback = None
        self._context.close()
