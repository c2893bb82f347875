"""Networks that make images: two optimizers in one step, transposed convolutions, random codes."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Step, zoo


@zoo
def gan() -> Step:
    """DCGAN: the discriminator's update, then the generator's, each with its own optimizer."""
    widths = (512, 256, 128, 64)
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(100, 512, 4, bias=False),
        nn.BatchNorm2d(512),
        nn.ReLU(True),
    ]
    for wide, narrow in itertools.pairwise(widths):
        layers += [
            nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(True),
        ]
    generator = nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())
    layers = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for narrow, wide in ((64, 128), (128, 256), (256, 512)):
        layers += [
            nn.Conv2d(narrow, wide, 4, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.LeakyReLU(0.2, True),
        ]
    discriminator = nn.Sequential(*layers, nn.Conv2d(512, 1, 4), nn.Flatten(0))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, ones, zeros = torch.randn(32, 3, 64, 64), torch.ones(32), torch.zeros(32)
    criterion = nn.BCEWithLogitsLoss()

    def step() -> None:
        fake = generator(torch.randn(32, 100, 1, 1))
        discriminator_optimizer.zero_grad()
        (criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)).backward()
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        criterion(discriminator(fake), ones).backward()
        generator_optimizer.step()

    return step


class ConvVae(nn.Module):
    """Gaussian codes of 64 numbers for images: (N, 3, 64, 64) -> reconstruction, mean, log variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.GELU(), nn.Conv2d(32, 64, 4, 2, 1), nn.GELU(),
            nn.Conv2d(64, 128, 4, 2, 1), nn.ELU(), nn.Flatten(),
        )  # fmt: skip
        self.mean, self.log_variance = nn.Linear(128 * 64, 64), nn.Linear(128 * 64, 64)
        self.decoder = nn.Sequential(
            nn.Linear(64, 128 * 64), nn.Unflatten(1, (128, 8, 8)),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.GELU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.Softplus(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


@zoo
def conv_vae() -> Step:
    model = ConvVae()
    optimizer = torch.optim.Adam(model.parameters())
    pictures = torch.rand(128, 3, 64, 64)

    def step() -> None:
        optimizer.zero_grad()
        reconstruction, mean, log_variance = model(pictures)
        error = F.mse_loss(reconstruction, pictures, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = error + divergence
        loss.backward()
        optimizer.step()

    return step
