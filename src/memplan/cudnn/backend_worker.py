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
# types of attributes: (cudnnBackendAttributeType_t, the type in C)
DTYPE, INTEGER, FLOAT, DOUBLE = (1, ctypes.c_int), (3, ctypes.c_int64), (4, ctypes.c_float), (5, ctypes.c_double)
CONVOLUTION_MODE, HEURISTIC_MODE, NOTE = (7, ctypes.c_int), (8, ctypes.c_int), (11, ctypes.c_int)
BEHAVIOR = (19, ctypes.c_int)
DESCRIPTOR, CHARACTER = (15, ctypes.c_void_p), (24, ctypes.c_char)
# attributes: cudnnBackendAttributeName_t
COMPUTE_TYPE, MODE, DILATIONS, STRIDES, POST_PADDINGS, PRE_PADDINGS, SPATIAL_DIMS = 100, 101, 102, 103, 104, 105, 106
HEURISTIC, HEURISTIC_GRAPH, HEURISTIC_RESULTS, HEURISTIC_DEVICE = 200, 201, 202, 204
CONFIG_ENGINE, CONFIG_WORKSPACE, PLAN_CONFIG, PLAN_DEVICE, GRAPH_OPERATIONS = 300, 303, 401, 407, 801
TENSOR_ALIGNMENT, TENSOR_DTYPE, TENSOR_SIZES, TENSOR_STRIDES, TENSOR_ID = 900, 901, 902, 903, 906
ENGINE_NUMBER, ENGINE_NOTES, ENGINE_BEHAVIOR, DEVICE_JSON = 1301, 1303, 1305, 2702
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
        """Load cuDNN from the path of its shared library."""
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
        """Return a finalized descriptor with these attributes: (number, (number of the type, type in C), value,
        ...)."""
        descriptor = self.create(kind)
        try:
            for attribute, (type_number, c_type), *values in attributes:
                array = (c_type * len(values))(*values)
                count = ctypes.c_int64(len(values))
                self._check(self._library.cudnnBackendSetAttribute(descriptor, attribute, type_number, count, array))
            self._check(self._library.cudnnBackendFinalize(descriptor))
        except BackendError:
            self.destroy(descriptor)
            raise
        return descriptor

    def values(self, descriptor: ctypes.c_void_p, attribute: int, kind: tuple[int, Any], limit: int) -> list[Any]:
        """Return the values of an attribute, at most ``limit``. ``kind``: (number of the type, type in C)."""
        c_type = kind[1]
        array = (c_type * limit)()
        return list(array[: self.fill(descriptor, attribute, kind, array)])

    def fill(self, descriptor: ctypes.c_void_p, attribute: int, kind: tuple[int, Any], array: Any) -> int:
        """Write the values of an attribute to an array (None: write nothing), and return their number.

        ``kind``: (number of the type, type in C).
        """
        count, limit = ctypes.c_int64(0), ctypes.c_int64(0 if array is None else len(array))
        get = self._library.cudnnBackendGetAttribute
        self._check(get(descriptor, attribute, kind[0], limit, ctypes.byref(count), array))
        return count.value

    def destroy(self, *descriptors: ctypes.c_void_p) -> None:
        """Free descriptors."""
        for descriptor in descriptors:
            self._library.cudnnBackendDestroyDescriptor(descriptor)

    def _check(self, status: int) -> None:
        """Raise BackendError unless a call of cuDNN returned 0."""
        if status:
            text = ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(1024))
            raise BackendError(f"cuDNN status {status}: {text.value.decode('utf-8', 'replace').strip()}")


def strides(sizes: Sequence[int], *, channels_last: bool) -> list[int]:
    """Return the strides of a dense tensor with these sizes, contiguous or channels last."""
    spatial = range(len(sizes) - 1, 1, -1)
    inner_to_outer = [1, *spatial, 0] if channels_last else [*spatial, 1, 0]
    dense, stride = [0] * len(sizes), 1
    for dim in inner_to_outer:
        dense[dim] = stride
        stride *= sizes[dim]
    return dense


class Card:
    """Queries cuDNN for a card that is described by its properties."""

    def __init__(self, backend: Backend, properties: dict[str, Any]) -> None:
        """Describe a card to cuDNN. ``properties``: as `memplan.cudnn.described_card.properties` returns them."""
        self._backend = backend
        description = properties | {"driverVer": backend.number("cudnnGetCudartVersion")}
        text = json.dumps(description).encode() + b"\0"
        self._versions = backend.number("cudnnGetVersion"), properties["deviceVer"]
        """Version of cuDNN, and that of its device descriptions."""
        self._device = backend.finished(DEVICE, (DEVICE_JSON, CHARACTER, *(bytes([byte]) for byte in text)))

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
                TENSOR, (TENSOR_DTYPE, DTYPE, dtype), (TENSOR_SIZES, INTEGER, *question[name]),
                (TENSOR_STRIDES, INTEGER, *strides(question[name], channels_last=question["channels_last"])),
                (TENSOR_ID, INTEGER, ord(name)), (TENSOR_ALIGNMENT, INTEGER, alignment),
            )
            for name, alignment in zip("xwy", question["alignments"], strict=True)
        }  # fmt: skip
        compute_dtype = DTYPES["float32"] if question["dtype"] in ("float16", "bfloat16") else dtype
        convolution = finished(
            CONVOLUTION, (COMPUTE_TYPE, DTYPE, compute_dtype), (MODE, CONVOLUTION_MODE, CROSS_CORRELATION),
            (SPATIAL_DIMS, INTEGER, len(question["stride"])), (STRIDES, INTEGER, *question["stride"]),
            (PRE_PADDINGS, INTEGER, *question["padding"]), (POST_PADDINGS, INTEGER, *question["padding"]),
            (DILATIONS, INTEGER, *question["dilation"]),
        )  # fmt: skip
        kind, alpha, tensor_attributes = OPERATIONS[question["kind"]]
        beta, convolution_attribute = alpha + 1, alpha + 2  # the numbers of these attributes follow alpha's
        operands = [(tensor_attributes[name], DESCRIPTOR, tensor.value) for name, tensor in tensors.items()]
        operation = finished(
            kind,
            (convolution_attribute, DESCRIPTOR, convolution.value),
            *operands,
            (alpha, scale_type, 1.0),
            (beta, scale_type, 0.0),
        )
        return finished(GRAPH, (GRAPH_OPERATIONS, DESCRIPTOR, operation.value))

    def _add_plans(
        self, graph: ctypes.c_void_p, mode: int, question: dict[str, Any], plans: list[tuple[str, int]]
    ) -> None:
        """Append to ``plans`` the (engine, bytes of workspace) of the engines that a heuristic of cuDNN lists.

        ``mode``: the heuristic, INSTANT or FALLBACK.
        """
        backend = self._backend
        try:
            heuristics = backend.finished(
                HEURISTICS, (HEURISTIC_GRAPH, DESCRIPTOR, graph.value), (HEURISTIC, HEURISTIC_MODE, mode),
                (HEURISTIC_DEVICE, DESCRIPTOR, self._device.value),
            )  # fmt: skip
        except BackendError:  # torch continues with the fallbacks, too
            return
        configs = [
            backend.create(CONFIG) for _ in range(backend.fill(heuristics, HEURISTIC_RESULTS, DESCRIPTOR, array=None))
        ]
        array = (ctypes.c_void_p * len(configs))(*(config.value for config in configs))
        count = backend.fill(heuristics, HEURISTIC_RESULTS, DESCRIPTOR, array) if configs else 0
        for config in configs[:count]:
            engine = self._engine(config, question)
            if engine is None:
                continue
            number, is_compiled = engine
            # compiling an engine takes seconds, so it is checked only if torch would run it: as the first plan
            if (is_compiled and plans) or self._is_supported(config):
                plans.append((f"eng{number}", backend.values(config, CONFIG_WORKSPACE, INTEGER, limit=1)[0]))
        backend.destroy(*configs, heuristics)

    def _engine(self, config: ctypes.c_void_p, question: dict[str, Any]) -> tuple[int, bool] | None:
        """Return (number of a configuration's engine, whether planning compiles it); None if torch skips the engine."""
        backend = self._backend
        engine = backend.create(ENGINE)
        backend.fill(config, CONFIG_ENGINE, DESCRIPTOR, (ctypes.c_void_p * 1)(engine.value))
        notes = backend.values(engine, ENGINE_NOTES, NOTE, limit=10)
        behavior = backend.values(engine, ENGINE_BEHAVIOR, BEHAVIOR, limit=8)
        number = backend.values(engine, ENGINE_NUMBER, INTEGER, limit=1)[0]
        backend.destroy(engine)
        if refused(notes, question) or in_errata(question, number, *self._versions):
            return None
        return number, RUNTIME_COMPILATION in behavior

    def _is_supported(self, config: ctypes.c_void_p) -> bool:
        """Return whether cuDNN can plan this configuration; otherwise torch tries the next."""
        backend = self._backend
        try:
            plan = backend.finished(
                PLAN, (PLAN_DEVICE, DESCRIPTOR, self._device.value), (PLAN_CONFIG, DESCRIPTOR, config.value)
            )
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
    for kind, dimensions, number, first_version, fixed_version, device in ERRATA:
        is_engine = kind == question["kind"] and number == engine and dimensions in (None, len(question["stride"]))
        is_broken = first_version <= version and (fixed_version is None or version < fixed_version)
        if is_engine and is_broken and device in (None, card):
            return True
    return False


def serve(lines: Iterator[str], output: TextIO) -> None:
    """Load cuDNN as the first line of ``lines`` describes, and write an answer for this line and for each question
    after it."""

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
