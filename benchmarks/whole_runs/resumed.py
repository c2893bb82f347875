import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(*[l for _ in range(4) for l in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10)).to(dev)
opt = torch.optim.AdamW(net.parameters())
data = DataLoader(TensorDataset(torch.randn(512, 512), torch.randint(0, 10, (512,))), batch_size=32)


def train(epochs):
    for _ in range(epochs):
        for x, y in data:
            opt.zero_grad()
            nn.functional.cross_entropy(net(x.to(dev)), y.to(dev)).backward()
            opt.step()


train(1)
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "r.pt")
ck = torch.load("r.pt", map_location=dev)
net.load_state_dict(ck["net"])
opt.load_state_dict(ck["opt"])
train(1)
