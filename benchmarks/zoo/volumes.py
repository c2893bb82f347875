"""Three-dimensional segmentation networks, as MONAI ships them."""

import importlib.util

import torch
from examples.unet3d import build as unet3d_build
from monai.losses.dice import DiceCELoss
from monai.networks.nets.basic_unet import BasicUNet
from monai.networks.nets.dynunet import DynUNet
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unetr import UNETR
from torch import Tensor, nn
from torch.nn import functional as F

from .registry import Step, training, zoo

CLASSES = 3


def segmentation(model: nn.Module, batch: int, size: int, loss: nn.Module | None = None) -> Step:
    """Volumes (batch, 1, size, size, size); Dice and cross-entropy where no loss is given."""
    shape = (batch, 1, size, size, size)
    volumes, labels = torch.randn(shape), torch.randint(CLASSES, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion = loss or DiceCELoss(to_onehot_y=True, softmax=True)
    return training(model, optimizer, criterion, (volumes,), (labels,))


@zoo
def unet3d() -> Step:
    return unet3d_build(batch=1, size=64)


@zoo
def basic_unet3d() -> Step:
    model = BasicUNet(spatial_dims=3, in_channels=1, out_channels=CLASSES, features=(16, 16, 32, 64, 128, 16))
    return segmentation(model, 1, 48)


def unetr() -> Step:
    model = UNETR(1, CLASSES, img_size=48, feature_size=8, hidden_size=192, mlp_dim=768, num_heads=6)
    return segmentation(model, 1, 48)


if importlib.util.find_spec("einops"):  # MONAI's attention wants it, and MONAI does not require it
    zoo(unetr)


@zoo
def segresnet() -> Step:
    model = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=CLASSES, dropout_prob=0.2)
    return segmentation(model, 1, 64)


class DeepSupervision(nn.Module):
    """Cross-entropy of every level that DynUNet returns, each half as heavy as the one before."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`outputs` (N, levels, C, D, H, W), `labels` (N, 1, D, H, W) -> a scalar."""
        target = labels.squeeze(1)
        losses = [F.cross_entropy(level, target) for level in outputs.unbind(1)]
        return torch.stack([0.5**k * loss for k, loss in enumerate(losses)]).sum()


@zoo
def dynunet() -> Step:
    model = DynUNet(
        spatial_dims=3, in_channels=1, out_channels=CLASSES, kernel_size=[3, 3, 3, 3], strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2], filters=[16, 32, 64, 128], deep_supervision=True, deep_supr_num=2,
    )  # fmt: skip
    return segmentation(model, 1, 48, DeepSupervision())
