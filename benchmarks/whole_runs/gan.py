import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
G = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784)).to(dev)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(dev)
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
bce = nn.BCEWithLogitsLoss()
data = DataLoader(TensorDataset(torch.randn(500, 784)), batch_size=50)
samples = []
for epoch in range(2):
    for (x,) in data:
        x = x.to(dev)
        z = torch.randn(len(x), 32, device=dev)
        f = G(z)
        od.zero_grad()
        (
            bce(D(x), torch.ones(len(x), 1, device=dev)) + bce(D(f.detach()), torch.zeros(len(x), 1, device=dev))
        ).backward()
        od.step()
        og.zero_grad()
        bce(D(f), torch.ones(len(x), 1, device=dev)).backward()
        og.step()
    with torch.no_grad():
        samples.append(G(torch.randn(64, 32, device=dev)))
    torch.save({"G": G.state_dict(), "D": D.state_dict()}, "gan.pt")
