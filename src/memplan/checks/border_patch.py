"""The change of source that pads the layers, or a wrapper where the source cannot be changed; both recorded."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.checks.finding import Finding
from memplan.checks.ignores import located
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that keeps the border.

    ``text`` is a unified diff (``kind`` "patch") or Python that wraps the model ("wrapper"); ``why`` says why there is
    no patch. ``proof`` says what the recording of the changed model gave; its weights are those of the model.
    """

    kind: str
    text: str
    why: str
    proof: str


def fix_of(finding: Finding, trace: Trace) -> Fix:
    """Return the change that keeps the border that a finding of border erosion names."""
    padding: Mapping[str, Any] = finding.details.get("padding", {})
    made = {layer.name: layer.made for layer in trace.layers}
    wanted = {layer: (made.get(layer), amount) for layer, amount in padding.items()}
    patch, why = _patch(wanted)
    if not wanted and "not_padded" in finding.details:
        why = f"padded, the model cannot be recorded ({finding.details['not_padded']})"
    output, size = finding.details.get("padded_output"), finding.details["input"]
    if patch:
        return Fix("patch", patch, "", _proof(output, size, finding.details["stride"]))
    return _wrapper(finding, why)


def _proof(output: Sequence[int] | None, size: Sequence[int], stride: Sequence[float]) -> str:
    if output is None:
        return "The padded model could not be recorded: run it before you rely on it."
    shown = " x ".join(map(str, output))
    if all(out * step == pixels for out, step, pixels in zip(output, stride, size, strict=True)):
        share = "the input's resolution" if set(stride) == {1} else f"the input's resolution divided by {stride[0]:g}"
        return f"Recorded with this change, the output is {shown}: {share}. No weight changes its shape."
    return (
        f"Recorded with this change, the output is {shown} of {' x '.join(map(str, size))}: what is still missing is "
        "no padding's matter (see uneven-arithmetic). No weight changes its shape."
    )


def _patch(wanted: Mapping[str, tuple[str | None, Any]]) -> tuple[str, str]:
    """Return the diff, and why there is none."""
    if not wanted:
        return "", "no convolution or pool of the model can be padded from here"
    edits: dict[str, dict[int, Any]] = {}
    for layer, (where, amount) in wanted.items():
        path, line = located(where)
        if not path:
            return "", f"it is not known where {layer} was made: it existed before, or its source is no file"
        if "site-packages" in path or "dist-packages" in path or not os.access(path, os.W_OK):
            return "", f"{layer} is made at {where}, which is not yours to change"
        if edits.setdefault(path, {}).setdefault(line, amount) != amount:
            return "", f"the layers made at {where} need different paddings"
    parts: list[str] = []
    for path, lines in sorted(edits.items()):
        before = Path(path).read_text(encoding="utf-8")
        after = _edited(before, lines)
        if after is None:
            return "", f"{os.path.relpath(path)} makes its layers in a way that takes no padding argument as it stands"
        name = os.path.relpath(path)
        parts += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    return "".join(parts), ""


def _edited(source: str, lines: Mapping[int, Any]) -> str | None:
    """Return the source with a padding argument in the calls at these lines; None where one of them is no such call."""
    text = source.splitlines(keepends=True)
    changes: list[tuple[int, int, int, str]] = []
    for line, amount in lines.items():
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.lineno == line]
        calls = [call for call in calls if _names_a_layer(call)]
        if not calls:
            return None
        value = _literal(amount)
        for call in calls:
            given = next((word for word in call.keywords if word.arg == "padding"), None)
            if given is not None:
                place = given.value
                if place.lineno != place.end_lineno or place.end_col_offset is None:
                    return None
                changes.append((place.lineno, place.col_offset, place.end_col_offset, value))
            elif len(call.args) >= 5 or any(isinstance(arg, ast.Starred) for arg in call.args):
                return None  # padding stands among the positional arguments
            else:
                last = max((*call.args, *(word.value for word in call.keywords)), key=_end)
                changes.append((*_end(last), _end(last)[1], f", padding={value}"))
    for line, begin, end, value in sorted(changes, reverse=True):
        row = text[line - 1].encode()
        text[line - 1] = (row[:begin] + value.encode() + row[end:]).decode()
    return "".join(text)


def _end(node: ast.expr) -> tuple[int, int]:
    """Return line and column behind an expression that was parsed from text."""
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _names_a_layer(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.startswith(("Conv", "MaxPool", "AvgPool")) and "Transpose" not in name


def _literal(amount: Any) -> str:
    if isinstance(amount, str):
        return repr(amount)
    return str(amount[0]) if len(set(amount)) == 1 else repr(tuple(amount))


def _wrapper(finding: Finding, why: str) -> Fix:
    details = finding.details
    pads, kind = details.get("mirror_pad"), details.get("mirror_returns")
    by_hand = "Pad the input yourself, or cut tiles that overlap."
    if not pads:
        return Fix("none", "", why, by_hand)
    if kind == "other":
        why += ", and a printed wrapper cannot crop what the model returns: something else than tensors in a tuple, a "
        return Fix("none", "", why + "list or a dictionary", by_hand)
    output = details.get("mirrored_output")
    return Fix("wrapper", _class(details), why, _proof(output, details["input"], details["stride"]))


def _class(details: Mapping[str, Any]) -> str:
    """Return the source of a module that pads what the model is given, and crops what it returns."""
    mode = "reflect" if details["mirror_reflects"] else "replicate"
    amounts = ", ".join(f"{side}" for pair in reversed(details["mirror_pad"]) for side in pair)
    pad = f"torch.nn.functional.pad({{}}, ({amounts}), mode={mode!r})"
    crops = [_slices(crop) for crop in details["mirror_crops"]]
    lines = ["class Mirrored(torch.nn.Module):", "    def __init__(self, model):", "        super().__init__()",
             "        self.model = model", ""]  # fmt: skip
    given = details["mirror_given"]
    if given == ["0"]:
        lines += ["    def forward(self, image, *inputs, **named):",
                  f"        output = self.model({pad.format('image')}, *inputs, **named)"]  # fmt: skip
    else:  # several images, or one that is given by name
        inputs = [name for name in given if name.isdigit()]
        lines += ["    def forward(self, *inputs, **named):"]
        if inputs:
            lines += ["        inputs = list(inputs)", f"        for number in ({', '.join(inputs)},):",
                      f"            inputs[number] = {pad.format('inputs[number]')}"]  # fmt: skip
        for name in given:
            if not name.isdigit():
                lines += [f"        named[{name!r}] = {pad.format(f'named[{name!r}]')}"]
        lines += ["        output = self.model(*inputs, **named)"]
    return "\n".join([*lines, *_cropping(details, crops)]) + "\n"


def _cropping(details: Mapping[str, Any], crops: Sequence[str]) -> list[str]:
    kind, names = details["mirror_returns"], details["mirror_names"]
    if kind == "tensor":
        return [f"        return output{crops[0]}"]
    lines = [f"        output[{name}] = output[{name}]{crop}" for name, crop in zip(names, crops, strict=True) if crop]
    copied, given = {"tuple": ("list", "tuple(output)"), "list": ("list", "output"), "dict": ("dict", "output")}[kind]
    return [f"        output = {copied}(output)", *lines, f"        return {given}"]


def _slices(crop: Sequence[Sequence[int]] | None) -> str:
    return "" if crop is None else f"[..., {', '.join(f'{first}:{first + count}' for first, count in crop)}]"
