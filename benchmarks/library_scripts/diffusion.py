"""Unconditional diffusion in the way of the diffusers examples: Accelerator, EMA, a sampled image at the end."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
model = UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64, 64),
    norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
)
ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
noises = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
loader = DataLoader(TensorDataset(torch.rand(32, 3, 32, 32) * 2 - 1), batch_size=4, shuffle=True)
schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
ema.to(accelerator.device)

for epoch in range(1):
    model.train()
    for (clean,) in loader:
        noise = torch.randn_like(clean)
        steps = torch.randint(0, noises.config.num_train_timesteps, (len(clean),), device=clean.device).long()
        noisy = noises.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noisy, steps).sample.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())

unet = accelerator.unwrap_model(model)
ema.store(unet.parameters())
ema.copy_to(unet.parameters())
pipeline = DDPMPipeline(unet=unet, scheduler=noises)
pipeline.set_progress_bar_config(disable=True)
images = pipeline(batch_size=2, num_inference_steps=3, output_type="np").images
print(images.shape)
ema.restore(unet.parameters())
