# SPDX-License-Identifier: Apache-2.0
"""The training of torch_test.py with precondor.torch, in its own process or as a rank of several."""

import contextlib
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

import precondor
import precondor.torch
from torch_reference import CASES, FACTOR_DECAY, GAMMA, INV_FREQ, KFAC_DAMPING, KL_CLIP, LAMBDA, WARMUP, loss_of


def statistics(kind, **more):
    """The statistics of torch_reference.py, of another kind."""
    return precondor.Statistics(kind, inv_freq=INV_FREQ, warmup_steps=WARMUP, dtype="f32", **more)


def options(case):
    """Options of a Preconditioner that computes what torch_reference.py does."""
    if case.method == "kfac":
        method = precondor.Method("kfac", {"form": "INVERSE", "damping": str(KFAC_DAMPING), "factor_decay": str(FACTOR_DECAY),
                                           "inv_update_steps": "1", "scaling_clip": str(KL_CLIP)})
        kind = "COVARIANCE"
    else:
        method = precondor.Method("mkor", {"representation": "DENSE", "gamma": GAMMA, "damping": LAMBDA})
        kind = "PER_WORKER_MEAN"
    return {"method": method, "statistics": statistics(kind)}


def train(address, session, case, rank=0, world_size=1, micro_batches=1, wrap=None, scaler=None, unscale=False,
          overflow=(), at_end=lambda pre: None, **changes):
    """(the losses of this rank, last weights, results of the steps, the loss scale at the end).

    scaler: a loss scale to begin with. unscale: this loop does it, and not Preconditioner. overflow: (rank, step) in which
    one gradient of one layer is infinite. at_end: called with the preconditioner after the last step.
    """
    case = CASES[case]
    model = case.model()
    trained = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), case.rate, momentum=case.momentum)
    amp = None if scaler is None else torch.amp.GradScaler("cpu", init_scale=scaler)
    losses, results = [], []
    with precondor.torch.Preconditioner(trained, address, session=session, optimizer=optimizer,
                                        **{**options(case), **changes}) as pre:
        for step in range(case.steps):
            x, y = (part[rank::world_size].float() for part in case.batch_of(step))
            optimizer.zero_grad()
            parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches)))
            total = 0.0
            for place, (part_x, part_y) in enumerate(parts):
                with pre.no_sync() if place + 1 < len(parts) else contextlib.nullcontext():
                    loss = loss_of(trained(part_x), part_y) / len(parts)
                    (loss if amp is None else amp.scale(loss)).backward()
                total += loss.item()
            if (rank, step) in overflow:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            if amp is None:
                results.append(pre.step(total))
                optimizer.step()
            else:
                if unscale:
                    amp.unscale_(optimizer)
                results.append(pre.step(total, scaler=amp))
                amp.step(optimizer)
                amp.update()
            losses.append(total)
        at_end(pre)
    return losses, [parameter.detach() for parameter in model.parameters()], results, None if amp is None else amp.get_scale()


def train_with_checkpoints(address, session, folder, steps=12, exchange="DIRECT", die=None, before_step=lambda step: None,
                           only_due=False, end=True, load=None, factors=False, rank=0, world_size=1, **changes):
    """The "conv" case with Adam and the default statistics, from the checkpoint in `folder` where there is one.

    Saves after every step, or when checkpoint_due. die: [step, "before" or "after" pre.step], at which the process ends at
    once. before_step: called with the step between the backward pass and pre.step. load: options of load_state_dict. factors:
    the checkpoints have them.
    Returns (weights, results of the steps that this call made).
    """
    case = CASES["conv"]
    model = case.model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    path = pathlib.Path(folder) / f"checkpoint-{rank}.pt"
    pre = precondor.torch.Preconditioner(model, address, session=session, optimizer=optimizer, exchange=exchange, seed=5,
                                         **{"method": "mkor", "statistics": precondor.Statistics(inv_freq=2, warmup_steps=3), **changes})
    results = []
    try:
        first = 0
        if path.exists():
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            pre.load_state_dict(saved["pre"], **(load or {}))
            first = pre.step_number
        for step in range(first, steps):
            x, y = (part[rank::world_size].float() for part in case.batch_of(step))
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            before_step(step)
            if die == [step, "before"]:
                os._exit(9)
            results.append(pre.step(loss))
            if die == [step, "after"]:
                os._exit(9)
            optimizer.step()
            if pre.checkpoint_due or not only_due:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "pre": pre.state_dict(factors=factors)}, f"{path}.tmp")
                os.replace(f"{path}.tmp", path)
        pre.close(end_session=end)
    finally:
        pre.close()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()], results


if __name__ == "__main__":  # ADDRESS SESSION FOLDER OPTIONS: train_with_checkpoints, alone or as a rank on gloo
    torch.set_num_threads(1)
    chosen = json.loads(sys.argv[4])
    if chosen.get("world_size", 1) > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}/group", rank=chosen["rank"],
                                world_size=chosen["world_size"])
    train_with_checkpoints(*sys.argv[1:4], **chosen)
