"""Functions recorded as segments, to run piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memplan.planning.tiles.program import Program, Recorder


def recorded(
    function: Callable[..., Any], inputs: Sequence[Tensor], static: Iterable[Tensor] = ()
) -> tuple[Program, list[Tensor]]:
    """Return a function's program and the tensors that it reads. ``static``: parameters and buffers."""
    recorder, known = Recorder(), {id(tensor): tensor for tensor in static}

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not tensors or not all(id(tensor) in known for tensor in tensors):
                return recorder.call(func, args, kwargs or {}, lambda tensor: id(tensor) in known)
            result = func(*args, **(kwargs or {}))
            known.update({id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)})
            return result

    with Recording():
        results = function(*inputs)
    results = [results] if isinstance(results, Tensor) else list(results)
    return recorder.program(results), list(recorder.sources.values())


def differentiated(results: Sequence[Tensor], tensors: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Return the gradients of tensors for random gradients of the results, which are the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    incoming = [torch.randn(result.shape, generator=generator, dtype=result.dtype) for result in results]
    computed = torch.autograd.grad(results, tensors, incoming, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, computed, strict=True)]
