import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

    def configure_model(self):
        plan = {str(number): ColwiseParallel() if number % 2 == 0 else RowwiseParallel() for number in range(8)}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(1024, 512)), batch_size=32)
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2), max_epochs=1,
        devices=int(os.environ["WORLD_SIZE"]), accelerator="gpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
