import os

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=32)
    trainer = L.Trainer(
        strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}), devices=int(os.environ["WORLD_SIZE"]), max_epochs=1,
        accelerator="gpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
