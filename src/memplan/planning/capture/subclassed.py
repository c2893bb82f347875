"""Calls with tensors of subclasses, planned as the tensors that they are: where that equals eager, and not elsewhere.

In eager mode the class of an input can decide what runs, and of which class the results are. Both are seen by calling
the model's forward() twice without data: with the inputs as they are, and with plain ones.
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


def output_kinds(model: nn.Module, call: Call) -> Kinds:
    """Return the subclass of each tensor that a model returns for a call; nothing where all inputs are plain.

    Raises:
        InputError: a plan of the plain tensors would not equal eager.
    """
    kinds = [one for one in call.likes if one is not None]
    if not kinds:
        return ()
    kind = _torch.kind_of(kinds[0])
    assert kind is not None, "it is of a subclass"
    try:
        ops, found = _called(model, call, as_they_are=True)
        plain_ops, _ = _called(model, call, as_they_are=False)
    except Exception as error:  # of the user's code, or of a class that reads values
        raise _refused(kind, f"what it computes with that cannot be followed ({type(error).__name__})") from error
    if ops != plain_ops:
        raise _refused(kind, "forward() computes something else with that than with a plain tensor")
    of_outputs = tuple(map(_torch.kind_of, found))
    own = next((one for one in of_outputs if one is not None and _torch.computes_by_itself(one)), None)
    if own is not None:
        raise _refused(kind, f"its __torch_function__ makes the outputs what they are, each a {own.__name__}")
    return of_outputs


def as_kinds(output: Any, kinds: Kinds) -> Any:
    """Return a model's output with its tensors of these subclasses."""
    if not any(kinds):
        return output
    tensors, structure = take_apart(output)
    return structure.rebuild(
        one if kind is None else _torch.dressed(one, kind) for one, kind in zip(tensors, kinds, strict=True)
    )


def _called(model: nn.Module, call: Call, *, as_they_are: bool) -> tuple[list[Any], Sequence[torch.Tensor]]:
    """Call forward() without data; return its ops and the tensors that it returns."""
    watch, names = Watch(model), _torch.OpNames()
    mode, fakes = _torch.fake_like(call.tensors)
    try:
        with _torch.fakes_dressed(), mode, names, watch.printed.held():
            if as_they_are:
                fakes = [
                    one if like is None else _torch.with_attributes(_torch.dressed(one, _kind(like)), like)
                    for one, like in zip(fakes, call.likes, strict=True)
                ]
            names.seen.clear()
            args, kwargs = call.rebuild(fakes)
            return names.seen, take_apart(model.forward(*args, **kwargs))[0]
    finally:
        watch.restore()


def _kind(tensor: torch.Tensor) -> type:
    kind = _torch.kind_of(tensor)
    assert kind is not None, "it is of a subclass"
    return kind


def _refused(kind: type, why: str) -> InputError:
    name = kind.__name__
    way = "x.as_tensor()" if hasattr(kind, "as_tensor") else "x.as_subclass(torch.Tensor)"
    return InputError(
        f"an input is a {name}, and {why}",
        expected="tensors of torch's own classes, or of one that leaves what is computed to torch",
        do=f"Pass the tensor that it is: {way}",
    )
