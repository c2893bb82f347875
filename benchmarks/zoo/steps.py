"""One small network, many ways to write the step around it."""

import torch
from examples.resnet18 import make as resnet18_model
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Step, zoo
from .sequences import TransformerLm, token_loss, tokens
from .vision import images, sgd


def classifier() -> nn.Sequential:
    """A plain convolutional network: (N, 3, H, W) -> (N, 1000)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(2048, 1000))


@zoo
def gradient_accumulation() -> Step:
    """Four micro-batches before one update."""
    model = resnet18_model()
    optimizer = sgd(model)
    (x,), (labels,) = images(32, 128)

    def step() -> None:
        optimizer.zero_grad()
        for part, part_labels in zip(x.chunk(4), labels.chunk(4), strict=True):
            loss = F.cross_entropy(model(part), part_labels) / 4
            loss.backward()
        optimizer.step()

    return step


@zoo
def autocast_conv() -> Step:
    model = classifier()
    optimizer = sgd(model)
    (x,), (labels,) = images(16, 96)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = F.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()

    return step


@zoo
def frozen_backbone() -> Step:
    """Only a new head learns: the backbone's layers save nothing, though it runs with grad enabled."""
    backbone = resnet18_model().requires_grad_(False).eval()
    head = nn.Sequential(nn.Linear(1000, 2048), nn.ReLU(), nn.Linear(2048, 1000))
    optimizer = torch.optim.Adam(head.parameters())
    (x,), (labels,) = images(32, 128)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(head(backbone(x)), labels)
        loss.backward()
        optimizer.step()

    return step


@zoo
def frozen_first_layers() -> Step:
    """The stem and two stages are frozen, the rest learns: saving begins in the middle."""
    model = resnet18_model()
    for name in ("conv1", "bn1", "layer1", "layer2"):
        model.get_submodule(name).requires_grad_(False)
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    (x,), (labels,) = images(16, 160)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()

    return step


@zoo
def gradient_clipping() -> Step:
    model = TransformerLm()
    optimizer = torch.optim.AdamW(model.parameters())
    (ids,), (targets,) = tokens(8, 256)

    def step() -> None:
        optimizer.zero_grad()
        loss = token_loss(model(ids), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@zoo
def retained_graph() -> Step:
    """Two losses on one trunk, a backward each: the first keeps what the second still reads."""
    trunk = classifier()
    classes, values = nn.Linear(1000, 200), nn.Linear(1000, 16)
    parameters = [*trunk.parameters(), *classes.parameters(), *values.parameters()]
    optimizer = torch.optim.Adam(parameters)
    (x,), (labels,) = images(16, 96, 200)
    targets = torch.randn(16, 16)

    def step() -> None:
        optimizer.zero_grad()
        features = trunk(x)
        F.cross_entropy(classes(features), labels).backward(retain_graph=True)
        F.mse_loss(values(features), targets).backward()
        optimizer.step()

    return step


@zoo
def gradient_penalty() -> Step:
    """Second derivatives: the gradient for the input is itself differentiated (create_graph)."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU())
    head = nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    x = torch.randn(8, 3, 96, 96, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        score = head(model(x).mean((2, 3))).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score + ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()

    return step


@zoo
def loss_logging() -> Step:
    """`loss.item()` in every step, and an accuracy."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    (x,), (labels,) = images(16, 96)
    log: list[tuple[float, float]] = []

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        log.append((loss.item(), (output.argmax(1) == labels).float().mean().item()))

    return step


@zoo
def output_kept_between_steps() -> Step:
    """A loop at module level: the last step's output and loss still live while the next forward runs."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    (x,), (labels,) = images(16, 96)
    kept: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        kept[:] = [output, loss]

    return step


@zoo
def zero_grad_after_step() -> Step:
    """Gradients are freed at the end and filled in place of zeros: `set_to_none=False`."""
    model = TransformerLm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (ids,), (targets,) = tokens(8, 256)

    def step() -> None:
        loss = token_loss(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


@zoo
def moving_average() -> Step:
    """A second copy of the weights follows the first, and a schedule moves the learning rate."""
    model = resnet18_model()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    (x,), (labels,) = images(8, 128)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)

    return step
