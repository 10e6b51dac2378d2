# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Precondor beside AdamW
# This notebook trains an autoencoder of handwritten digits twice, from the same weights and on the same batches: with AdamW
# alone, and with Precondor's default. It draws both losses against the step and against the time.
#
# An editor that knows `# %%` cells (VS Code, PyCharm, Spyder) runs them one by one in this folder, and `jupytext --to notebook`
# makes an .ipynb of them. The notebook needs torch, precondor, and matplotlib (`pip install matplotlib`).

# %%
import copy
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

from digits_data import Digits
from precondor.torch import Preconditioner

STEPS = 600
BATCH = 128
ADAMW_RATE = 0.016  # the best of 0.004, 0.008, 0.016 and 0.032
PRECONDOR_RATE = 0.064  # the best of 0.008, 0.016, 0.032, 0.064 and 0.128

# %% [markdown]
# ## Data and model

# %%
torch.manual_seed(1)
digits = Digits()
widths = [64, 48, 24, 8, 24, 48, 64]
layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
start = nn.Sequential(*layers[:-1])


# %%
def train(model, optimizer, before_step):
    """Returns the loss of each step and the seconds until its end. The rate falls linearly to zero."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    losses, seconds, begin = [], [], time.monotonic()
    for step in range(STEPS):
        pixels, _ = digits.batch(step, BATCH, seed=1)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(pixels), pixels)
        loss.backward()
        before_step(loss)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.monotonic() - begin)
    return losses, seconds


# %% [markdown]
# ## AdamW alone

# %%
adamw = copy.deepcopy(start)
runs = {"AdamW": train(adamw, torch.optim.AdamW(adamw.parameters(), lr=ADAMW_RATE), lambda loss: None)}

# %% [markdown]
# ## Precondor
# `"local"` starts a server for this process. Give the address of a coordinator and a `session` name to use a running one.

# %%
preconditioned = copy.deepcopy(start)
with Preconditioner(preconditioned, "local") as pre:
    runs["Precondor"] = train(preconditioned, pre.make_optimizer(lr=PRECONDOR_RATE), pre.step)

# %% [markdown]
# ## Both losses

# %%
figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for name, (losses, seconds) in runs.items():
    by_step.plot(losses, label=name)
    by_time.plot(seconds, losses, label=name)
    print(f"{name}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last, {seconds[-1]:.1f} s")
by_step.set(xlabel="step", ylabel="training loss", yscale="log")
by_time.set(xlabel="time, s")
by_step.legend()
figure.savefig("losses.png", dpi=120)
plt.show()
