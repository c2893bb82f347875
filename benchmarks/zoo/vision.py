"""Two-dimensional networks for images."""

import torch
from examples.resnet18 import make as resnet18_model
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Step, training, zoo


def images(batch: int, size: int, classes: int = 1000) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Inputs (batch, 3, size, size) and class labels (batch,)."""
    return (torch.randn(batch, 3, size, size),), (torch.randint(classes, (batch,)),)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut, four times as wide outside as inside."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


def resnet50_model(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(depth):
            layers.append(Bottleneck(inputs, width, stride if k == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


@zoo
def resnet18() -> Step:
    model = resnet18_model()
    return training(model, sgd(model), F.cross_entropy, *images(16, 160))


@zoo
def resnet18_channels_last() -> Step:
    model = resnet18_model().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    (x,), targets = images(16, 160)
    x = x.contiguous(memory_format=torch.channels_last)
    return training(model, sgd(model), F.cross_entropy, (x,), targets)


@zoo
def resnet50() -> Step:
    model = resnet50_model()
    return training(model, sgd(model), F.cross_entropy, *images(8, 160))


class DenseLayer(nn.Module):
    """Adds `growth` channels to what it is given: (N, C, H, W) -> (N, C + growth, H, W)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = (
            nn.BatchNorm2d(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x), inplace=True))
        out = self.conv2(F.relu(self.norm2(out), inplace=True))
        return torch.cat((x, F.dropout(out, 0.1, self.training)), 1)


@zoo
def densenet() -> Step:
    """DenseNet: every layer reads all earlier ones, so that concatenations make most of the peak."""
    growth, channels = 32, 64
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    for depth in (6, 12, 16):
        for _ in range(depth):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        half = nn.Conv2d(channels, channels // 2, 1)
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), half, nn.AvgPool2d(2)]
        channels //= 2
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return training(model, sgd(model), F.cross_entropy, *images(8, 160))


class SqueezeExcite(nn.Module):
    """Scales every channel by what its mean says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3 or 5x5, squeeze and excite, project 1x1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, late: bool) -> None:
        super().__init__()
        wide = 4 * inputs
        act = nn.Hardswish if late else nn.ReLU6
        self.residual = stride == 1 and inputs == outputs
        self.block = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), act(inplace=True),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide),
            act(inplace=True),
            SqueezeExcite(wide) if late else nn.Identity(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.residual else self.block(x)


@zoo
def mobilenet() -> Step:
    """After MobileNetV3: depthwise separable convolutions, ReLU6 and hardswish, squeeze and excite."""
    shapes = ((16, 3, 1), (24, 3, 2), (24, 3, 1), (40, 5, 2), (40, 5, 1), (80, 3, 2), (80, 3, 1), (112, 3, 1))
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(True)]
    inputs = 16
    for index, (outputs, kernel, stride) in enumerate(shapes):
        layers.append(InvertedResidual(inputs, outputs, kernel, stride, late=index >= 3))
        inputs = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 512), nn.Hardswish(), nn.Dropout(0.2))
    model = nn.Sequential(*layers, *head, nn.Linear(512, 1000))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
    return training(model, optimizer, F.cross_entropy, *images(16, 160))


class VisionTransformer(nn.Module):
    """Patches of 16 x 16 pixels, a class token, pre-norm encoder layers: (N, 3, H, W) -> (N, classes)."""

    def __init__(self, size: int = 224, width: int = 384, depth: int = 6, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2 + 1, width))
        self.layers = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(
                    width, 6, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(depth)
            ]
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


@zoo
def vit() -> Step:
    model = VisionTransformer()
    return training(model, torch.optim.AdamW(model.parameters()), F.cross_entropy, *images(16, 224))


@zoo
def groupnorm_net() -> Step:
    """Group normalization and SiLU, and bilinear upsampling back to the input's size."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1)]
    for dilation in (1, 2, 4, 8):
        layers += [nn.GroupNorm(8, 48), nn.SiLU(), nn.Conv2d(48, 48, 3, padding=dilation, dilation=dilation)]
    layers += [nn.AvgPool2d(2), nn.Conv2d(48, 96, 3, padding=1), nn.GroupNorm(8, 96), nn.SiLU()]
    layers += [nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(96, 10, 1)]
    model = nn.Sequential(*layers)
    labels = torch.randint(10, (4, 128, 128))
    return training(model, sgd(model), F.cross_entropy, (torch.randn(4, 3, 128, 128),), (labels,))


@zoo
def instancenorm_net() -> Step:
    """Image to image: reflection padding, instance normalization, residual blocks, pixel shuffle, L1 loss."""

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(64, 64, 3), nn.InstanceNorm2d(64, affine=True), nn.LeakyReLU(0.2)
        )

    start = (nn.Conv2d(3, 64, 7, 2, 3), nn.InstanceNorm2d(64), nn.ReLU(inplace=True))
    model = nn.Sequential(*start, *[block() for _ in range(6)], nn.Conv2d(64, 12, 3, padding=1), nn.PixelShuffle(2))
    pictures = torch.rand(4, 3, 192, 192)
    return training(model, torch.optim.Adam(model.parameters()), F.l1_loss, (pictures,), (pictures,))


@zoo
def resnet18_inference() -> Step:
    """Evaluation under no_grad: nothing is saved, the peak lies in the widest layer."""
    model = resnet18_model().eval()
    (x,), _ = images(32, 192)

    def step() -> None:
        with torch.no_grad():
            model(x).argmax(1)

    return step
