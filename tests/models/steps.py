"""Steps as people write them: each function is a ``build``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Build = Callable[[], Callable[[], Any]]
STEPS: dict[str, Build] = {}
WORKERS = 0
"""Of data loaders: a recording takes any number as 0, and a measurement of one process wants 0."""


def step(build: Build) -> Build:
    """Register a build under its name."""
    STEPS[build.__name__] = build
    return build


def mlp(width: int = 192, layers: int = 4) -> nn.Sequential:
    """Linear and ReLU in turns."""
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])


def plain(model: nn.Module, x: torch.Tensor, optimizer: Any = None) -> Callable[[], None]:
    """zero_grad, forward, backward, update."""
    updater = optimizer(model.parameters()) if optimizer else None

    def run() -> None:
        (updater or model).zero_grad()
        model(x).float().pow(2).mean().backward()
        if updater:
            updater.step()

    return run


@step
def in_place() -> Any:
    model = nn.Sequential(
        nn.Linear(192, 192), nn.ReLU(True), nn.Linear(192, 192), nn.SiLU(True), nn.Linear(192, 192), nn.Hardswish(True),
        nn.Linear(192, 192), nn.LeakyReLU(0.1, True), nn.Linear(192, 192), nn.Dropout(0.1, True),
    )  # fmt: skip
    return plain(model, torch.randn(384, 192))


@step
def views_and_detach() -> Any:
    model, x = mlp(), torch.randn(192, 192)

    def run() -> None:
        model.zero_grad()
        h = model(x)
        a = h[:, :96].transpose(0, 1).contiguous()
        b, c = h.view(-1)[::2].clone(), h.detach() * 2
        with torch.no_grad():
            d = (h * 3).sum()
        (a.sum() * d + b.pow(2).sum() + (h * c).sum()).backward()

    return run


@step
def checkpoint_reentrant() -> Any:
    blocks = nn.ModuleList([mlp(192, 3) for _ in range(4)])
    x = torch.randn(512, 192, requires_grad=True)

    def run() -> None:
        blocks.zero_grad()
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=True)
        h.sum().backward()

    return run


@step
def checkpoint_of_a_function() -> Any:
    weights = [nn.Parameter(torch.randn(192, 192)) for _ in range(4)]
    x = torch.randn(512, 192)

    def block(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sigmoid(h @ weight) * h)

    def run() -> None:
        for weight in weights:
            weight.grad = None
        h = x
        for weight in weights:
            h = checkpoint(block, h, weight, use_reentrant=False)
        h.sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.grad, alpha=0.1)  # pyright: ignore[reportArgumentType]  # it has one by now

    return run


@step
def checkpoint_in_segments() -> Any:
    model, x = mlp(192, 8), torch.randn(512, 192, requires_grad=True)

    def run() -> None:
        model.zero_grad()
        checkpoint_sequential(model, 4, x, use_reentrant=False).sum().backward()

    return run


@step
def autocast() -> Any:
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(),
        nn.Linear(32 * 16 * 16, 64),
    )  # fmt: skip
    x, optimizer = torch.randn(8, 8, 16, 16), torch.optim.AdamW(model.parameters())

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()

    return run


@step
def grad_scaler_and_clipping() -> Any:
    model, x = mlp(), torch.randn(384, 192)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def run() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run


@step
def accumulation_and_two_losses() -> Any:
    model, one, two = mlp(), nn.Linear(192, 10), nn.Linear(192, 20)
    x = torch.randn(192, 192)
    optimizer = torch.optim.Adam([*model.parameters(), *one.parameters(), *two.parameters()])

    def run() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            h = model(x)
            (one(h).pow(2).mean() + two(h).abs().mean()).backward()
        optimizer.step()

    return run


@step
def retained_graph() -> Any:
    model, x = mlp(), torch.randn(192, 192)

    def run() -> None:
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        (loss * 2).backward()

    return run


@step
def frozen_and_tied() -> Any:
    embedding, body, head = nn.Embedding(1000, 256), mlp(256), nn.Linear(256, 1000, bias=False)
    body.requires_grad_(False)
    head.weight = embedding.weight
    return plain(nn.Sequential(embedding, body, head), torch.randint(0, 1000, (8, 64)), torch.optim.AdamW)


OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adafactor": torch.optim.Adafactor,
}
for _name, _optimizer in OPTIMIZERS.items():
    STEPS[f"optimizer_{_name}"] = lambda o=_optimizer: plain(mlp(), torch.randn(64, 192), o)


@step
def to_dtype_and_device() -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = mlp().to(torch.float64).float().to(device)
    return plain(model, torch.randn(192, 192).to(device), torch.optim.SGD)


@step
def skipped_init() -> Any:
    model = torch.nn.utils.skip_init(nn.Linear, 192, 192)
    nn.init.zeros_(model.get_parameter("weight"))
    return plain(model, torch.randn(256, 192), torch.optim.SGD)


@step
def gru() -> Any:
    model, x = nn.GRU(64, 96, 2, batch_first=True), torch.randn(16, 30, 64)

    def run() -> None:
        model.zero_grad()
        model(x)[0].pow(2).mean().backward()

    return run


@step
def lstm() -> Any:
    model, head, x = nn.LSTM(64, 96, 2, batch_first=True), nn.Linear(96, 10), torch.randn(16, 20, 64)

    def run() -> None:
        model.zero_grad()
        head.zero_grad()
        head(model(x)[0][:, -1]).pow(2).mean().backward()

    return run


@step
def convolutions_3d() -> Any:
    model = nn.Sequential(
        nn.Conv3d(2, 16, 3, padding=2, dilation=2), nn.ReLU(), nn.ConvTranspose3d(16, 16, 2, stride=2),
        nn.InstanceNorm3d(16, affine=True), nn.Conv3d(16, 32, 3, groups=4, padding=1), nn.PReLU(32), nn.MaxPool3d(2),
        nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(32, 1, 1),
    )  # fmt: skip
    return plain(model, torch.randn(2, 2, 16, 16, 16), torch.optim.SGD)


@step
def convolutions_1d_and_2d() -> Any:
    model = nn.Sequential(
        nn.Conv1d(8, 32, 5, padding=4, dilation=2), nn.BatchNorm1d(32), nn.Mish(),
        nn.ConvTranspose1d(32, 16, 4, stride=2, padding=1), nn.GLU(1), nn.AvgPool1d(2), nn.Unflatten(1, (8, 1)),
        nn.Conv2d(8, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, (1, 4), stride=(1, 2), padding=(0, 1)),
        nn.PixelShuffle(2), nn.AdaptiveAvgPool2d((2, 16)),
    )  # fmt: skip
    return plain(model, torch.randn(32, 8, 384), torch.optim.SGD)


def _attention(mask: torch.Tensor | None, dropout: float, causal: bool) -> Any:
    project, x = nn.Linear(256, 768), torch.randn(4, 128, 256)

    def run() -> None:
        project.zero_grad()
        q, k, v = project(x).view(4, 128, 3, 8, 32).permute(2, 0, 3, 1, 4)
        F.scaled_dot_product_attention(q, k, v, mask, dropout, causal).sum().backward()

    return run


for _dropout in (0.0, 0.1):
    STEPS[f"attention_{_dropout}"] = lambda p=_dropout: _attention(None, p, False)
    STEPS[f"attention_causal_{_dropout}"] = lambda p=_dropout: _attention(None, p, True)
    STEPS[f"attention_masked_{_dropout}"] = lambda p=_dropout: _attention(torch.ones(128, 128).tril().bool(), p, False)


@step
def multihead_attention() -> Any:
    model, x = nn.MultiheadAttention(256, 8, 0.1, batch_first=True), torch.randn(4, 128, 256)

    def run() -> None:
        model.zero_grad()
        output, weights = model(x, x, x, need_weights=True)
        (output.sum() + weights.pow(2).sum()).backward()

    return run


class Square(torch.autograd.Function):
    """Keeps one tensor the official way and one on its ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.double = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's way
        (x,) = ctx.saved_tensors
        return grad * ctx.double + grad * x * 0


@step
def custom_function() -> Any:
    model, x = mlp(), torch.randn(192, 192)

    def run() -> None:
        model.zero_grad()
        Square.apply(model(x)).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]  # apply is untyped

    return run


@step
def double_backward() -> Any:
    model, x = mlp(256), torch.randn(256, 256, requires_grad=True)

    def run() -> None:
        model.zero_grad()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()

    return run


@step
def hooks_that_keep_activations() -> Any:
    model, x, kept = mlp(), torch.randn(192, 192), []

    def run() -> None:
        kept.clear()
        model.zero_grad()
        hooks = [layer.register_forward_hook(lambda m, i, o: kept.append(o.detach().clone())) for layer in model]
        model(x).sum().backward()
        for hook in hooks:
            hook.remove()

    return run


@step
def update_inside_backward() -> Any:
    model, x = mlp(384), torch.randn(64, 384)
    updaters = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(parameter: Any) -> None:
        updaters[parameter].step()
        updaters[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: model(x).sum().backward()


@step
def data_and_logging_in_the_step() -> Any:
    model, generator = mlp(256), np.random.default_rng(0)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    log: list[str] = []

    def run() -> None:
        x = torch.from_numpy(generator.standard_normal((256, 256)).astype("float32"))
        y = torch.randint(0, 256, (256,))
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        log.append(f"{loss:.3f} {loss.item():.2f} {(output.argmax(1) == y).float().mean().item()}")
        log.append(str(loss.detach().numpy()))

    return run


@step
def moving_average_and_functional_call() -> Any:
    model, x = mlp(), torch.randn(256, 192)
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), 0.1)

    def run() -> None:
        optimizer.zero_grad()
        torch.func.functional_call(model, dict(model.named_parameters()), (x,)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
            average(x)

    return run


@step
def dimensions_from_arange() -> Any:
    model, x = mlp(256), torch.randn(64, 256)

    def run() -> None:
        model.zero_grad()
        output = model(x).view(64, 16, 16)
        output.sum(dim=torch.arange(1, output.dim()).tolist()).pow(2).mean().backward()

    return run


@step
def losses() -> Any:
    model, x, target = nn.Linear(64, 1000), torch.randn(192, 64), torch.randint(0, 1000, (192,))

    def run() -> None:
        model.zero_grad()
        output = model(x)
        zeros = torch.zeros_like(output)
        loss = F.mse_loss(output, zeros) + F.smooth_l1_loss(output, zeros) + F.l1_loss(output, zeros)
        loss = loss + F.cross_entropy(output, target, label_smoothing=0.1)
        loss = loss + F.binary_cross_entropy_with_logits(output, zeros) + F.huber_loss(output, zeros)
        loss = loss + F.binary_cross_entropy(output.sigmoid(), zeros) + F.soft_margin_loss(output, zeros + 1)
        loss.backward()

    return run


@step
def mse_reduced_by_sum() -> Any:
    model, x = mlp(), torch.randn(512, 192)

    def run() -> None:
        model.zero_grad()
        F.mse_loss(model(x), x, reduction="sum").backward()

    return run


@step
def truncated_normal_initialization() -> Any:
    model = mlp(192, 2)
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    nn.init.trunc_normal_(model.get_parameter("0.weight"), std=1.0)
    return plain(model, torch.randn(16, 192))


@step
def inference_mode_between() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    )
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 3, 64, 64)

    def run() -> None:
        model.train()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            for _ in range(3):
                model(torch.cat([x, x])).mean().item()

    return run


@step
def convolution_of_a_shallow_volume() -> Any:
    model = nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv3d(64, 64, 3, padding=1))
    return plain(model, torch.randn(2, 64, 2, 8, 8))


@step
def data_loader_with_workers() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randint(0, 10, (64,)))
    loader = torch.utils.data.DataLoader(data, 16, shuffle=True, num_workers=WORKERS, drop_last=True)
    model, batches = mlp(256), iter(loader)

    def run() -> None:
        model.zero_grad()
        x, y = next(batches)
        F.cross_entropy(model(x), y).backward()

    return run
