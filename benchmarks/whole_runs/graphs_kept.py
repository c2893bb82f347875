import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 10)).to(dev)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
tr = DataLoader(TensorDataset(torch.randn(320, 1, 28, 28), torch.randint(0, 10, (320,))), batch_size=16)
va = DataLoader(TensorDataset(torch.randn(200, 1, 28, 28), torch.randint(0, 10, (200,))), batch_size=16)
for e in range(2):
    net.train()
    total = 0
    for x, y in tr:
        opt.zero_grad()
        l = nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
        l.backward()
        opt.step()
        total += l
    net.eval()
    vl = 0
    for x, y in va:
        vl += nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
    print(e, float(vl))
