"""What is said to cuDNN's backend, and what of its engines torch leaves out."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from cudnn.scripted_worker import FORWARD
from environment import ENVIRONMENT, needs_cuda_torch

from memplan.cudnn import backend_worker
from memplan.cudnn.backend_worker import in_errata, refused, serve, strides
from memplan.cudnn.cudnn_library import find_cudnn


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (4, 1, 6, 6), (2, 3, 4, 5, 6), (8, 4, 1, 9)])
def test_strides_are_those_of_dense_tensors(sizes: tuple[int, ...]) -> None:
    last = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    sizes = tuple(max(2, size) for size in sizes)  # of a dimension of size 1 any stride is right
    assert strides(sizes, channels_last=False) == list(torch.empty(sizes).stride())
    assert strides(sizes, channels_last=True) == list(torch.empty(sizes, memory_format=last).stride())


@pytest.mark.parametrize(
    ("notes", "change", "out"),
    [
        ([], {}, False),
        ([0], {}, False),
        ([0], {"tf32": False}, True),
        ([0], {"tf32": False, "dtype": "float16"}, False),
        ([1], {}, True),
        ([4], {}, False),
        ([4, 5], {"deterministic": True}, True),
    ],
)
def test_engines_that_torch_leaves_out(notes: list[int], change: dict[str, object], out: bool) -> None:
    assert refused(notes, asdict(FORWARD) | change) is out


@pytest.mark.parametrize(
    ("change", "engine", "version", "card", "out"),
    [
        ({"stride": (1, 1, 1)}, 23, 90800, 900, True),  # pytorch#163539: wrong results in 3d
        ({"stride": (1, 1, 1)}, 23, 91499, 900, True),
        ({"stride": (1, 1, 1)}, 23, 91500, 900, False),
        ({}, 23, 91000, 900, False),
        ({"stride": (1, 1, 1), "kind": "input gradient"}, 23, 99999, 800, True),
        ({"stride": (1, 1, 1), "kind": "weight gradient"}, 23, 91000, 800, False),
        ({}, 5, 92301, 900, True),
        ({}, 5, 92400, 900, False),
        ({}, 58, 92600, 1200, True),
        ({}, 58, 92600, 900, False),
    ],
)
def test_engines_that_torch_does_not_run(
    change: dict[str, object], engine: int, version: int, card: int, out: bool
) -> None:
    assert in_errata(asdict(FORWARD) | change, engine, version, card) is out


@needs_cuda_torch
def test_errata_are_in_the_library_of_torch() -> None:
    """The rules lie as text in libtorch_cuda.so; each of that release is among ours."""
    library = find_cudnn(ENVIRONMENT)
    assert library is not None
    assert library.packages is not None
    text = (library.packages / "torch/lib/libtorch_cuda.so").read_bytes()
    kinds = {b"ConvFwd": "forward", b"ConvBwdData": "input gradient", b"ConvBwdFilter": "weight gradient"}
    rules = re.findall(rb'"operation"\s*: "(\w+)",\s*"engine"\s*: (\d+),\s*"cudnn_version_start" : (\d+),\s*'
                       rb'"cudnn_version_end"\s*: (-?\d+)', text)  # fmt: skip
    assert rules
    ours = {(kind, engine, first, end) for kind, _, engine, first, end, _ in backend_worker.ERRATA}
    for kind, engine, first, end in rules:
        assert (kinds[kind], int(engine), int(first), None if int(end) < 0 else int(end)) in ours


def test_a_library_that_does_not_load_is_an_answer() -> None:
    output = io.StringIO()
    serve(iter([json.dumps({"needed": [], "file": "/nowhere/libcudnn.so.9", "card": {}})]), output)
    assert "cannot open shared object file" in json.loads(output.getvalue())["error"]


@needs_cuda_torch
def test_numbers_are_those_of_the_header() -> None:
    library = find_cudnn(ENVIRONMENT)
    assert library is not None
    assert library.packages is not None
    header = (library.packages / "nvidia/cudnn/include/cudnn_graph.h").read_text()
    known = {
        name: int(number) for name, number in re.findall(r"CUDNN_(\w+)(?: CUDNN_DEPRECATED_ENUM)?\s*= (\d+)", header)
    }
    b = backend_worker
    assert [known[f"BACKEND_{name}_DESCRIPTOR"] for name in (
        "CONVOLUTION", "ENGINE", "ENGINECFG", "ENGINEHEUR", "EXECUTION_PLAN", "OPERATIONGRAPH", "TENSOR", "DEVICEPROP",
    )] == [b.CONVOLUTION, b.ENGINE, b.CONFIG, b.HEURISTICS, b.PLAN, b.GRAPH, b.TENSOR, b.DEVICE]  # fmt: skip
    assert [known[f"TYPE_{name}"] for name in (
        "DATA_TYPE", "INT64", "FLOAT", "DOUBLE", "CONVOLUTION_MODE", "HEUR_MODE", "NUMERICAL_NOTE",
        "BACKEND_DESCRIPTOR", "CHAR",
    )] == [kind[0] for kind in (b.DTYPE, b.INTEGER, b.FLOAT, b.DOUBLE, b.CONVOLUTION_MODE, b.HEURISTIC_MODE, b.NOTE,
                                b.DESCRIPTOR, b.CHARACTER)]  # fmt: skip
    assert {name: known[f"DATA_{title}"] for name, title in (
        ("float32", "FLOAT"), ("float64", "DOUBLE"), ("float16", "HALF"), ("bfloat16", "BFLOAT16"),
    )} == b.DTYPES  # fmt: skip
    for kind, title, names in (
        ("forward", "FORWARD", "XWY"), ("input gradient", "BWD_DATA", ("DX", "W", "DY")),
        ("weight gradient", "BWD_FILTER", ("X", "DW", "DY")),
    ):  # fmt: skip
        long = {"FORWARD": "FORWARD", "BWD_DATA": "BACKWARD_DATA", "BWD_FILTER": "BACKWARD_FILTER"}[title]
        descriptor, alpha, roles = b.OPERATIONS[kind]
        assert descriptor == known[f"BACKEND_OPERATION_CONVOLUTION_{long}_DESCRIPTOR"]
        attribute = f"ATTR_OPERATION_CONVOLUTION_{title}"
        assert [known[f"{attribute}_{name}"] for name in ("ALPHA", "BETA", "CONV_DESC")] == [
            alpha,
            alpha + 1,
            alpha + 2,
        ]
        assert [known[f"{attribute}_{name}"] for name in names] == [roles[name] for name in "xwy"]
    used = {int(number) for number in re.findall(r"\((\d{3,4}), ", Path(b.__file__).read_text())}
    assert used - set(known.values()) == set()
