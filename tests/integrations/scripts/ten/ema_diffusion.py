import os

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
ema = AveragedModel(unet, multi_avg_fn=get_ema_multi_avg_fn(0.999))
sched = DDPMScheduler(num_train_timesteps=1000)
opt = torch.optim.AdamW(unet.parameters(), 1e-4)
x = torch.rand(256, 3, 16, 16) * 2 - 1
os.makedirs("samples", exist_ok=True)
for it in range(100):
    b = x[torch.randint(0, len(x), (16,))]
    noise = torch.randn_like(b)
    t = torch.randint(0, 1000, (16,))
    loss = nn.functional.mse_loss(unet(sched.add_noise(b, noise, t), t).sample, noise)
    loss.backward()
    nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    ema.update_parameters(unet)
    if it % 50 == 49:
        unet.save_pretrained("samples/unet")
