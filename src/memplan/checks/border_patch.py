"""The fix of a border-erosion finding: a patch of the source that pads the layers, else a wrapper of the model."""

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

    ``kind`` says what ``text`` is: "patch", a unified diff; "wrapper", Python that wraps the model; "none", "". ``why``
    says why there is no patch. ``proof`` says what the recording of the changed model gave.
    """

    kind: str
    text: str
    why: str
    proof: str


def fix_of(finding: Finding, trace: Trace) -> Fix:
    """Return the change that keeps the border, for a finding of border erosion about this trace."""
    padding: Mapping[str, Any] = finding.details.get("padding", {})
    created_at = {layer.name: layer.made for layer in trace.layers}
    paddings = {layer: (created_at.get(layer), amount) for layer, amount in padding.items()}
    patch, why = _patch(paddings)
    if not paddings and "not_padded" in finding.details:
        why = f"padded, the model cannot be recorded ({finding.details['not_padded']})"
    output, size = finding.details.get("padded_output"), finding.details["input"]
    if patch:
        return Fix("patch", patch, "", _proof(output, size, finding.details["stride"]))
    return _wrapper(finding, why)


def _proof(output: Sequence[int] | None, size: Sequence[int], stride: Sequence[float]) -> str:
    """Return what the recording of the changed model shows, as a sentence; ``output`` is None if there is no
    recording."""
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


def _patch(paddings: Mapping[str, tuple[str | None, Any]]) -> tuple[str, str]:
    """Return the diff and "", or "" and why there is no diff.

    ``paddings`` maps a layer to the ``file:line`` that created it and its padding.
    """
    if not paddings:
        return "", "no convolution or pool of the model can be padded from here"
    edits: dict[str, dict[int, Any]] = {}
    for layer, (where, amount) in paddings.items():
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
    """Return the source with the padding set in the calls at these lines; None if a line has no call to set it in."""
    text = source.splitlines(keepends=True)
    changes: list[tuple[int, int, int, str]] = []
    for line, amount in lines.items():
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.lineno == line]
        calls = [call for call in calls if _creates_layer(call)]
        if not calls:
            return None
        value = _literal(amount)
        for call in calls:
            padding = next((keyword.value for keyword in call.keywords if keyword.arg == "padding"), None)
            if padding is not None:
                if padding.lineno != padding.end_lineno or padding.end_col_offset is None:
                    return None
                changes.append((padding.lineno, padding.col_offset, padding.end_col_offset, value))
            elif len(call.args) >= 5 or any(isinstance(arg, ast.Starred) for arg in call.args):
                return None  # padding is, or may be, a positional argument
            else:
                last = max((*call.args, *(keyword.value for keyword in call.keywords)), key=_end)
                changes.append((*_end(last), _end(last)[1], f", padding={value}"))
    for line, begin, end, value in sorted(changes, reverse=True):
        row = text[line - 1].encode()
        text[line - 1] = (row[:begin] + value.encode() + row[end:]).decode()
    return "".join(text)


def _end(node: ast.expr) -> tuple[int, int]:
    """Return line and column of the end of an expression."""
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _creates_layer(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.startswith(("Conv", "MaxPool", "AvgPool")) and "Transpose" not in name


def _literal(amount: Any) -> str:
    if isinstance(amount, str):
        return repr(amount)
    return str(amount[0]) if len(set(amount)) == 1 else repr(tuple(amount))


def _wrapper(finding: Finding, why: str) -> Fix:
    """Return the fix for a model that cannot be patched, ``why`` being the reason: a wrapper that pads, or advice
    alone."""
    details = finding.details
    pads, kind = details.get("mirror_pad"), details.get("mirror_returns")
    by_hand = "Pad the input yourself, or cut tiles that overlap."
    if not pads:
        return Fix("none", "", why, by_hand)
    if kind == "other":
        why += ", and a printed wrapper cannot crop what the model returns: something else than tensors in a tuple, a "
        return Fix("none", "", why + "list or a dictionary", by_hand)
    output = details.get("mirrored_output")
    return Fix("wrapper", _wrapper_source(details), why, _proof(output, details["input"], details["stride"]))


def _wrapper_source(details: Mapping[str, Any]) -> str:
    """Return the source of a module that pads the images among the model's arguments and crops its outputs."""
    mode = "reflect" if details["mirror_reflects"] else "replicate"
    amounts = ", ".join(f"{side}" for pair in reversed(details["mirror_pad"]) for side in pair)
    pad = f"torch.nn.functional.pad({{}}, ({amounts}), mode={mode!r})"
    crops = [
        "" if crop is None else f"[..., {', '.join(f'{first}:{first + count}' for first, count in crop)}]"
        for crop in details["mirror_crops"]
    ]
    lines = ["class Mirrored(torch.nn.Module):", "    def __init__(self, model):", "        super().__init__()",
             "        self.model = model", ""]  # fmt: skip
    padded = details["mirror_given"]
    if padded == ["0"]:
        lines += ["    def forward(self, image, *inputs, **named):",
                  f"        output = self.model({pad.format('image')}, *inputs, **named)"]  # fmt: skip
    else:  # several images, or a keyword argument
        inputs = [name for name in padded if name.isdigit()]
        lines += ["    def forward(self, *inputs, **named):"]
        if inputs:
            lines += ["        inputs = list(inputs)", f"        for number in ({', '.join(inputs)},):",
                      f"            inputs[number] = {pad.format('inputs[number]')}"]  # fmt: skip
        for name in padded:
            if not name.isdigit():
                lines += [f"        named[{name!r}] = {pad.format(f'named[{name!r}]')}"]
        lines += ["        output = self.model(*inputs, **named)"]
    return "\n".join([*lines, *_cropping(details, crops)]) + "\n"


def _cropping(details: Mapping[str, Any], crops: Sequence[str]) -> list[str]:
    """Return the wrapper's lines that crop the model's output and return it, by the output's type."""
    kind, names = details["mirror_returns"], details["mirror_names"]
    if kind == "tensor":
        return [f"        return output{crops[0]}"]
    lines = [f"        output[{name}] = output[{name}]{crop}" for name, crop in zip(names, crops, strict=True) if crop]
    copy, result = {"tuple": ("list", "tuple(output)"), "list": ("list", "output"), "dict": ("dict", "output")}[kind]
    return [f"        output = {copy}(output)", *lines, f"        return {result}"]
