"""Which of its arguments a call of a torch function changes in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from memplan import _torch


class ChangedTensors:
    """The tensors among the arguments of a call, before it runs.

    Neither source of changes is complete. A function's name does not tell of an ``inplace`` by position, of operators
    of other libraries, or of calls inside of it: autograd's version counters do. They do not count the changes of a
    batch norm's running statistics: see `updated_statistics`.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.operands = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._versions = list(map(_version, self.operands))
        """Autograd's version counter of each before the call."""
        self._changed_by_name = self.operands[:1] if _changes_first(func, kwargs) else []
        """Tensors that the call changes according to its function's name, or as ``out``."""
        self._changed_by_name += [leaf for leaf in _torch.tree_leaves(kwargs.get("out")) if isinstance(leaf, Tensor)]

    def changed_operands(self) -> list[Tensor]:
        """Return the tensors that the call changed in place, each once. Called after it ran."""
        pairs = zip(self.operands, self._versions, strict=True)
        changed_by_version = [tensor for tensor, version_before in pairs if _version(tensor) != version_before]
        return list({id(tensor): tensor for tensor in (*self._changed_by_name, *changed_by_version)}.values())


def _version(tensor: Tensor) -> int:
    """Return autograd's version of a tensor; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else _torch.version_of(tensor)


def _changes_first(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the name of a torch function says that it changes its first tensor: ``relu_``, ``+=``,
    ``x[0] = y``, ``x.data = y``, or with ``inplace=True``."""
    name = getattr(func, "__name__", "")
    if name in ("__setitem__", "__delitem__", "__set__"):
        return True
    if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__"):
        return True
    return kwargs.get("inplace") is True


_NORM_PARAMETERS = "input", "running_mean", "running_var", "weight", "bias", "training"
"""First parameters of torch's batch norm and instance norm; the latter calls the last one ``use_input_stats``."""


def updated_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the running statistics that a call of a batch or instance norm updates."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    named = {**dict(zip(_NORM_PARAMETERS, args, strict=False)), **kwargs}
    trains = named.get("training", named.get("use_input_stats", func is F.instance_norm))
    statistics = named.get("running_mean"), named.get("running_var")
    return [tensor for tensor in statistics if trains and isinstance(tensor, Tensor)]
