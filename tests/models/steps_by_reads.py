"""Training steps that read numbers which decide sizes, as users write them; each build draws them anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], None]


def topk_by_count() -> Step:
    """As many of the largest as a count says."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(64, 32)

    def step() -> None:
        n: Any = (x[:, 0] > torch.randn(())).sum().item()
        top = net(x).topk(max(1, n), dim=0).values
        top.pow(2).sum().backward()
        net.zero_grad()

    return step


def early_exit() -> Step:
    """Blocks up to a drawn one, and its head."""
    blocks: Any = nn.ModuleList([nn.Linear(32, 32) for i in range(6)])
    heads: Any = nn.ModuleList([nn.Linear(32, 8 * (i + 1) * (6 - i)) for i in range(6)])
    x = torch.randn(64, 32)

    def step() -> None:
        exit_at: Any = torch.randint(0, 6, ()).item()
        h = x
        for i, b in enumerate(blocks):
            h = b(h).relu()
            if i == exit_at:
                break
        heads[exit_at](h).sum().backward()

    return step


def early_exit_confidence() -> Step:
    """Blocks until the answer is sure."""
    blocks: Any = nn.ModuleList([nn.Linear(32, 32) for _ in range(5)])
    head = nn.Linear(32, 10)
    x = torch.randn(64, 32)

    def step() -> None:
        h = x
        for b in blocks:
            h = b(h).relu()
            if head(h).softmax(-1).max().item() > 0.3 + torch.rand(()).item():
                break
        head(h).sum().backward()

    return step


def dynamic_padding() -> Step:
    """Sequences padded to the longest."""
    emb = nn.Embedding(100, 32)
    lin = nn.Linear(32, 32)

    def step() -> None:
        lengths = torch.randint(1, 40, (8,))
        m = int(lengths.max())
        ids = torch.zeros(8, m, dtype=torch.long)
        mask = torch.arange(m)[None] < lengths[:, None]
        (lin(emb(ids)) * mask[..., None]).sum().backward()

    return step


def moe_counts() -> Step:
    """Rows of each expert, by a list of counts."""
    experts = nn.ModuleList([nn.Linear(32, 64) for _ in range(4)])
    gate = nn.Linear(32, 4)
    x = torch.randn(64, 32)

    def step() -> None:
        choice = gate(x).argmax(-1)
        order = choice.argsort()
        counts = torch.bincount(choice, minlength=4).tolist()
        xs = x[order]
        start = 0
        outs = []
        for e, n in zip(experts, counts, strict=True):
            if n == 0:
                continue
            outs.append(e(xs[start : start + n]))
            start += n
        torch.cat(outs).sum().backward()

    return step


def beam_search() -> Step:
    """Beams of a drawn number of steps."""
    emb = nn.Embedding(50, 32)
    rnn = nn.GRUCell(32, 32)
    out = nn.Linear(32, 50)

    def step() -> None:
        with torch.no_grad():
            h = torch.zeros(1, 32)
            tok = torch.zeros(1, dtype=torch.long)
            steps: Any = torch.randint(3, 12, ()).item()
            seqs = tok[:, None]
            for _ in range(steps):
                h = rnn(emb(tok), h)
                lp = out(h).log_softmax(-1)
                _, i = lp.flatten().topk(4)
                b, tok = (i // 50, i % 50)
                h = h[b]
                seqs = torch.cat([seqs[b], tok[:, None]], 1)

    return step


def stochastic_depth() -> Step:
    """Blocks that are left out at random."""
    blocks: Any = nn.ModuleList([nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(6)])
    x = torch.randn(64, 32)

    def step() -> None:
        h = x
        for b in blocks:
            if torch.rand(()).item() < 0.5:
                continue
            h = h + b(h)
        if h.requires_grad:
            h.sum().backward()

    return step


def random_crop() -> Step:
    """A window of a drawn place and size."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(2, 3, 64, 64)

    def step() -> None:
        i: Any = torch.randint(0, 32, ()).item()
        j: Any = torch.randint(0, 32, ()).item()
        size: Any = torch.randint(16, 33, ()).item()
        conv(x[:, :, i : i + size, j : j + size]).sum().backward()

    return step


def random_resize() -> Step:
    """An image scaled by a drawn factor."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(2, 3, 64, 64)

    def step() -> None:
        scale: Any = 0.5 + torch.rand(()).item()
        y = F.interpolate(x, scale_factor=scale, mode="bilinear")
        conv(y).sum().backward()

    return step


def downscale_by_count() -> Step:
    """An image pooled by a power of a drawn number."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(2, 3, 64, 64)

    def step() -> None:
        n: Any = torch.randint(0, 5, ()).item()
        conv(F.avg_pool2d(x, 2**n)).sum().backward()

    return step


def multiscale() -> Step:
    """An image resized to one of several sizes."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(2, 3, 64, 64)
    sizes: Any = [48, 64, 128, 32, 96]

    def step() -> None:
        size = sizes[int(torch.randint(len(sizes), (1,)))]
        conv(F.interpolate(x, size=(size, size))).sum().backward()

    return step


def patch_dropping() -> Step:
    """Some of the patches, at random."""
    blk = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    x = torch.randn(4, 64, 32)

    def step() -> None:
        keep = int(64 * (1 - 0.5 * torch.rand(()).item()))
        idx = torch.randperm(64)[:keep]
        blk(x[:, idx]).sum().backward()

    return step


def teacher_forcing() -> Step:
    """The next token as it is, or as it is predicted."""
    emb = nn.Embedding(50, 32)
    cell = nn.GRUCell(32, 32)
    out = nn.Linear(32, 50)
    y = torch.randint(0, 50, (8, 12))

    def step() -> None:
        h = torch.zeros(8, 32)
        tok = y[:, 0]
        loss: Any = 0
        for t in range(1, 12):
            h = cell(emb(tok), h)
            lo = out(h)
            loss = loss + F.cross_entropy(lo, y[:, t])
            tok = y[:, t] if torch.rand(()).item() < 0.5 else lo.argmax(-1)
        loss.backward()

    return step


def length_bucketing() -> Step:
    """Sequences padded to the next of several lengths."""
    emb = nn.Embedding(100, 32)
    lin = nn.Linear(32, 64)
    buckets = [16, 32, 64, 128]

    def step() -> None:
        lengths = torch.randint(1, 100, (8,))
        m: Any = lengths.max().item()
        size = next(b for b in buckets if b >= m)
        lin(emb(torch.zeros(8, size, dtype=torch.long))).sum().backward()

    return step


def queue_shrinks() -> Step:
    """The first entries of a list deleted."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(64, 32)

    def step() -> None:
        feats = [net(x) for _ in range(8)]
        n: Any = torch.randint(0, 8, ()).item()
        del feats[:n]
        torch.cat(feats).exp().sum().backward()

    return step


def span_masking() -> Step:
    """What is left beside a drawn span."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(4, 64, 32)

    def step() -> None:
        h = x.clone()
        start: Any = torch.randint(0, 40, ()).item()
        width: Any = torch.randint(1, 20, ()).item()
        h[:, start : start + width] = 0
        kept = torch.cat([h[:, :start], h[:, start + width :]], 1)
        net(kept).sum().backward()

    return step


def halting() -> Step:
    """A loop that ends by a drawn number."""
    cell = nn.GRUCell(32, 32)
    x = torch.randn(16, 32)

    def step() -> None:
        h = x
        k = 10
        n: Any = torch.randint(0, 10, ()).item()
        while k > n:
            h = cell(x, h)
            k -= 1
        h.sum().backward()

    return step


def temperature_chunks() -> Step:
    """A batch in a drawn number of chunks."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(128, 32)

    def step() -> None:
        n: Any = torch.randint(1, 9, ()).item()
        for c in x.chunk(n):
            net(c).exp().sum().backward()

    return step


def blocks_in_loop() -> Step:
    """Two layers of different sizes, each drawn."""
    blocks: Any = nn.ModuleList([nn.Linear(64, 64 * w) for w in (1, 5, 2, 3, 9)])
    x = torch.randn(8, 64)

    def step() -> None:
        h: Any = 0
        for _ in range(2):
            h = h + blocks[torch.randint(0, 5, ()).item()](x).sum()
        h.backward()
        blocks.zero_grad()

    return step


def head_with_adam() -> Step:
    """A head that is drawn in each step, with its own state."""
    blocks: Any = nn.ModuleList([nn.Linear(64, 64 * w) for w in (1, 2, 5)])
    x = torch.randn(8, 64)
    o = torch.optim.Adam(blocks.parameters())

    def step() -> None:
        blocks[torch.randint(0, 3, ()).item()](x).sum().backward()
        o.step()
        o.zero_grad()

    return step


def experts_tensor_index() -> Step:
    """Experts that are used at all, by a tensor."""
    blocks: Any = nn.ModuleList([nn.Linear(64, 64) for w in range(4)])
    x = torch.randn(8, 64)
    g = nn.Linear(64, 4)

    def step() -> None:
        c = g(x).argmax(-1)
        out: Any = 0
        for e in c.unique():
            out = out + blocks[e](x[c == e]).sum()
        out.backward()
        blocks.zero_grad()

    return step


STEPS: tuple[Callable[[], Step], ...] = (
    topk_by_count,
    early_exit,
    early_exit_confidence,
    dynamic_padding,
    moe_counts,
    beam_search,
    stochastic_depth,
    random_crop,
    random_resize,
    downscale_by_count,
    multiscale,
    patch_dropping,
    teacher_forcing,
    length_bucketing,
    queue_shrinks,
    span_masking,
    halting,
    temperature_chunks,
    blocks_in_loop,
    head_with_adam,
    experts_tensor_index,
)
"""Steps whose memory is bounded by what is recorded."""
