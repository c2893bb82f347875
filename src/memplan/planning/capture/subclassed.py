"""Plan calls with tensors of subclasses as calls with plain tensors, where that equals eager mode.

In eager mode the class of an input may change which ops run, and the class of the results. Both are determined by
running forward() twice without data, with the original inputs and with plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import InputError
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.side_effects import Watch
from memplan.trace.structure import take_apart

Kinds = tuple[type | None, ...]
"""The subclass of each tensor of an output, None for a plain tensor; empty if all are plain."""


def output_kinds(model: nn.Module, call: Call) -> Kinds:
    """Return the subclass of each tensor that a model returns for a call, None for a plain tensor.

    Empty if all inputs are plain. Raises InputError if a plan for plain tensors would not equal eager mode."""
    subclassed = next((like for like in call.likes if like is not None), None)
    if subclassed is None:
        return ()
    kind = _torch.kind_of(subclassed)
    assert kind is not None, "it is of a subclass"
    try:
        ops, outputs = _run_without_data(model, call, as_subclasses=True)
        plain_ops, _ = _run_without_data(model, call, as_subclasses=False)
    except Exception as error:  # in the user's code, or of a subclass that reads values
        raise _refusal(kind, f"what it computes with that cannot be followed ({type(error).__name__})") from error
    if ops != plain_ops:
        raise _refusal(kind, "forward() computes something else with that than with a plain tensor")
    kinds = tuple(map(_torch.kind_of, outputs))
    for output_kind in kinds:
        if output_kind is not None and _torch.computes_by_itself(output_kind):
            made_by = f"its __torch_function__ makes the outputs what they are, each a {output_kind.__name__}"
            raise _refusal(kind, made_by)
    return kinds


def as_kinds(output: Any, kinds: Kinds) -> Any:
    """Return a model's output with each of its tensors converted to its subclass in ``kinds``; None: it stays."""
    if not any(kinds):
        return output
    tensors, structure = take_apart(output)
    return structure.rebuild(
        tensor if kind is None else _torch.as_subclass(tensor, kind)
        for tensor, kind in zip(tensors, kinds, strict=True)
    )


def _run_without_data(model: nn.Module, call: Call, *, as_subclasses: bool) -> tuple[list[Any], Sequence[torch.Tensor]]:
    """Run forward() on fake tensors; return the names of its ops and its output tensors.

    ``as_subclasses``: the inputs have the subclasses of the user's, else they are plain tensors.
    """
    watch, names = Watch(model), _torch.OpNames()
    mode, fakes = _torch.fake_like(call.tensors)
    try:
        with _torch.fakes_as_subclasses(), mode, names, watch.printed.capturing():
            if as_subclasses:
                fakes = [
                    fake if like is None else _torch.with_attributes(_torch.as_subclass(fake, type(like)), like)
                    for fake, like in zip(fakes, call.likes, strict=True)
                ]
            names.seen.clear()
            args, kwargs = call.rebuild(fakes)
            return names.seen, take_apart(model.forward(*args, **kwargs))[0]
    finally:
        watch.restore()


def _refusal(kind: type, why: str) -> InputError:
    """Return the error for an input of a subclass. ``why``: what a plan for plain tensors would do differently."""
    conversion = "x.as_tensor()" if hasattr(kind, "as_tensor") else "x.as_subclass(torch.Tensor)"
    return InputError(
        f"an input is a {kind.__name__}, and {why}",
        expected="tensors of torch's own classes, or of one that leaves what is computed to torch",
        do=f"Pass the tensor that it is: {conversion}",
    )
