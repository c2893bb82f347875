import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.enc = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 196, 10),
        )

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self.enc(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        p = self.enc(x)
        self.log("acc", (p.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        o = torch.optim.Adam(self.parameters(), 1e-3)
        return {"optimizer": o, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)}


ds = TensorDataset(torch.rand(640, 1, 28, 28), torch.randint(0, 10, (640,)))
t = L.Trainer(max_epochs=3, gradient_clip_val=0.5, default_root_dir="lit", accelerator="cpu", log_every_n_steps=1)
t.fit(Lit(), DataLoader(ds, 64, shuffle=True), DataLoader(ds, 64))
