"""A fine-tuning recipe as a class with a config, in the way of torchtune: set up, train, save."""

import argparse
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Instructions(Dataset):
    def __init__(self, count, words, longest):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(longest // 3, longest, (count,), generator=generator).tolist()
        self.rows = [torch.randint(1, words, (n,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = self.rows[index]
        labels = tokens.clone()
        labels[: len(tokens) // 4] = -100
        return tokens, labels


def collate(rows, longest):
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for i, (t, y) in enumerate(rows):
        tokens[i, : len(t)], labels[i, : len(y)] = t, y
    return {"tokens": tokens, "labels": labels}


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.ones(width))

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.scale


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.sa_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.w2 = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        h = self.sa_norm(x)
        q, k, v = (p(h).view(b, t, self.heads, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self, words, width, layers, heads):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.output = RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return [self.output(chunk) for chunk in self.norm(x).chunk(4, dim=1)]


def chunked_loss(logits, labels):
    pieces = zip(logits, labels.chunk(len(logits), dim=1), strict=True)
    total = sum(
        F.cross_entropy(a.float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") for a, y in pieces
    )
    return total / (labels != -100).sum()


class FullFinetune:
    def __init__(self, cfg):
        self.cfg, self.device = cfg, torch.device(cfg.device)
        self.dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32

    def setup(self):
        cfg = self.cfg
        self.model = Decoder(cfg.words, cfg.width, cfg.layers, 4).to(self.device, self.dtype)
        apply_activation_checkpointing(
            self.model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Layer)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, fused=cfg.device == "cuda")
        data = Instructions(64, cfg.words, cfg.longest)
        self.loader = DataLoader(data, cfg.batch_size, shuffle=True, collate_fn=partial(collate, longest=cfg.longest))

    def train(self):
        for index, batch in enumerate(self.loader):
            if index == self.cfg.max_steps:
                break
            batch = {key: value.to(self.device) for key, value in batch.items()}
            labels = torch.hstack((batch["labels"][..., 1:], torch.full_like(batch["labels"][..., :1], -100)))
            loss = chunked_loss(self.model(batch["tokens"]), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            print(f"{index}|loss {loss.item():.3f}")

    def save(self):
        torch.save(self.model.state_dict(), "recipe.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in dict(words=1500, width=192, layers=3, longest=96, batch_size=4, max_steps=4).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    recipe = FullFinetune(parser.parse_args())
    recipe.setup()
    recipe.train()
    recipe.save()
