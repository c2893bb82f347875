import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class Shapes(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.rand(3, 48, 48, generator=g), i % 7


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
        )
        self.head = nn.Linear(2 * width, 7)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def evaluate(model, loader, device):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
            total += len(y)
    return right / total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=48)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--out", default="runs/exp1")
    p.add_argument("--lr", type=float, default=1e-3)
    a = p.parse_args()
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train = DataLoader(
        Shapes(480), a.batch_size, shuffle=True, num_workers=4, pin_memory=device.type == "cuda", drop_last=True
    )
    val = DataLoader(Shapes(96), a.batch_size, num_workers=2)
    model = Net().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, total_steps=a.epochs * len(train))
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    writer = SummaryWriter(out / "tb")
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    best = 0.0
    print("before", evaluate(model, val, device))
    for epoch in range(a.epochs):
        model.train()
        t0 = time.time()
        running = 0.0
        for step, (x, y) in enumerate(tqdm(train)):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_fn(model(x), y)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                continue
            scaler.step(opt)
            scaler.update()
            sched.step()
            running += loss.item()
            writer.add_scalar("loss", loss.item(), epoch * len(train) + step)
        acc = evaluate(model, val, device)
        print(f"epoch {epoch}: {running / len(train):.3f} {acc:.3f} {time.time() - t0:.1f}s")
        if acc > best:
            best = acc
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, out / "best.pt")
    writer.close()


if __name__ == "__main__":
    main()
