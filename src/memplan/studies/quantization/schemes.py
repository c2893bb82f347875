"""torchao's config for each quantization scheme, and the layers that it skips. Only this module imports torchao."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from memplan import _torch
from memplan._torch import dispatch
from memplan.errors import InputError, UsageError
from memplan.studies.quantization.quantized import Activations, Layer, Weights

GROUPS = (128, 64, 32)
"""Group sizes of 4-bit weights: a layer uses the largest that divides its inputs; a group shares a scale and a zero."""


@dataclass(frozen=True)
class Scheme:
    """Dtypes of quantized weights and activations, and torchao's config for them."""

    weights: Weights
    activations: Activations | None
    title: str
    """Name of torchao's config."""
    config: Callable[[int], Any] | None
    """Makes the config for a group size; None if this torchao has none that runs on this machine."""
    why_not: str = ""
    """Why there is no ``config``."""


def scheme_of(weights: str | None, activations: str | None) -> Scheme:
    """Return the scheme for dtypes of weights and activations.

    Raises:
        InputError: no such scheme.
        UsageError: torchao is not installed.
    """
    if weights not in get_args(Weights):
        raise InputError(
            f"weights={weights!r}" + (f" with activations={activations!r}" if activations else ""),
            expected=f"weights in {' or '.join(get_args(Weights))}: activations are quantized only beside them",
            do="Say which (--weights int8)",
        )
    if activations not in (None, *get_args(Activations)):
        raise InputError(
            f"activations={activations!r}",
            expected=f"{' or '.join(get_args(Activations))}, or none",
            do="Leave it out for weights alone",
        )
    api = _import_torchao()
    # set_inductor_config=True would set options of Inductor for the whole process, and here everything runs eagerly
    if weights == "int8" and activations is None:
        return Scheme(
            "int8",
            activations=None,
            title="Int8WeightOnlyConfig",
            config=lambda _: api.Int8WeightOnlyConfig(set_inductor_config=False),
        )
    if weights == "int8":
        dynamic = api.Int8DynamicActivationInt8WeightConfig
        return Scheme("int8", "int8", dynamic.__name__, lambda _: dynamic(set_inductor_config=False))
    if activations is None:
        return _int4_scheme()
    return _int4_dynamic_scheme()


def _int4_scheme() -> Scheme:
    """Return the scheme of 4-bit weights; without a config if this torchao has none for the CPU."""
    title = "PrototypeInt4WeightOnlyConfig"
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig as config
    except ImportError:
        return Scheme(
            "int4", activations=None, title=title, config=None, why_not="this torchao has no 4-bit weights for the CPU"
        )
    return Scheme(
        "int4", activations=None, title=title, config=lambda group: config(group_size=group, set_inductor_config=False)
    )


def _int4_dynamic_scheme() -> Scheme:
    """Return the scheme of 4-bit weights and 8-bit activations; without a config if torchao has no kernel for it
    here."""
    title = "Int8DynamicActivationInt4WeightConfig"
    try:
        from torchao.prototype.quantization.int4 import Int8DynamicActivationInt4WeightConfig as config
    except ImportError:
        return Scheme(
            "int4", activations="int8", title=title, config=None,
            why_not="this torchao has no 4-bit weights for the CPU",
        )  # fmt: skip
    if not dispatch.has_cpu_kernel("torchao::da8w4_linear_cpu"):
        return Scheme(
            "int4", activations="int8", title=title, config=None,
            why_not="its kernel da8w4_linear_cpu is not in this build of torchao",
        )  # fmt: skip
    return Scheme("int4", "int8", title, lambda group: config(group_size=group, set_inductor_config=False))


def _import_torchao() -> Any:
    """Return torchao's module of quantization. Raises UsageError if it is not installed."""
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about its GPU kernels that do not load here
    try:
        import torchao.quantization as api
    except ImportError as error:
        raise UsageError(
            f"torchao cannot be imported ({error})",
            expected="torchao, which quantizes the model",
            do="Install it: pip install 'memplan[quantize]'",
        ) from error
    finally:
        logger.setLevel(level)
    return api


def quantize_weights(model: nn.Module, scheme: Scheme) -> None:
    """Quantize a model in place. Raises UsageError if torchao refuses a weight."""
    assert scheme.config is not None, "a scheme that does not run was refused"
    api = _import_torchao()
    for group in GROUPS if scheme.weights == "int4" else GROUPS[:1]:
        layers = {
            name
            for name, module in model.named_modules()
            if why_not_quantized(module, scheme) is None and (scheme.weights == "int8" or _group_size(module) == group)
        }
        if not layers:
            continue
        try:
            api.quantize_(model, scheme.config(group), filter_fn=lambda module, name, layers=layers: name in layers)
        except Exception as error:  # torchao can refuse a weight with any exception
            raise UsageError(
                f"torchao's {scheme.title} raised {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}",
                expected="weights that it can quantize here",
                do="Try --weights int8, or another dtype of the model (--dtype bf16)",
            ) from error


def why_not_quantized(module: nn.Module, scheme: Scheme) -> str | None:
    """Return why a scheme does not quantize a layer; None if it does."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "the attention around it reads its weight itself"
    if not isinstance(module, nn.Linear):
        return f"torchao quantizes nn.Linear, not {type(module).__name__}"
    if scheme.weights == "int4" and _group_size(module) is None:
        return f"its {module.in_features} inputs are no multiple of {GROUPS[-1]}, the smallest group"
    outputs = 32 if scheme.activations else 16
    if scheme.weights == "int4" and module.out_features % outputs:
        return f"its {module.out_features} outputs are no multiple of {outputs}, as the kernel wants them"
    return None


def _group_size(module: nn.Module) -> int | None:
    """Return the largest of `GROUPS` that divides a layer's inputs; None if none does."""
    inputs = module.in_features if isinstance(module, nn.Linear) else 1
    return next((group for group in GROUPS if inputs % group == 0), None)


def packed_bytes(module: nn.Linear, scheme: Scheme) -> int:
    """Return the bytes of a layer's weight in 4 bits: two elements a byte, and a scale and a zero for each group.

    With 8-bit activations, scales are float32 and zeros one byte each; padding by the kernel is not counted.
    """
    groups = module.in_features // (_group_size(module) or module.in_features)
    scale_and_zero = torch.float32.itemsize + 1 if scheme.activations else 2 * module.weight.element_size()
    return module.weight.numel() // 2 + groups * module.out_features * scale_and_zero


def layers_of(before: nn.Module, scheme: Scheme, after: nn.Module | None) -> tuple[Layer, ...]:
    """Return a row for every layer with a weight of two or more dimensions.

    A weight that several layers share counts for the first of them.

    ``after``: the quantized model; None if the scheme does not run here, and its bytes are computed by
    `packed_bytes`.
    """
    modules_after = dict(after.named_modules()) if after is not None else {}
    sharing_layers = _sharing_layers(before)
    rows: list[Layer] = []
    seen_before, seen_after = set[int](), set[int]()
    for path, module in before.named_modules():
        weights = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() > 1}
        if not weights:
            continue
        why = why_not_quantized(module, scheme)
        bytes_before = _new_bytes(weights.values(), seen_before)
        if after is not None:
            bytes_after = _new_bytes([getattr(modules_after[path], name) for name in weights], seen_after)
        elif why is None and isinstance(module, nn.Linear):
            bytes_after = packed_bytes(module, scheme)
        else:
            bytes_after = bytes_before
        quantized = [name for name, layer in sharing_layers.get(path, ()) if why_not_quantized(layer, scheme) is None]
        if why is not None and quantized:
            why += f"; {quantized[0]} shares its weight and got one of its own in {scheme.weights}"
        rows.append(Layer(path or type(module).__name__, type(module).__name__, bytes_before, bytes_after, why))
    return tuple(rows)


def _new_bytes(weights: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of the weights' storages that are not in ``seen``, and add them to it."""
    total = 0
    for weight in weights:
        for tensor in _torch.inner_tensors(weight).values():
            storage = tensor.untyped_storage()
            key = _torch.storage_key(storage)
            total += 0 if key in seen else storage.nbytes()
            seen.add(key)
    return total


def _sharing_layers(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Return, by name of a layer, the other layers (name, module) that share one of its parameters."""
    layers_of_parameter: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            layers_of_parameter.setdefault(id(parameter), []).append((path, module))
    sharing: dict[str, list[tuple[str, nn.Module]]] = {}
    for layers in layers_of_parameter.values():
        for path, _ in layers:
            sharing.setdefault(path, []).extend(layer for layer in layers if layer[0] != path)
    return sharing
