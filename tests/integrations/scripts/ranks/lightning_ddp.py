import os
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=32, shuffle=True)
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp", devices=int(os.environ["WORLD_SIZE"]), max_epochs=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu", logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
