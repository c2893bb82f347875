"""Script that queries the real cuDNN in a separate process, as the library can crash or hang. Uses only the stdlib.

Input: a line of JSON with the libraries and the card, then a line for each question. Output: a line of JSON for each of
these, either ``{"plans": [[engine, workspace], ...]}`` or ``{"error": text}``.

The numbers are those of cudnn_graph.h, which are stable between versions. The operation graph is built, and engines are
listed and filtered, as in torch's native/cudnn/Conv_v8.cpp and in the cudnn-frontend that it uses.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

# descriptors: cudnnBackendDescriptorType_t
CONVOLUTION, ENGINE, CONFIG, HEURISTICS, PLAN, GRAPH, TENSOR, DEVICE = 1, 2, 3, 4, 5, 15, 17, 38
# types of attributes: cudnnBackendAttributeType_t, and the type in C
DTYPE, INTEGER, FLOAT, DOUBLE = (1, ctypes.c_int), (3, ctypes.c_int64), (4, ctypes.c_float), (5, ctypes.c_double)
CONVOLUTION_MODE, HEURISTIC_MODE, NOTE = (7, ctypes.c_int), (8, ctypes.c_int), (11, ctypes.c_int)
BEHAVIOR = (19, ctypes.c_int)
DESCRIPTOR, CHARACTER = (15, ctypes.c_void_p), (24, ctypes.c_char)
OPERATIONS = {
    "forward": (10, 700, {"x": 704, "w": 703, "y": 705}),
    "input gradient": (12, 706, {"x": 710, "w": 709, "y": 711}),
    "weight gradient": (11, 712, {"x": 716, "w": 715, "y": 717}),
}
"""Kind -> (descriptor, attribute of alpha, attributes of tensors). Those of beta and the convolution follow alpha's."""
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
TENSOR_CORES, DOWN_CONVERT, NONDETERMINISTIC = 0, 1, 4
RUNTIME_COMPILATION = 0
ERRATA = (
    ("forward", 3, 23, 90800, 91500, None), ("input gradient", 3, 23, 8000, None, None),
    ("forward", None, 5, 92301, 92400, None), ("forward", None, 58, 92300, None, 1200),
    ("input gradient", None, 63, 92300, None, 1200), ("weight gradient", None, 63, 92300, None, 1200),
)  # fmt: skip
"""Engines that torch does not run: (kind, dimensions, engine, first version of cuDNN, version that fixes it, device).

None stands for any. Source: plan_errata_exception in Conv_v8.cpp, with the rules of torch 2.11 and 2.15.
"""
INSTANT, FALLBACK = 0, 2
CROSS_CORRELATION = 1


class BackendError(Exception):
    """A call of cuDNN failed."""


class Backend:
    """The calls of cuDNN's backend API that are needed here. They raise BackendError if cuDNN reports an error."""

    def __init__(self, file: str) -> None:
        self._library = ctypes.CDLL(file)
        for name in ("cudnnGetVersion", "cudnnGetCudartVersion"):
            getattr(self._library, name).restype = ctypes.c_size_t

    def number(self, name: str) -> int:
        """Call a function without arguments that returns a version."""
        return getattr(self._library, name)()

    def create(self, kind: int) -> ctypes.c_void_p:
        """Return an empty descriptor."""
        descriptor = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(descriptor)))
        return descriptor

    def finished(self, kind: int, *attributes: tuple[Any, ...]) -> ctypes.c_void_p:
        """Return a finalized descriptor with these attributes: (number, type, value, ...)."""
        descriptor = self.create(kind)
        try:
            for attribute, (number, plain), *values in attributes:
                array = (plain * len(values))(*values)
                count = ctypes.c_int64(len(values))
                self._check(self._library.cudnnBackendSetAttribute(descriptor, attribute, number, count, array))
            self._check(self._library.cudnnBackendFinalize(descriptor))
        except BackendError:
            self.destroy(descriptor)
            raise
        return descriptor

    def values(self, descriptor: ctypes.c_void_p, attribute: int, kind: tuple[int, Any], limit: int) -> list[Any]:
        """Return the values of an attribute, at most ``limit``."""
        array = (kind[1] * limit)()
        return list(array[: self.fill(descriptor, attribute, kind, array)])

    def fill(self, descriptor: ctypes.c_void_p, attribute: int, kind: tuple[int, Any], array: Any) -> int:
        """Write the values of an attribute to an array (None: write nothing), and return their number."""
        count, limit = ctypes.c_int64(0), ctypes.c_int64(0 if array is None else len(array))
        get = self._library.cudnnBackendGetAttribute
        self._check(get(descriptor, attribute, kind[0], limit, ctypes.byref(count), array))
        return count.value

    def destroy(self, *descriptors: ctypes.c_void_p) -> None:
        """Free descriptors."""
        for descriptor in descriptors:
            self._library.cudnnBackendDestroyDescriptor(descriptor)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(1024))
            raise BackendError(f"cuDNN status {status}: {text.value.decode('utf-8', 'replace').strip()}")


def strides(sizes: Sequence[int], *, channels_last: bool) -> list[int]:
    """Return the strides of a dense tensor with these sizes, contiguous or channels last."""
    spatial = range(len(sizes) - 1, 1, -1)
    order = [1, *spatial, 0] if channels_last else [*spatial, 1, 0]
    dense, stride = [0] * len(sizes), 1
    for axis in order:
        dense[axis] = stride
        stride *= sizes[axis]
    return dense


class Card:
    """Queries cuDNN for a card that is described by its properties."""

    def __init__(self, backend: Backend, properties: dict[str, Any]) -> None:
        self._backend = backend
        description = properties | {"driverVer": backend.number("cudnnGetCudartVersion")}
        text = json.dumps(description).encode() + b"\0"
        self._versions = backend.number("cudnnGetVersion"), properties["deviceVer"]
        self._device = backend.finished(DEVICE, (2702, CHARACTER, *(bytes([byte]) for byte in text)))

    def plans(self, question: dict[str, Any]) -> list[tuple[str, int]]:
        """Return (engine, bytes of workspace) of each plan, in the order in which torch tries them.

        Args:
            question: the fields of `memplan.cudnn.questions.Question`.
        """
        descriptors, plans = list[ctypes.c_void_p](), list[tuple[str, int]]()
        try:
            graph = self._graph(question, descriptors)
            for mode in (INSTANT, FALLBACK):
                self._add_plans(graph, mode, question, plans)
        finally:
            self._backend.destroy(*reversed(descriptors))
        return plans

    def _graph(self, question: dict[str, Any], descriptors: list[ctypes.c_void_p]) -> ctypes.c_void_p:
        """Return the operation graph of the convolution. Its descriptors are appended to ``descriptors``."""

        def finished(kind: int, *attributes: tuple[Any, ...]) -> ctypes.c_void_p:
            descriptors.append(self._backend.finished(kind, *attributes))
            return descriptors[-1]

        dtype = DTYPES[question["dtype"]]
        scale_type = DOUBLE if question["dtype"] == "float64" else FLOAT
        tensors = {
            name: finished(
                TENSOR, (901, DTYPE, dtype), (902, INTEGER, *question[name]),
                (903, INTEGER, *strides(question[name], channels_last=question["channels_last"])),
                (906, INTEGER, ord(name)), (900, INTEGER, alignment),
            )
            for name, alignment in zip("xwy", question["alignments"], strict=True)
        }  # fmt: skip
        compute_dtype = DTYPES["float32"] if question["dtype"] in ("float16", "bfloat16") else dtype
        convolution = finished(
            CONVOLUTION, (100, DTYPE, compute_dtype), (101, CONVOLUTION_MODE, CROSS_CORRELATION),
            (106, INTEGER, len(question["stride"])), (103, INTEGER, *question["stride"]),
            (105, INTEGER, *question["padding"]), (104, INTEGER, *question["padding"]),
            (102, INTEGER, *question["dilation"]),
        )  # fmt: skip
        kind, alpha, names = OPERATIONS[question["kind"]]
        roles = [(names[name], DESCRIPTOR, tensor.value) for name, tensor in tensors.items()]
        operation = finished(
            kind,
            (alpha + 2, DESCRIPTOR, convolution.value),
            *roles,
            (alpha, scale_type, 1.0),
            (alpha + 1, scale_type, 0.0),
        )
        return finished(GRAPH, (801, DESCRIPTOR, operation.value))

    def _add_plans(
        self, graph: ctypes.c_void_p, mode: int, question: dict[str, Any], plans: list[tuple[str, int]]
    ) -> None:
        """Append the plans of the engines that a heuristic of cuDNN lists."""
        backend = self._backend
        try:
            heuristics = backend.finished(
                HEURISTICS, (201, DESCRIPTOR, graph.value), (200, HEURISTIC_MODE, mode),
                (204, DESCRIPTOR, self._device.value),
            )  # fmt: skip
        except BackendError:  # torch continues with the fallbacks, too
            return
        configs = [backend.create(CONFIG) for _ in range(backend.fill(heuristics, 202, DESCRIPTOR, None))]
        array = (ctypes.c_void_p * len(configs))(*(config.value for config in configs))
        count = backend.fill(heuristics, 202, DESCRIPTOR, array) if configs else 0
        for config in configs[:count]:
            engine = self._engine(config, question)
            if engine is not None:
                number, compiled = engine
                # compiling an engine takes seconds, so it is checked only if torch would run it
                if (compiled and plans) or self._is_supported(config):
                    plans.append((f"eng{number}", backend.values(config, 303, INTEGER, 1)[0]))
        backend.destroy(*configs, heuristics)

    def _engine(self, config: ctypes.c_void_p, question: dict[str, Any]) -> tuple[int, bool] | None:
        """Return the number of a configuration's engine, and whether planning compiles it; None if torch skips it."""
        backend = self._backend
        engine = backend.create(ENGINE)
        backend.fill(config, 300, DESCRIPTOR, (ctypes.c_void_p * 1)(engine.value))
        notes, behavior = backend.values(engine, 1303, NOTE, 10), backend.values(engine, 1305, BEHAVIOR, 8)
        number = backend.values(engine, 1301, INTEGER, 1)[0]
        backend.destroy(engine)
        if refused(notes, question) or in_errata(question, number, *self._versions):
            return None
        return number, RUNTIME_COMPILATION in behavior

    def _is_supported(self, config: ctypes.c_void_p) -> bool:
        """Return whether cuDNN can plan this configuration; otherwise torch tries the next."""
        backend = self._backend
        try:
            plan = backend.finished(PLAN, (407, DESCRIPTOR, self._device.value), (401, DESCRIPTOR, config.value))
        except BackendError:
            return False
        backend.destroy(plan)
        return True


def refused(notes: Sequence[int], question: dict[str, Any]) -> bool:
    """Return whether torch skips an engine with these numerical notes. Source: filterEngineConfigs."""
    if DOWN_CONVERT in notes or (question["deterministic"] and NONDETERMINISTIC in notes):
        return True
    return question["dtype"] == "float32" and not question["tf32"] and TENSOR_CORES in notes


def in_errata(question: dict[str, Any], engine: int, version: int, card: int) -> bool:
    """Return whether an engine is in ERRATA for this version of cuDNN and this device version of the card."""
    return any(
        kind == question["kind"] and engine == number and dimensions in (None, len(question["stride"]))
        and first <= version < (end or version + 1) and only in (None, card)
        for kind, dimensions, number, first, end, only in ERRATA
    )  # fmt: skip


def serve(lines: Iterator[str], output: TextIO) -> None:
    """Write an answer for each line of input: the protocol is in the module's docstring."""

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=output, flush=True)

    request = json.loads(next(lines))
    try:
        for file in request["needed"]:
            ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
        backend = Backend(request["file"])
        card = Card(backend, request["card"])
    except (OSError, AttributeError, BackendError) as error:
        answer({"error": str(error)})
        return
    answer({"version": backend.number("cudnnGetVersion")})
    for line in lines:
        try:
            answer({"plans": card.plans(json.loads(line))})
        except BackendError as error:
            answer({"error": str(error)})


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries may print to stdout
    serve(iter(sys.stdin.readline, ""), answers)
