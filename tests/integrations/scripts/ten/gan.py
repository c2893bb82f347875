import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

z = 32
G = nn.Sequential(
    nn.ConvTranspose2d(z, 64, 4),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.ConvTranspose2d(64, 32, 4, 2, 1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, 2, 1),
    nn.Tanh(),
)
D = nn.Sequential(
    nn.Conv2d(1, 32, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(32, 64, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(64 * 16, 1),
)
og = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
dl = DataLoader(TensorDataset(torch.rand(1000, 1, 16, 16) * 2 - 1), 64, shuffle=True, drop_last=True)
fixed = torch.randn(16, z, 1, 1)
step = 0
for ep in range(5):
    for (real,) in dl:
        noise = torch.randn(real.size(0), z, 1, 1)
        fake = G(noise)
        ld = bce(D(real), torch.ones(len(real), 1)) + bce(D(fake.detach()), torch.zeros(len(real), 1))
        od.zero_grad()
        ld.backward()
        od.step()
        if step % 5 == 0:
            lg = bce(D(fake), torch.ones(len(real), 1))
            og.zero_grad()
            lg.backward()
            og.step()
        step += 1
    with torch.no_grad():
        img = G(fixed)
    torch.save(img, f"img{ep}.pt")
