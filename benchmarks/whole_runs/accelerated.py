import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

a = Accelerator(gradient_accumulation_steps=4)
net = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 50))
opt = torch.optim.AdamW(net.parameters())
tr = DataLoader(TensorDataset(torch.randn(1000, 128), torch.randint(0, 50, (1000,))), batch_size=32, shuffle=True)
va = DataLoader(TensorDataset(torch.randn(1000, 128), torch.randint(0, 50, (1000,))), batch_size=32)
net, opt, tr, va = a.prepare(net, opt, tr, va)
for epoch in range(2):
    net.train()
    for x, y in tr:
        with a.accumulate(net):
            loss = nn.functional.cross_entropy(net(x), y)
            a.backward(loss)
            opt.step()
            opt.zero_grad()
    net.eval()
    outs = []
    for x, y in va:
        with torch.no_grad():
            o = net(x)
        outs.append(a.gather_for_metrics(o))
    print(torch.cat(outs).argmax(1).float().mean().item())
    a.save(a.unwrap_model(net).state_dict(), "m.pt")
