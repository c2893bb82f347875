import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class M(L.LightningModule):
    def __init__(s):
        super().__init__()
        s.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))
        s.outs = []

    def training_step(s, b, i):
        x, y = b
        l = nn.functional.cross_entropy(s.net(x), y)
        s.log("l", l)
        return l

    def validation_step(s, b, i):
        x, y = b
        o = s.net(x)
        s.outs.append(o)
        s.log("v", nn.functional.cross_entropy(o, y))

    def on_validation_epoch_end(s):
        o = torch.cat(s.outs)
        s.log("m", o.softmax(1).max(1).values.mean())
        s.outs.clear()

    def configure_optimizers(s):
        return torch.optim.AdamW(s.parameters(), 1e-3)


tr = DataLoader(TensorDataset(torch.randn(640, 256), torch.randint(0, 100, (640,))), batch_size=64, shuffle=True)
va = DataLoader(TensorDataset(torch.randn(2500, 256), torch.randint(0, 100, (2500,))), batch_size=128)
L.Trainer(max_epochs=2, logger=False, enable_progress_bar=False, accelerator="auto", enable_model_summary=False).fit(
    M(), tr, va
)
