# SPDX-License-Identifier: Apache-2.0
"""A small MLP trained with mkor through the service, and the same in f64 from the formulas of docs/use/methods/mkor.md.

W [d_out, d_in + 1] with the bias folded in; tanh between; half the mean squared error. Rank r has every world_size-th row.
"""

import numpy as np

import precondor

WIDTHS = (4, 7, 3)
ROWS = 24
STEPS = 30
RATE = 0.1
GAMMA = 0.9
DAMPING = 1.0
INV_FREQ, WARMUP = 3, 5
EXCHANGES = ("DIRECT", "DELEGATE", "REPLAY", "PULL_FACTORS")


def problem():
    """Inputs, targets and first weights."""
    random = np.random.default_rng(7)
    x = random.standard_normal((ROWS, WIDTHS[0]))
    y = np.tanh(x @ random.standard_normal((WIDTHS[0], WIDTHS[-1])))
    weights = [0.5 * random.standard_normal((d_out, d_in + 1)) for d_in, d_out in zip(WIDTHS, WIDTHS[1:])]
    return x, y, weights


def backward(weights, x, y):
    """The loss, and of each layer its inputs with a 1 appended and the gradients of its outputs, of the mean over rows."""
    inputs, h = [], x
    for place, w in enumerate(weights):
        inputs.append(np.hstack([h, np.ones((len(h), 1), h.dtype)]))
        h = inputs[-1] @ w.T
        if place + 1 < len(weights):
            h = np.tanh(h)
    error = h - y
    grads, g = [], error / len(x)
    for place in reversed(range(len(weights))):
        grads.insert(0, g)
        if place > 0:
            g = (g @ weights[place][:, :-1]) * (1 - inputs[place][:, :-1]**2)
    return 0.5 * float(np.mean(np.sum(error**2, axis=1))), inputs, grads


def damped_inverse(moment, updates):
    """J of rule EXACT_DAMPED."""
    d = len(moment)
    corrected = moment / (1 - GAMMA**updates)
    return np.linalg.inv(corrected + DAMPING * np.trace(corrected) / d * np.eye(d))


def reference(world_size):
    """The losses and last weights in f64, of statistics PER_WORKER_MEAN and scaling NORM_RESCALE."""
    x, y, weights = problem()
    moments = [(np.zeros((w.shape[1],) * 2), np.zeros((w.shape[0],) * 2)) for w in weights]
    losses, updates = [], 0
    for step in range(STEPS):
        loss, inputs, grads = backward(weights, x, y)
        losses.append(loss)
        if step < WARMUP or step % INV_FREQ == 0:
            updates += 1
            for layer, (a, g) in enumerate(moments):
                for moment, rows in ((a, inputs[layer]), (g, ROWS * grads[layer])):
                    moment *= GAMMA
                    for rank in range(world_size):
                        v = rows[rank::world_size].mean(axis=0)
                        moment += (1 - GAMMA) / world_size * np.outer(v, v)
        for layer, w in enumerate(weights):
            d = grads[layer].T @ inputs[layer]
            u = damped_inverse(moments[layer][1], updates) @ d @ damped_inverse(moments[layer][0], updates)
            weights[layer] = w - RATE * u * np.linalg.norm(d) / np.linalg.norm(u)
    return losses, weights


def session(name, world_size, exchange):
    method = precondor.Method("mkor", {"representation": "DENSE", "gamma": GAMMA, "damping": DAMPING})
    layers = [precondor.Layer(f"fc{i}", d_out, d_in + 1, True) for i, (d_in, d_out) in enumerate(zip(WIDTHS, WIDTHS[1:]))]
    return precondor.SessionSpec(name, layers, method, world_size=world_size, exchange=exchange, inv_freq=INV_FREQ,
                                 warmup_steps=WARMUP, statistics="PER_WORKER_MEAN", statistics_dtype="f32")


def train(address, name, rank, world_size, exchange, peer):
    """One rank's losses over all rows, and last weights. `peer`: a connection to the other rank, for all but DIRECT."""
    x, y, weights = problem()
    x, y = x.astype(np.float32), y.astype(np.float32)
    weights = [w.astype(np.float32) for w in weights]
    mine = slice(rank, None, world_size)
    losses = []
    with precondor.Client(address) as client, client.open_session(session(name, world_size, exchange)).join(rank) as worker:
        for step in range(STEPS):
            losses.append(backward(weights, x, y)[0])
            _, inputs, grads = backward(weights, x[mine], y[mine])
            count = len(inputs[0])
            futures = {}
            for layer in reversed(range(len(weights))):
                if worker.needs_statistics(step, layer):
                    worker.send_statistics(step, layer, worker.compute_statistics(step, layer, "input", inputs[layer]),
                                           worker.compute_statistics(step, layer, "output", grads[layer], count), count)
                gradient = grads[layer].T @ inputs[layer]
                if exchange != "DIRECT":
                    peer.send(gradient)
                    gradient = (gradient + peer.recv()) / 2
                if worker.sends_gradient(layer):
                    futures[layer] = worker.precondition(step, layer, gradient, count)
            answers = {layer: future.result().gradient for layer, future in futures.items()}
            if exchange == "DELEGATE":
                peer.send(answers)
                answers.update(peer.recv())
            for layer, answer in answers.items():
                weights[layer] -= np.float32(RATE) * answer
            worker.report_step(step, losses[-1], count, RATE)
        worker.flush()
    return losses, weights
