import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 10, 1),
).to(dev)
opt = torch.optim.Adam(net.parameters())
train = DataLoader(
    TensorDataset(torch.randn(90, 3, 32, 32), torch.randint(0, 10, (90, 32, 32))), batch_size=8, shuffle=True
)
val = DataLoader(TensorDataset(torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100, 32, 32))), batch_size=8)
best = None
history = []
for epoch in range(2):
    net.train()
    losses = []
    for x, y in train:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    net.eval()
    preds, targets = [], []
    with torch.no_grad():
        for x, y in val:
            preds.append(net(x.to(dev)))
            targets.append(y)
    p, t = torch.cat(preds), torch.cat(targets).to(dev)
    acc = (p.argmax(1) == t).float().mean()
    print(epoch, torch.stack(losses).mean().item(), acc.item())
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "ck.pt")
    best = {k: v.clone() for k, v in net.state_dict().items()}
state = torch.load("ck.pt")
net.load_state_dict(state["net"])
with torch.no_grad():
    for x, y in val:
        net(x.to(dev))
