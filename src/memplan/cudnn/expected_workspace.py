"""Predicts the workspace that cuDNN takes for a convolution, where cuDNN itself cannot be queried.

cuDNN's heuristics choose an engine by the shape of the convolution and the compute capability of the card; clocks, size
and number of multiprocessors do not matter to them. The workspace of an engine is mostly a formula: its operands in
another layout, their channels padded to the width of the tensor cores, partial sums of a split product. So the choice
is a classification: a small neural network for each compute capability and family of cuDNN versions gives the
probability of each formula. ``tools/workspace_model/`` samples convolutions, queries cuDNN and fits the networks; how
often they are right on convolutions that they have not seen is in ``docs/cuda.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
from pathlib import Path
from typing import Any

import numpy as np

from memplan.cudnn.questions import Question
from memplan.devices import Device

FILE = Path(__file__).with_name("answers") / "expected.npz"

FAMILIES = ((92400, "9.24"), (91900, "9.19"), (91000, "9.10"))
"""(first version, name) of the families of cuDNN versions whose heuristics choose alike: 9.19 and 9.20 gave the same
workspace for each of 1,500 sampled convolutions, 9.24 and 9.26 for 98.6 to 100 % of them, by card. 9.21 to 9.23, which
no torch comes with, count as the former. 9.10 is the last one for cards older than compute capability 7.5, of which
there is a network for 7.0 alone; on a T4 it chose as 9.19 for each of 1,414."""

_MEASURED = (9, 0)
"""Compute capability of the real cards whose workspaces were compared with cuDNN's answers, an H100 and an H200."""
_MEASURED_SHARE = 0.85
"""Probability of `with_cublas`: 226 of 248 measured convolutions to which it applies took its workspace."""
_MOST_TILES = 1000
"""Tiles of a weight gradient of 3 by 3 beyond which `with_cublas` says nothing: measured were 32 to 800."""
_ITEMSIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_LEARNED_ELEMENTS = 1 << 31
"""Elements of an input or a result: those of the sampled convolutions are fewer (``tools/workspace_model``)."""
_NEAR = 0.02
"""Sizes that differ by less than this share of the tensors' bytes count as one. The most probable is expected."""


@dataclass(frozen=True, slots=True)
class ExpectedWorkspace:
    """The possible workspaces of a convolution with their probabilities, and the most probable."""

    bytes: int
    sizes: tuple[int, ...]
    """In ascending order."""
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Network:
    """A classifier with two hidden layers, from `features` to the probabilities of workspace formulas."""

    mean: Any
    scale: Any
    layers: tuple[tuple[Any, Any], ...]
    """(weights, biases) of each layer."""
    formulas: tuple[str, ...]
    """See `workspace_of`."""

    def probabilities(self, rows: Any) -> Any:
        """Return the probability of each formula, for each row of features: an array of (rows, formulas)."""
        values = np.clip((rows - self.mean) / self.scale, -5, 5)
        for weights, biases in self.layers[:-1]:
            values = np.maximum(values @ weights + biases, 0)
        weights, biases = self.layers[-1]
        logits = values @ weights + biases
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


def expected_workspaces(card: Device, version: int, questions: Sequence[Question]) -> dict[Question, ExpectedWorkspace]:
    """Return the expected workspaces of convolutions; {}: there is no model for the card's compute capability
    and this version.

    Args:
        card: the card, which this machine need not have.
        version: of cuDNN, such as 92600.
        questions: the convolutions.

    Example:
        >>> expected = expected_workspaces(find("h100"), 92000, [question])[question]
        >>> expected.bytes in expected.sizes
        True
    """
    network = network_for(card.architecture, version)
    if network is None or not questions:
        return {}
    rows = network.probabilities(np.array([features(question) for question in questions]))
    expected = dict[Question, ExpectedWorkspace]()
    for question, probabilities in zip(questions, rows, strict=True):
        if is_unlearned(question):  # half of the probability is spread evenly over the formulas
            probabilities = (probabilities + 1 / len(probabilities)) / 2
        measured = with_cublas(question) if card.architecture == _MEASURED else None
        expected[question] = _expected(question, network.formulas, probabilities, measured)
    return expected


def is_unlearned(question: Question) -> bool:
    """Return whether a convolution is larger than all that the networks were fitted to. Then half of the probability is
    spread evenly over the formulas, so that the band is wide."""
    return max(prod(question.x), prod(question.y)) >= _LEARNED_ELEMENTS


def with_cublas(question: Question) -> int | None:
    """Return the workspace of the engines that multiply matrices by cuBLAS, where they are what a real card takes.

    cuDNN does not name them for a described card, where cuBLAS has no handle. A kernel of 1 is a matrix product without
    a workspace, its weight gradient one product a sample, which are then summed. The weight gradient of a kernel of 3
    by 3 is Winograd's for tiles of 4 by 4, transformed to 6 by 6, where there are as few as in those measured.

    Read off what an H100 and an H200 took with cuDNN 9.19 (``measured.json.gz``), in float32 and contiguous; None for
    all other convolutions.
    """
    q = question
    batch, channels = q.x[:2]
    outputs, inputs_of_group, *kernel = q.w
    has_unit_steps = {*q.stride, *q.dilation} == {1}
    if q.dtype != "float32" or q.channels_last or channels != inputs_of_group or not has_unit_steps:
        return None
    if prod(kernel) == 1 and not any(q.padding):
        if q.kind != "weight gradient" or prod(q.x[2:]) == 1:
            return 0
        return batch * prod(q.w) * 4 if batch > 1 else None
    if q.kind == "weight gradient" and kernel == [3, 3] and 128 <= channels <= 256:
        tiles = batch * prod(-(-size // 4) for size in q.y[2:])
        if tiles <= _MOST_TILES:
            return 6 * 6 * 4 * (tiles * (channels + outputs) + channels * outputs)
    return None


def _expected(
    question: Question, formulas: Sequence[str], probabilities: Any, measured: int | None
) -> ExpectedWorkspace:
    """Return the possible workspaces of a convolution, from the probability of each formula.

    Formulas of about the same size count as one; the most probable of them is expected. ``measured``: the workspace by
    `with_cublas`, if any, which gets most of the probability.
    """
    probability_of: dict[int, float] = {} if measured is None else {measured: _MEASURED_SHARE}
    share_of_formulas = 1.0 if measured is None else 1 - _MEASURED_SHARE
    for formula, probability in zip(formulas, probabilities, strict=True):
        size = workspace_of(question, formula)
        probability_of[size] = probability_of.get(size, 0.0) + share_of_formulas * float(probability)
    near = _NEAR * tensor_bytes(question)
    near_probability = {  # by size: that of all sizes about the same
        size: sum(probability for other, probability in probability_of.items() if abs(other - size) <= near)
        for size in probability_of
    }
    # ties are broken by the smaller size
    center = max(probability_of, key=lambda size: (near_probability[size], probability_of[size], -size))
    sizes_near = [size for size in probability_of if abs(size - center) <= near]
    most_probable = max(sizes_near, key=lambda size: (probability_of[size], -size))
    sizes = sorted(probability_of)
    return ExpectedWorkspace(most_probable, tuple(sizes), tuple(probability_of[size] for size in sizes))


def workspace_of(question: Question, formula: str) -> int:
    """Return the bytes of workspace by a formula such as ``X8+Y8+W8,8+2P``.

    ``X``, ``Y`` and ``W`` are the tensors of the convolution in another layout, with channels padded to a multiple of
    the number after them (of ``W`` the output channels, then the input channels). ``2P`` are two weights of float32,
    the partial sums of a split product. ``r0.5`` is that share of the bytes of all three tensors; ``0`` is none.
    """
    if formula == "0":
        return 0
    if formula.startswith("r"):
        return int(float(formula[1:]) * tensor_bytes(question))
    return sum(term_bytes(question, term) for term in formula.split("+"))


def tensor_bytes(question: Question) -> int:
    """Return the bytes of all three tensors of a convolution."""
    return sum(prod(sizes) for sizes in (question.x, question.w, question.y)) * _ITEMSIZES[question.dtype]


def term_bytes(question: Question, term: str) -> int:
    """Return the bytes of a term of a formula of `workspace_of`: ``X8``, ``W8,8`` or ``2P``."""
    if term.endswith("P"):
        return int(term[:-1]) * prod(question.w) * 4
    multiples = [int(number) for number in term[1:].split(",") if number] or [1]
    if term[0] == "W":
        outputs, inputs, *kernel = question.w
        elements = _padded(outputs, multiples[0]) * _padded(inputs, multiples[-1]) * prod(kernel)
    else:
        batch, channels, *positions = question.x if term[0] == "X" else question.y
        elements = batch * _padded(channels, multiples[0]) * prod(positions)
    return elements * _ITEMSIZES[question.dtype]


def _padded(count: int, multiple: int) -> int:
    """Return ``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


def features(question: Question) -> list[float]:
    """Return what the networks know of a convolution: logarithms of its sizes, and yes or no as 1 or 0.

    Besides the sizes themselves these are the dimensions of the matrix product that computes it, how full tiles of
    that product are, and the divisibility of channels and positions, which decides about vectorised loads.
    """
    q = question
    groups = max(1, q.x[1] // q.w[1])
    ins, outs = q.w[1], q.w[0] // groups
    positions_in, positions_out, taps = prod(q.x[2:]), prod(q.y[2:]), prod(q.w[2:])
    is_1d = len(q.x) == 4 and q.x[2] == q.w[2] == q.y[2] == 1  # torch gives a conv1d a height of 1
    ranks = 1 if is_1d else len(q.x) - 2
    rows, columns, depth = {
        "forward": (q.x[0] * positions_out, outs, ins * taps),
        "input gradient": (q.x[0] * positions_in, ins, outs * taps),
        "weight gradient": (ins * taps, outs, q.x[0] * positions_out),
    }[q.kind]
    work = rows * columns * depth * groups
    elements = prod(q.x) + prod(q.w) + prod(q.y)
    flags = [
        *(q.kind == kind for kind in ("forward", "input gradient", "weight gradient")),
        *(ranks == count for count in (1, 2, 3)),
        *(q.dtype == dtype for dtype in ("float32", "float64", "bfloat16")),
        q.channels_last, q.tf32, q.deterministic, groups > 1, ins == outs == 1, ins == 1, outs == 1, ins <= 4,
        outs <= 4, taps == 1, len(set(q.w[2:])) == 1, q.stride[-1] == q.w[-1] > 1, max(q.stride) > 1,
        max(q.dilation) > 1, max(q.padding) == 0, q.x[2:] == q.y[2:], min(q.alignments) < 16,
        *(count % divisor == 0 for count in (ins, outs) for divisor in (2, 4, 8, 16, 32, 64, 128)),
        *(count % divisor == 0 for count in (positions_in, positions_out, q.x[-1], q.y[-1]) for divisor in (2, 4, 8)),
    ]  # fmt: skip
    sizes = [
        q.x[0], ins, outs, groups, q.x[1], q.w[0], *_three(q.x[2:]), *_three(q.y[2:]), *_three(q.w[2:]), q.stride[0],
        q.stride[-1], q.padding[0], q.padding[-1], q.dilation[-1], prod(q.x), prod(q.w), prod(q.y), positions_in,
        positions_out, taps, rows, columns, depth, work, min(ins, outs), max(ins, outs), ins * taps, outs * taps,
        q.x[0] * positions_out, q.x[0] * positions_in,
    ]  # fmt: skip
    ratios = [
        log2(prod(q.x) / prod(q.y)), log2(ins / outs), log2(work / elements), log2(depth / columns), log2(rows / depth),
        *(count / _padded(count, tile) for count in (ins, outs) for tile in (32, 64, 128, 256)),
        columns / _padded(columns, 128), min(1.0, rows / _padded(rows, 128)), min(1.0, depth / _padded(depth, 32)),
    ]  # fmt: skip
    growth_of_width = 2 * q.padding[-1] - q.dilation[-1] * (q.w[-1] - 1)  # at stride 1; 0 for padding="same"
    return [*map(float, flags), *(log2(1 + size) for size in sizes), *ratios, growth_of_width]


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the sizes of three spatial dimensions, the missing ones as 1."""
    return (1,) * (3 - len(sizes)) + tuple(sizes)  # type: ignore[return-value]


def family_of(version: int) -> str:
    """Return the name of the family of a cuDNN version in `FAMILIES`; "" for older versions, which have no model."""
    return next((name for first_version, name in FAMILIES if version >= first_version), "")


@functools.cache
def network_for(architecture: tuple[int, int], version: int) -> Network | None:
    """Return the network for a compute capability and a version of cuDNN; None: there is none."""
    with np.load(FILE, allow_pickle=False) as arrays:
        key = f"{architecture[0]}.{architecture[1]}/{family_of(version)}"
        # "8.0/9.19=8.0/9.24 ...": keys that share the network of another key
        shared = str(arrays["same"].item()).split() if "same" in arrays else []
        key = dict(entry.split("=") for entry in shared).get(key, key)
        if f"{key}/formulas" not in arrays:
            return None
        own = {name.removeprefix(f"{key}/"): arrays[name] for name in arrays.files if name.startswith(f"{key}/")}
    values = {name: array.astype(np.float64) for name, array in own.items() if name != "formulas"}
    layers = tuple((values[f"weights{i}"], values[f"biases{i}"]) for i in range(3))
    return Network(values["mean"], values["scale"], layers, tuple(str(own["formulas"].item()).split()))
