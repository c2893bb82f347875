import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dev = "cuda" if torch.cuda.is_available() else "cpu"
vae = (
    nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 4, 3, 2, 1)).to(dev).requires_grad_(False).eval()
)
dec = nn.Sequential(nn.ConvTranspose2d(4, 32, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)).to(dev).eval()
te = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64)).to(dev).requires_grad_(False).eval()


class U(nn.Module):
    def __init__(s):
        super().__init__()
        s.i = nn.Conv2d(4, 64, 3, 1, 1)
        s.m = nn.Conv2d(64, 64, 3, 1, 1)
        s.o = nn.Conv2d(64, 4, 3, 1, 1)
        s.t = nn.Linear(64, 64)

    def forward(s, x, t, c):
        h = s.i(x) + s.t(c.mean(1))[:, :, None, None]
        return s.o(torch.nn.functional.silu(s.m(torch.nn.functional.silu(h))))


u = U().to(dev)
opt = torch.optim.AdamW(u.parameters())
data = DataLoader(TensorDataset(torch.randn(60, 3, 64, 64), torch.randint(0, 1000, (60, 16))), batch_size=6)
for epoch in range(2):
    u.train()
    for img, tok in data:
        with torch.no_grad():
            z = vae(img.to(dev))
            c = te(tok.to(dev))
        n = torch.randn_like(z)
        t = torch.rand(len(z), 1, 1, 1, device=dev)
        loss = ((u((1 - t) * z + t * n, t, c) - n) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    u.eval()
    with torch.no_grad():
        x = torch.randn(16, 4, 16, 16, device=dev)
        c = te(torch.zeros(16, 16, dtype=torch.long, device=dev))
        for k in range(10):
            x = x - 0.1 * u(x, k, c)
        img = dec(x)
    torch.save(u.state_dict(), f"u{epoch}.pt")
