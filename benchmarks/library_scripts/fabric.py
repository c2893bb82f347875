"""Lightning Fabric: the loop is one's own, the precision and the backward are Fabric's."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=1, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(7)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.head(self.features(x))


with fabric.init_module():
    net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
net, optimizer = fabric.setup(net, optimizer)
images, labels = torch.randn(96, 3, 32, 32), torch.randint(0, 10, (96,))
train = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True))
test = fabric.setup_dataloaders(DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=32))

for epoch in range(2):
    net.train()
    for i, (x, y) in enumerate(train):
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(net, enabled=accumulating):
            loss = F.cross_entropy(net(x), y)
            fabric.backward(loss)
        if not accumulating:
            fabric.clip_gradients(net, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        right = sum((net(x).argmax(1) == y).sum() for x, y in test)
    fabric.print(f"{epoch}: {right.item() / 32:.2f}")
fabric.save("fabric.ckpt", {"model": net, "optimizer": optimizer})
