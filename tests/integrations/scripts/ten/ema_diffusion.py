import os

import torch
from monai.networks.nets import DiffusionModelUNet
from monai.networks.schedulers import DDPMScheduler
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
unet = DiffusionModelUNet(
    spatial_dims=2, in_channels=3, out_channels=3, channels=(32, 64), attention_levels=(False, True),
    num_res_blocks=1, num_head_channels=32, norm_num_groups=8,
)  # fmt: skip
ema = AveragedModel(unet, multi_avg_fn=get_ema_multi_avg_fn(0.999))
scheduler = DDPMScheduler(num_train_timesteps=1000)
opt = torch.optim.AdamW(unet.parameters(), 1e-4)
x = torch.rand(256, 3, 16, 16) * 2 - 1
os.makedirs("samples", exist_ok=True)
for it in range(100):
    b = x[torch.randint(0, len(x), (16,))]
    noise, t = torch.randn_like(b), torch.randint(0, 1000, (16,))
    loss = nn.functional.mse_loss(unet(scheduler.add_noise(b, noise, t), t), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    ema.update_parameters(unet)
    if it % 50 == 49:
        torch.save(ema.state_dict(), "samples/ema.pt")
