"""Single layers whose memory on CUDA is checked one formula at a time: forward and backward, gradients kept.

`LAYERS` maps a name to a `build`. None names a device: whoever runs one says where its tensors go. The published
figures of `cross_entropy_4096`, `cross_entropy_131072` and `llama_mlp` were measured like this: ``.grad`` held from
step to step, the output's gradient made beforehand, the graph retained while it is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Step = Callable[[], None]
Build = Callable[[], Step]
LAYERS: dict[str, Build] = {}
HALF = torch.bfloat16


def layer(name: str, build: Build) -> None:
    """Enter a build under a name; its random numbers start from the same seed every time."""

    def seeded() -> Step:
        torch.manual_seed(0)
        return build()

    seeded.__name__ = name
    LAYERS[name] = seeded


def backward_of(
    run: Callable[[], Tensor], *shape: int, dtype: torch.dtype = torch.float32, retain: bool = False
) -> Step:
    """A step that runs forward and backward, given the shape and dtype of the output."""
    gradient = torch.randn(*shape, dtype=dtype)

    def step() -> None:
        output = run()
        output.backward(gradient, retain_graph=retain)

    return step


def on_input(make: Callable[[], nn.Module], shape: tuple[int, ...], out: tuple[int, ...] | None = None,
             dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Build:  # fmt: skip
    """A module's forward and backward on one input that needs a gradient; ``out`` where the shape changes."""

    def build() -> Step:
        module = make().to(dtype)
        x = torch.randn(*shape, dtype=dtype)
        if channels_last:
            layout: Any = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            module, x = module.to(memory_format=layout), x.contiguous(memory_format=layout)
        x.requires_grad_()
        return backward_of(lambda: module(x), *(out or shape), dtype=dtype)

    return build


def cross_entropy(classes: int) -> Build:
    """16384 rows of float32 logits."""

    def build() -> Step:
        logits = torch.randn(16384, classes, requires_grad=True)
        targets = torch.randint(classes, (16384,))

        def step() -> None:
            loss = F.cross_entropy(logits, targets)
            loss.backward(retain_graph=True)

        return step

    return build


class LlamaMlp(nn.Module):
    """Two projections up, silu of one times the other, one projection down; no biases."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def llama_mlp() -> Step:
    """4 x 1024 tokens through 4096 -> 11008 -> 4096, all bfloat16."""
    module = LlamaMlp(4096, 11008).to(HALF)
    x = torch.randn(4, 1024, 4096, dtype=HALF, requires_grad=True)
    return backward_of(lambda: module(x), 4, 1024, 4096, dtype=HALF, retain=True)


def swiglu() -> Step:
    """silu(a) * b on bfloat16 tensors, without the projections."""
    a, b = (torch.randn(4, 1024, 11008, dtype=HALF, requires_grad=True) for _ in range(2))
    return backward_of(lambda: F.silu(a) * b, 4, 1024, 11008, dtype=HALF)


def batched_product() -> Step:
    """A product of 32 matrices each, the second one transposed."""
    a, b = (torch.randn(32, 768, 640, dtype=HALF, requires_grad=True) for _ in range(2))
    return backward_of(lambda: a @ b.transpose(1, 2), 32, 768, 768, dtype=HALF)


def autocast_mlp() -> Step:
    """float32 weights, and their bfloat16 copies for the length of the autocast."""
    module = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
    x = torch.randn(4096, 2048)

    def step() -> None:
        with torch.autocast("cpu", dtype=HALF):  # whoever puts the step on the card makes this "cuda"
            loss = module(x).float().pow(2).mean()
        loss.backward()

    return step


def embedding() -> Step:
    """32000 rows of 1024 features; the gradient is dense."""
    table, ids = nn.Embedding(32000, 1024), torch.randint(32000, (8, 1024))
    return backward_of(lambda: table(ids), 8, 1024, 1024)


def embedding_bag() -> Step:
    """Sums over bags of 16."""
    table, ids = nn.EmbeddingBag(32000, 512, mode="sum"), torch.randint(32000, (4096, 16))
    return backward_of(lambda: table(ids), 4096, 512)


def attention(kernel: SDPBackend | None, dtype: torch.dtype, *, head: int = 64, heads: int = 16, key_heads: int = 16,
              mask: bool = False, causal: bool = False, dropout: float = 0.0) -> Build:  # fmt: skip
    """F.scaled_dot_product_attention of 4 x 1024 tokens, one kernel alone allowed where one is given."""

    def build() -> Step:
        shapes = ((4, count, 1024, head) for count in (heads, key_heads, key_heads))
        q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
        bias = torch.randn(4, 1, 1024, 1024, dtype=dtype) if mask else None

        def run() -> Tensor:
            with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=causal, dropout_p=dropout, enable_gqa=heads != key_heads
                )

        return backward_of(run, 4, heads, 1024, head, dtype=dtype)

    return build


def recurrent(kind: type[nn.RNNBase], dtype: torch.dtype = torch.float32, **options: Any) -> Build:
    """64 sequences of 128 x 256 features, 512 hidden ones."""

    def build() -> Step:
        module = kind(256, 512, batch_first=True, **options).to(dtype)
        x = torch.randn(64, 128, 256, dtype=dtype, requires_grad=True)
        width = 1024 if options.get("bidirectional") else 512
        return backward_of(lambda: module(x)[0], 64, 128, width, dtype=dtype)

    return build


def benchmarked_convolution() -> Step:
    """cuDNN tries its algorithms in the first step: the largest workspace of any is allocated then."""
    module = nn.Conv2d(64, 128, 3, padding=1)
    x = torch.randn(16, 64, 112, 112, requires_grad=True)
    step = backward_of(lambda: module(x), 16, 128, 112, 112)

    def benchmarked() -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            step()

    return benchmarked


def evaluated_batch_norm() -> Step:
    """Running statistics, a gradient for the input alone."""
    module = nn.BatchNorm2d(128).eval().requires_grad_(False)
    x = torch.randn(16, 128, 64, 64, requires_grad=True)
    return backward_of(lambda: module(x), 16, 128, 64, 64)


def _losses_and_products() -> None:
    layer("cross_entropy_4096", cross_entropy(4096))
    layer("cross_entropy_131072", cross_entropy(131072))
    layer("llama_mlp", llama_mlp)
    layer("swiglu", swiglu)
    layer("linear", on_input(lambda: nn.Linear(2048, 4096), (4096, 2048), (4096, 4096)))
    layer("linear_bf16", on_input(lambda: nn.Linear(2048, 4096), (4096, 2048), (4096, 4096), HALF))
    layer("linear_no_bias", on_input(lambda: nn.Linear(2048, 4096, bias=False), (4096, 2048), (4096, 4096)))
    layer("batched_product", batched_product)
    layer("autocast_mlp", autocast_mlp)
    layer("embedding", embedding)
    layer("embedding_bag", embedding_bag)
    layer("softmax", on_input(lambda: nn.Softmax(-1), (16, 512, 4096)))
    layer("gelu", on_input(nn.GELU, (4096, 8192)))
    layer("dropout", on_input(lambda: nn.Dropout(0.1), (4096, 8192)))
    layer("dropout_bf16", on_input(lambda: nn.Dropout(0.1), (4096, 8192), dtype=HALF))


def _norms() -> None:
    tokens, pictures = (4, 2048, 4096), (16, 128, 64, 64)
    layer("layer_norm", on_input(lambda: nn.LayerNorm(4096), tokens))
    layer("layer_norm_bf16", on_input(lambda: nn.LayerNorm(4096), tokens, dtype=HALF))
    layer("rms_norm", on_input(lambda: nn.RMSNorm(4096), tokens))
    layer("rms_norm_bf16", on_input(lambda: nn.RMSNorm(4096), tokens, dtype=HALF))
    layer("group_norm", on_input(lambda: nn.GroupNorm(16, 128), pictures))
    layer("instance_norm", on_input(lambda: nn.InstanceNorm2d(128, affine=True), pictures))
    layer("batch_norm", on_input(lambda: nn.BatchNorm2d(128), pictures))
    layer("batch_norm_bf16", on_input(lambda: nn.BatchNorm2d(128), pictures, dtype=HALF))
    layer("batch_norm_channels_last", on_input(lambda: nn.BatchNorm2d(128), pictures, channels_last=True))
    layer(
        "batch_norm_channels_last_bf16",
        on_input(lambda: nn.BatchNorm2d(128), pictures, dtype=HALF, channels_last=True),
    )
    layer("batch_norm_3d", on_input(lambda: nn.BatchNorm3d(32), (2, 32, 48, 48, 48)))
    layer("batch_norm_eval", evaluated_batch_norm)


def _attentions() -> None:
    single = torch.float32
    layer("attention", attention(None, single))
    layer("attention_bf16", attention(None, HALF, causal=True))
    layer("attention_flash", attention(SDPBackend.FLASH_ATTENTION, HALF))
    layer("attention_flash_128", attention(SDPBackend.FLASH_ATTENTION, HALF, head=128, causal=True))
    layer("attention_flash_dropout", attention(SDPBackend.FLASH_ATTENTION, HALF, dropout=0.1))
    layer("attention_flash_grouped", attention(SDPBackend.FLASH_ATTENTION, HALF, key_heads=4, causal=True))
    layer("attention_efficient", attention(SDPBackend.EFFICIENT_ATTENTION, single))
    layer("attention_efficient_mask", attention(SDPBackend.EFFICIENT_ATTENTION, single, mask=True))
    layer("attention_efficient_bf16", attention(SDPBackend.EFFICIENT_ATTENTION, HALF, dropout=0.1))
    layer("attention_cudnn", attention(SDPBackend.CUDNN_ATTENTION, HALF))
    layer("attention_cudnn_128", attention(SDPBackend.CUDNN_ATTENTION, HALF, head=128, causal=True))
    layer("attention_math", attention(SDPBackend.MATH, single))
    layer("attention_math_bf16", attention(SDPBackend.MATH, HALF, causal=True))


def _recurrent_layers() -> None:
    layer("lstm", recurrent(nn.LSTM))
    layer("lstm_dropout", recurrent(nn.LSTM, num_layers=2, dropout=0.2))
    layer("lstm_bidirectional", recurrent(nn.LSTM, num_layers=2, bidirectional=True))
    layer("lstm_bf16", recurrent(nn.LSTM, HALF))
    layer("gru", recurrent(nn.GRU, num_layers=2))


def _convolutions() -> None:
    same: dict[str, Any] = {"padding": 1}
    small, wide = (16, 64, 56, 56), (16, 128, 56, 56)
    layer("conv2d_3x3", on_input(lambda: nn.Conv2d(64, 128, 3, **same), small, wide))
    layer("conv2d_3x3_bf16", on_input(lambda: nn.Conv2d(64, 128, 3, **same), small, wide, HALF))
    layer(
        "conv2d_3x3_channels_last_bf16",
        on_input(lambda: nn.Conv2d(64, 128, 3, **same), small, wide, HALF, channels_last=True),
    )
    layer("conv2d_1x1", on_input(lambda: nn.Conv2d(64, 128, 1), small, wide))
    layer("conv2d_7x7", on_input(lambda: nn.Conv2d(3, 64, 7, 2, 3), (16, 3, 224, 224), (16, 64, 112, 112)))
    layer("conv2d_dilated", on_input(lambda: nn.Conv2d(64, 64, 3, padding=4, dilation=4), small))
    layer("conv2d_depthwise", on_input(lambda: nn.Conv2d(64, 64, 3, **same, groups=64), small))
    layer("conv2d_grouped", on_input(lambda: nn.Conv2d(64, 128, 3, **same, groups=8), small, wide))
    layer("conv_transpose2d", on_input(lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), small, (16, 32, 112, 112)))
    layer("conv1d", on_input(lambda: nn.Conv1d(64, 128, 7, padding=3), (16, 64, 4096), (16, 128, 4096)))
    layer("conv3d_3x3x3", on_input(lambda: nn.Conv3d(16, 32, 3, **same), (2, 16, 64, 64, 64), (2, 32, 64, 64, 64)))
    layer("conv3d_shallow", on_input(lambda: nn.Conv3d(16, 32, 3, **same), (2, 16, 4, 96, 96), (2, 32, 4, 96, 96)))
    layer(
        "conv3d_3x3x3_bf16",
        on_input(lambda: nn.Conv3d(16, 32, 3, **same), (2, 16, 64, 64, 64), (2, 32, 64, 64, 64), HALF),
    )
    layer("conv2d_benchmark", benchmarked_convolution)


_losses_and_products()
_norms()
_attentions()
_recurrent_layers()
_convolutions()
