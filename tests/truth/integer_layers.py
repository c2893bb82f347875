"""Layers in eight bits as they are written down: folded weights, integers of unlimited size, padded planes.

By Jacob et al. (CVPR 2018): a result is ``zero + sum * m / 2 ** n``, with a 31-bit m, rounded half up.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Integer:
    """Integers, and what they stand for."""

    numbers: np.ndarray
    """Python integers."""
    scale: float
    zeros: np.ndarray
    """For each channel, or one for all."""


class Plus(nn.Module):
    """``x + layers(x)``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Gate(nn.Module):
    """``x * layers(x)``, where the layers make one number of each channel."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers(x)


BOUNDS: dict[type, tuple[float, float]] = {nn.ReLU: (0.0, math.inf), nn.ReLU6: (0.0, 6.0)}
FUNCTIONS = (nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.SiLU)


def rounded(products: np.ndarray, real: float) -> np.ndarray:
    """Products with a real number, rounded half up."""
    bits = 30 - math.floor(math.log2(real))  # so that m has 31 bits
    m = round(math.ldexp(real, bits))
    return (products * m + 2 ** (bits - 1)) // 2**bits


def within(numbers: np.ndarray, low: int = -128, high: int = 127) -> np.ndarray:
    return np.vectorize(lambda q: max(low, min(high, int(q))), otypes=[object])(numbers)


def pair(size: Any, one: int) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) and one < 0 else (one, size) if isinstance(size, int) else (
        (one, size[0]) if len(size) == 1 else (size[0], size[1]))  # fmt: skip


class Network:
    """Runs modules on integers.

    Args:
        rows: the report of each layer, in order: scale, zero, and those before an activation.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = iter(rows)

    def run(self, modules: list[nn.Module], x: Integer) -> Integer:
        """Return what the modules compute."""
        at = 0
        while at < len(modules):
            module, at = modules[at], at + 1
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
                behind = [type(m) for m in modules[at : at + 2]]
                norm = modules[at] if behind and issubclass(behind[0], (nn.BatchNorm1d, nn.BatchNorm2d)) else None
                at += norm is not None
                act = modules[at] if at < len(modules) and isinstance(modules[at], (*BOUNDS, *FUNCTIONS)) else None
                at += act is not None
                x = self.convolved(module, norm, act, x)
            elif isinstance(module, Plus):
                inner = self.run(list(module.layers), x)
                act = modules[at] if at < len(modules) and isinstance(modules[at], tuple(BOUNDS)) else None
                at += act is not None
                x = self.added(x, inner, act)
            elif isinstance(module, Gate):
                x = self.multiplied(x, self.run(list(module.layers), x))
            elif isinstance(module, nn.Flatten):
                x = replace(x, numbers=x.numbers.reshape(len(x.numbers), -1))
            elif isinstance(module, (nn.MaxPool1d, nn.MaxPool2d)):
                row = next(self.rows)
                assert (row.scale, row.zero) == (x.scale, int(x.zeros)), "a largest element is one of them"
                windows = self.windows(x.numbers, module.kernel_size, module.stride, module.padding, 1, -128)
                x = replace(x, numbers=windows.max(axis=-1))
            elif isinstance(module, nn.AvgPool2d):
                windows = self.windows(x.numbers - x.zeros, module.kernel_size, module.stride, module.padding, 1, 0)
                x = self.averaged(windows, x.scale)
            elif isinstance(module, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)):
                kept = 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2
                windows = (x.numbers - x.zeros).reshape(*x.numbers.shape[:2], *[1] * kept, -1)
                x = self.averaged(windows, x.scale)
            else:
                assert isinstance(module, FUNCTIONS), module
                row = next(self.rows)
                x = self.function(module, x, row)
        return x

    # -- layers

    def convolved(self, module: Any, norm: Any, act: nn.Module | None, x: Integer) -> Integer:
        row = next(self.rows)
        weight = module.weight.detach().double().numpy()
        bias = np.zeros(len(weight)) if module.bias is None else module.bias.detach().double().numpy()
        if norm is not None:
            factor = norm.weight.detach().double().numpy() / np.sqrt(norm.running_var.double().numpy() + norm.eps)
            weight = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
            bias = (bias - norm.running_mean.double().numpy()) * factor + norm.bias.detach().double().numpy()
        if isinstance(module, nn.Linear):
            weight = weight.reshape(*weight.shape, 1)
            numbers = x.numbers.reshape(len(x.numbers), -1, 1)
            stride = padding = dilation = None
            groups = 1
        else:
            numbers, stride, padding = x.numbers, module.stride, module.padding
            dilation, groups = module.dilation, module.groups
        before, zero = (row.scale, row.zero) if row.before is None else row.before
        steps = [max(np.abs(w).max() / 127, abs(b) / (x.scale * 2**30)) for w, b in zip(weight, bias, strict=True)]
        integer = [[round(v / step) for v in w.reshape(-1).tolist()] for w, step in zip(weight, steps, strict=True)]
        centred = numbers - x.zeros.reshape(-1, *[1] * (numbers.ndim - 2))
        windows = self.windows(centred, weight.shape[2:], stride, padding, dilation, 0)  # (N, C, rows, columns, size)
        wide = len(weight) // groups
        results = list[np.ndarray]()
        for o, (row_of_weights, step) in enumerate(zip(integer, steps, strict=True)):
            first = o // wide * weight.shape[1]
            part = windows[:, first : first + weight.shape[1]]
            weights = np.array(row_of_weights, dtype=object).reshape(weight.shape[1], 1, 1, -1)
            total = (part * weights).sum(axis=(1, -1)) + round(bias[o] / (x.scale * step))
            results.append(rounded(total, x.scale * step / before) + zero)
        low, high = bounds_of(act, before, zero)
        shape = numbers.shape[:1] + ((len(weight),) if isinstance(module, nn.Linear) else ())
        stacked = within(np.stack(results, axis=1), low, high)
        stacked = stacked.reshape(shape) if isinstance(module, nn.Linear) else stacked
        stacked = stacked[:, :, 0] if isinstance(module, nn.Conv1d) else stacked
        found = Integer(stacked, before, np.array(zero))
        return self.function(act, found, row) if isinstance(act, FUNCTIONS) else found

    def function(self, module: nn.Module, x: Integer, row: Any) -> Integer:
        """A function of each element, in float64."""
        real = torch.from_numpy(x.scale * (x.numbers - x.zeros).astype(np.float64))
        numbers = within(np.rint(module(real).numpy() / row.scale).astype(int).astype(object) + row.zero)
        return Integer(numbers, row.scale, np.array(row.zero))

    def added(self, x: Integer, y: Integer, act: nn.Module | None) -> Integer:
        row = next(self.rows)
        largest = max(x.scale, y.scale) / row.scale
        bits = 30 - math.floor(math.log2(largest))
        factors = [round(math.ldexp(one.scale / row.scale, bits)) for one in (x, y)]
        total = (x.numbers - x.zeros) * factors[0] + (y.numbers - y.zeros) * factors[1]
        total = (total + 2 ** (bits - 1)) // 2**bits + row.zero
        return Integer(within(total, *bounds_of(act, row.scale, row.zero)), row.scale, np.array(row.zero))

    def multiplied(self, x: Integer, y: Integer) -> Integer:
        row = next(self.rows)
        products = (x.numbers - x.zeros) * (y.numbers - y.zeros)
        numbers = within(rounded(products, x.scale * y.scale / row.scale) + row.zero)
        return Integer(numbers, row.scale, np.array(row.zero))

    def averaged(self, windows: np.ndarray, scale: float) -> Integer:
        row = next(self.rows)
        total = rounded(windows.sum(axis=-1), scale / (row.scale * windows.shape[-1]))
        return Integer(within(total + row.zero), row.scale, np.array(row.zero))

    def windows(
        self, numbers: np.ndarray, kernel: Any, stride: Any, padding: Any, dilation: Any, around: int
    ) -> np.ndarray:
        """The windows over planes: (N, C, rows, columns, elements)."""
        planes = numbers if numbers.ndim == 4 else numbers[:, :, None]
        flat = -1 if numbers.ndim == 4 else 1
        (kh, kw), (sh, sw), (dh, dw) = (pair(s or 1, flat) for s in (kernel, stride, dilation))
        ph, pw = pair(padding, -1 if numbers.ndim == 4 else 0) if padding else (0, 0)
        n, c, height, width = planes.shape
        padded = np.full((n, c, height + 2 * ph, width + 2 * pw), around, dtype=object)
        padded[:, :, ph : ph + height, pw : pw + width] = planes
        rows = range(0, height + 2 * ph - (kh - 1) * dh, sh)
        columns = range(0, width + 2 * pw - (kw - 1) * dw, sw)
        found = np.empty((n, c, len(rows), len(columns), kh * kw), dtype=object)
        for (i, r), (j, k) in itertools.product(enumerate(rows), enumerate(columns)):
            part = padded[:, :, r : r + (kh - 1) * dh + 1 : dh, k : k + (kw - 1) * dw + 1 : dw]
            found[:, :, i, j] = part.reshape(n, c, -1)
        return found


def bounds_of(act: nn.Module | None, scale: float, zero: int) -> tuple[int, int]:
    """The integers of an activation's bounds."""
    low, high = BOUNDS.get(type(act), (-math.inf, math.inf))
    return (
        -128 if low == -math.inf else max(-128, round(low / scale) + zero),
        127 if high == math.inf else min(127, round(high / scale) + zero),
    )
