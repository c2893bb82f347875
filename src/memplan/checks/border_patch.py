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
    details = finding.details
    padding: Mapping[str, Any] = details.get("padding", {})
    created_at = {layer.name: layer.made for layer in trace.layers}
    patch, why = _patch(padding, created_at)
    if patch:
        return Fix(
            "patch", text=patch, why="", proof=_proof(details.get("padded_output"), details["input"], details["stride"])
        )
    if not padding and "not_padded" in details:
        why = f"padded, the model cannot be recorded ({details['not_padded']})"
    return _wrapper(details, why)


def _proof(output: Sequence[int] | None, size: Sequence[int], stride: Sequence[float]) -> str:
    """Return what the recording of the changed model shows, as a sentence. ``output`` is the spatial size of its
    output, None if it could not be recorded; ``stride`` the distance of neighbouring outputs in pixels of the input."""
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


def _patch(padding: Mapping[str, Any], created_at: Mapping[str, str | None]) -> tuple[str, str]:
    """Return the diff and "", or "" and why there is no diff. ``padding`` maps a layer to its new padding,
    ``created_at`` to the line that created it."""
    if not padding:
        return "", "no convolution or pool of the model can be padded from here"
    edits: dict[str, dict[int, Any]] = {}  # path -> line -> padding
    for layer, amount in padding.items():
        where = created_at.get(layer)
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
    """Return the source with ``padding=`` set in the calls that create convolutions or pools at some lines.

    ``lines`` maps a line number to the padding there, a list by dimension or "same". None if a line has no such call,
    or one whose padding is no keyword argument on a single line.
    """
    text = source.splitlines(keepends=True)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _creates_layer(node)]
    changes: list[tuple[int, int, int, str]] = []  # line, first and last column in bytes, new text
    for line, amount in lines.items():
        calls_of_line = [call for call in calls if call.lineno == line]
        if not calls_of_line:
            return None
        value = _literal(amount)
        for call in calls_of_line:
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
    """Return whether a call is that of a convolution or a pool, by its name: ``nn.Conv2d(...)``, ``MaxPool2d(...)``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.startswith(("Conv", "MaxPool", "AvgPool")) and "Transpose" not in name


def _literal(amount: Any) -> str:
    """Return a padding as Python source: ``"same"`` with quotes, a number, or a tuple of unequal numbers."""
    if isinstance(amount, str):
        return repr(amount)
    return str(amount[0]) if len(set(amount)) == 1 else repr(tuple(amount))


def _wrapper(details: Mapping[str, Any], why: str) -> Fix:
    """Return the fix for a model that cannot be patched: a module that pads the model's input, or advice alone.
    ``why``: reason why there is no patch."""
    by_hand = "Pad the input yourself, or cut tiles that overlap."
    if not details.get("mirror_pad"):
        return Fix("none", text="", why=why, proof=by_hand)
    if details.get("mirror_returns") == "other":
        why += ", and a printed wrapper cannot crop what the model returns: something else than tensors in a tuple, a "
        return Fix("none", text="", why=why + "list or a dictionary", proof=by_hand)
    output = details.get("mirrored_output")
    return Fix("wrapper", _wrapper_source(details), why, _proof(output, details["input"], details["stride"]))


def _wrapper_source(details: Mapping[str, Any]) -> str:
    """Return the source of a module that pads the images among the model's arguments and crops its outputs.

    ``details`` are those of the finding. Of them ``mirror_pad`` has the pixels (before, after) each dimension, and
    ``mirror_given`` the arguments that are images, by position ("0") or name.
    """
    mode = "reflect" if details["mirror_reflects"] else "replicate"
    # torch's pad takes the last dimension first
    amounts = ", ".join(f"{before}, {after}" for before, after in reversed(details["mirror_pad"]))

    def pad(image: str) -> str:
        return f"torch.nn.functional.pad({image}, ({amounts}), mode={mode!r})"

    images = details["mirror_given"]
    if images == ["0"]:
        forward = ["def forward(self, image, *inputs, **named):",
                   f"    output = self.model({pad('image')}, *inputs, **named)"]  # fmt: skip
    else:  # several images, or a keyword argument
        positions = [name for name in images if name.isdigit()]
        forward = ["def forward(self, *inputs, **named):"]
        if positions:
            forward += ["    inputs = list(inputs)", f"    for number in ({', '.join(positions)},):",
                        f"        inputs[number] = {pad('inputs[number]')}"]  # fmt: skip
        names = [name for name in images if not name.isdigit()]
        forward += [f"    named[{name!r}] = {pad(f'named[{name!r}]')}" for name in names]
        forward += ["    output = self.model(*inputs, **named)"]
    lines = ["class Mirrored(torch.nn.Module):", "    def __init__(self, model):", "        super().__init__()",
             "        self.model = model", ""]  # fmt: skip
    lines += [f"    {line}" for line in (*forward, *_cropping(details))]
    return "\n".join(lines) + "\n"


def _cropping(details: Mapping[str, Any]) -> list[str]:
    """Return the lines of the wrapper's forward that crop the model's output and return it, by the output's type.

    Of the finding's details, ``mirror_crops`` has for each returned tensor the first position and the number of
    positions to keep, by dimension, or None; ``mirror_names`` has its key in the tuple or dictionary.
    """
    kind, names = details["mirror_returns"], details["mirror_names"]
    slices = [
        "" if crop is None else f"[..., {', '.join(f'{first}:{first + count}' for first, count in crop)}]"
        for crop in details["mirror_crops"]
    ]
    if kind == "tensor":
        return [f"    return output{slices[0]}"]
    lines = [f"    output[{name}] = output[{name}]{kept}" for name, kept in zip(names, slices, strict=True) if kept]
    copy = "dict" if kind == "dict" else "list"
    return [f"    output = {copy}(output)", *lines, f"    return {'tuple(output)' if kind == 'tuple' else 'output'}"]
