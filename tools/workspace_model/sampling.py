"""Random convolutions as real networks ask for them, in one, two and three dimensions.

Three in four are layers of common kinds of networks (residual, U-Net, patches, depthwise, transposed, causal 1D) at
random widths, resolutions and batch sizes; one in four combines sizes freely, as a stranger's network may.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod

from memplan.cudnn.questions import Kind, Question

KINDS: tuple[Kind, ...] = ("forward", "input gradient", "weight gradient")
_CHANNELS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 100, 112, 120, 128,
             144, 160, 192, 224, 240, 256, 288, 320, 384, 448, 480, 512, 576, 640, 672, 720, 768, 896, 960, 1024, 1152,
             1280, 1536, 2048)  # fmt: skip
_WIDTHS = (8, 16, 24, 32, 32, 48, 64, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256, 256, 320, 384, 512, 512, 768, 1024)
_SIZES = {
    1: (16, 32, 50, 64, 100, 128, 200, 250, 256, 400, 500, 512, 750, 1000, 1024, 1500, 2000, 2048, 3000, 4000, 4096,
        8000, 8192, 16000, 16384, 32000, 48000),
    2: (4, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 100, 112, 120, 128, 144, 150, 160,
        192, 200, 224, 240, 256, 299, 300, 320, 384, 400, 416, 448, 480, 512, 572, 600, 608, 640, 768, 800, 1024),
    3: (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 112, 128, 144, 160, 192),
}  # fmt: skip
_BATCHES = (1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 10, 12, 16, 16, 20, 24, 32, 32, 48, 64, 64, 96, 128, 256)
_DTYPES = ("float32",) * 50 + ("float16",) * 42 + ("bfloat16",) * 7 + ("float64",)
"""float16 and bfloat16 get the same workspaces in 96 to 98 % of convolutions, so most of one is enough."""
_MOST_BYTES = 6 * 2**30
_COMMON_BYTES = 2**30


def sample(seed: int) -> Iterator[Question]:
    """Yield random questions without end; the same seed gives the same ones.

    The three kinds of one layer follow each other, as they do in a training step.
    """
    rnd = random.Random(seed)
    seen = set[str]()
    while True:
        layer = _layer(rnd) if rnd.random() < 0.75 else _free(rnd)
        if layer is None:
            continue
        for kind in KINDS:
            question = Question(kind, *layer)
            if question.key not in seen:
                seen.add(question.key)
                yield question


def _free(rnd: random.Random) -> tuple[object, ...] | None:
    """Arguments of a Question after its kind, with sizes combined freely; None: no such convolution."""
    ranks = rnd.choice((1, 2, 2, 2, 3, 3))
    kernel = [rnd.choice((1, 1, 3, 3, 3, 3, 3, 5, 7, 2, 4, 9, 11, 6, 16) if ranks < 3 else (1, 3, 3, 3, 3, 2, 5, 4, 7))]
    kernel = kernel * ranks
    if rnd.random() < 0.08:
        kernel = [rnd.choice((1, 1, 3, 5, 7)) for _ in range(ranks)]
    even = kernel[0] in (2, 4, 6, 16)
    stride = [kernel[0] if even and rnd.random() < 0.6 else rnd.choice((1, 1, 1, 1, 2, 2, 3))] * ranks
    dilation = [1 if rnd.random() < 0.93 else rnd.choice((2, 2, 3, 4, 6, 8))] * ranks
    same = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    padding = rnd.choice(([0] * ranks, same, same, same))
    sizes = _spatial(rnd, ranks)
    inputs, outputs = rnd.choice(_CHANNELS), rnd.choice(_CHANNELS)
    if rnd.random() < 0.1:
        inputs = rnd.randint(1, 520)
    if rnd.random() < 0.1:
        outputs = rnd.randint(1, 520)
    return _described(rnd, rnd.choice(_BATCHES), inputs, outputs, sizes, kernel, stride, padding, dilation, 1)


def _layer(rnd: random.Random) -> tuple[object, ...] | None:
    """Arguments of a Question after its kind, for a layer of a common kind of network; None: no such convolution."""
    ranks = rnd.choice((1, 2, 2, 2, 2, 3, 3, 3))
    sizes = _spatial(rnd, ranks)
    width = rnd.choice(_WIDTHS)
    batch = rnd.choice(_BATCHES)
    style = rnd.choice(("same", "same", "same", "down", "point", "point", "first", "last", "join", "patch", "up", "up3",
                        "grouped", "dilated", "long", "pool"))  # fmt: skip
    inputs = outputs = width
    k, s, p, d, groups = 3, 1, 1, 1, 1
    if style == "same" and rnd.random() < 0.4:
        outputs = rnd.choice((width, width * 2, width // 2))
    elif style == "down":
        s, outputs = 2, rnd.choice((width, width * 2))
    elif style == "point":
        k, p, s = 1, 0, rnd.choice((1, 1, 1, 2))
        outputs = max(1, int(width * rnd.choice((0.25, 0.5, 1, 2, 4, 6))))
    elif style == "first":
        inputs, (k, s, p) = rnd.choice((1, 1, 2, 3, 3, 3, 4)), rnd.choice(((3, 1, 1), (3, 2, 1), (7, 2, 3), (5, 1, 2)))
    elif style == "last":
        outputs, (k, p) = rnd.choice((1, 2, 3, 4, 5, 10, 14, 19, 21, 80)), rnd.choice(((1, 0), (3, 1)))
    elif style == "join":
        inputs, outputs = width * rnd.choice((2, 3)), width
    elif style == "patch":
        k = s = rnd.choice((2, 4, 8, 14, 16, 32) if ranks < 3 else (2, 4, 8, 16))
        p, inputs = 0, rnd.choice((1, 3, 3, 4, width))
        sizes = [max(k, size // k * k) for size in sizes]
    elif style == "up":
        k, s, p, outputs = 2, 2, 0, rnd.choice((width, width * 2))
        sizes = [size * 2 for size in sizes]
    elif style == "up3":
        k, s, p = rnd.choice(((4, 2, 1), (3, 2, 1)))
        sizes = [size * 2 for size in sizes]
        outputs = rnd.choice((width, width * 2))
    elif style == "grouped":
        groups = rnd.choice((2, 4, 8, 32, width, width))
        k, s = rnd.choice((3, 3, 5, 7)), rnd.choice((1, 1, 2))
        p = k // 2
        if width % groups:
            return None
    elif style == "dilated":
        d = rnd.choice((2, 2, 4, 6, 8, 12, 18))
        p = d
    elif style == "long":
        k = rnd.choice((5, 7, 9, 11, 15)) if ranks < 3 else rnd.choice((5, 7))
        p = k // 2
    elif style == "pool":
        p = 0
    kernel, padding = [k] * ranks, [p] * ranks
    if style == "same" and ranks > 1 and rnd.random() < 0.12:  # factorised: 1x3x3, 3x1x1, 1x7
        axis = rnd.randrange(ranks)
        kernel[axis], padding[axis] = 1, 0
    return _described(rnd, batch, inputs, outputs, sizes, kernel, [s] * ranks, padding, [d] * ranks, groups)


def _spatial(rnd: random.Random, ranks: int) -> list[int]:
    sizes = [rnd.choice(_SIZES[ranks])] * ranks
    if ranks > 1 and rnd.random() < 0.35:
        sizes = [rnd.choice(_SIZES[ranks]) for _ in sizes]
    if rnd.random() < 0.2:
        sizes = [max(3, size + rnd.randint(-4, 4)) for size in sizes]
    return sizes


def _described(
    rnd: random.Random, batch: int, inputs: int, outputs: int, sizes: list[int], kernel: list[int], stride: list[int],
    padding: list[int], dilation: list[int], groups: int,
) -> tuple[object, ...] | None:  # fmt: skip
    ranks = len(sizes)
    result = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
    if min(result) < 1 or outputs < 1:
        return None
    dtype = rnd.choice(_DTYPES)
    last = ranks > 1 and dtype != "float64" and rnd.random() < 0.15
    depthwise = groups > 1 and groups == inputs
    if depthwise and not (last or ranks == 1 or dtype == "float16"):  # torch's own kernel
        last = True
        if dtype == "float64" or ranks == 1:
            return None
    itemsize = {"float32": 4, "float64": 8}.get(dtype, 2)
    elements = batch * max(inputs * prod(sizes), outputs * prod(result))
    most = _COMMON_BYTES if rnd.random() < 0.8 else _MOST_BYTES
    if elements * itemsize > most or elements >= 2**31:
        return None
    x, w, y = (batch, inputs, *sizes), (outputs, inputs // groups, *kernel), (batch, outputs, *result)
    if ranks == 1:  # torch computes it in two dimensions, with a height of 1
        x, w, y = ((*shape[:2], 1, *shape[2:]) for shape in (x, w, y))
        padding, stride, dilation = [0, *padding], [1, *stride], [1, *dilation]
    tf32 = dtype != "float32" or rnd.random() < 0.95
    return (tuple(x), tuple(w), tuple(y), last, dtype, tuple(padding), tuple(stride), tuple(dilation), (32, 32, 32),
            tf32, rnd.random() < 0.03)  # fmt: skip
