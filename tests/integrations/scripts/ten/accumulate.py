"""GPT-like, gradient accumulation, no DataLoader: random windows of a token array."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ctx, batch, accum, width, layers, vocab = 64, 8, 4, 96, 3, 512
rng = np.random.default_rng(0)
tokens = rng.integers(0, vocab, 100_000).astype(np.uint16)


def get_batch():
    ix = torch.randint(len(tokens) - ctx, (batch,))
    x = torch.stack([torch.from_numpy(tokens[i : i + ctx].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + ctx].astype(np.int64)) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (u.view(b, t, 4, c // 4).transpose(1, 2) for u in self.qkv(self.n1(x)).split(c, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(ctx, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for b in self.blocks:
            x = b(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
other = [p for p in model.parameters() if p.dim() < 2]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=3e-4, betas=(0.9, 0.95)
)


@torch.no_grad()
def estimate():
    model.eval()
    losses = torch.zeros(5)
    for k in range(5):
        losses[k] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()


for it in range(1000):
    for g in opt.param_groups:
        g["lr"] = 3e-4 * min(1, (it + 1) / 100)
    if it % 500 == 0:
        print(it, estimate())
    for _micro in range(accum):
        x, y = get_batch()
        logits, loss = model(x, y)
        (loss / accum).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    if it % 100 == 0:
        with open("log.json", "a") as f:
            f.write(json.dumps({"it": it, "loss": loss.item()}) + "\n")
torch.save(model.state_dict(), "ckpt.pt")
