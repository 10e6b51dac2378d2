# SPDX-License-Identifier: Apache-2.0
"""Precondor as an optax gradient transformation, over precondor.Client through JAX's io_callback."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback


class PrecondorState(NamedTuple):
    step: jax.Array


def scale_by_precondor(worker, learning_rate=0.0):
    """Gradients become what the servers of `worker` (precondor.Worker) answer.

    Updates are a list with a gradient [d_out, d_in] for each layer of worker.spec, in its order. `update` takes besides:
        loss: of the step.
        inputs, output_gradients: a list each, per layer the rows [n, d_in] that went in (ending in a 1 where the layer has a
            folded bias) and the gradients [n, d_out] of a loss that is a mean over the n rows of all.
    They are read at statistic steps alone. The gradient of a layer that is answered "SKIP" becomes 0.

    To be called in order of steps, once each, jitted or not; a new state begins with step 0, so it wants a worker that does.
    What the client raises ends the jitted call with JAX's own error, which has its message.
    """

    def exchange(step, loss, gradients, inputs, output_gradients):
        step = int(step)
        rows = len(inputs[0])
        futures = []
        for layer, gradient in enumerate(gradients):
            if worker.needs_statistics(step, layer):
                worker.send_statistics(
                    step, layer, worker.compute_statistics(step, layer, "input", np.asarray(inputs[layer])),
                    worker.compute_statistics(step, layer, "output", np.asarray(output_gradients[layer]), row_scale=rows), rows)
            futures.append(worker.precondition(step, layer, np.asarray(gradient), rows))
        answers = [future.result().gradient for future in futures]
        worker.report_step(step, float(loss), rows, learning_rate)
        return [np.zeros_like(gradient) if answer is None else answer for answer, gradient in zip(answers, gradients)]

    def init(params):
        del params
        return PrecondorState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, loss, inputs, output_gradients, **unused):
        del params, unused
        shapes = [jax.ShapeDtypeStruct(gradient.shape, jnp.float32) for gradient in updates]
        answers = io_callback(exchange, shapes, state.step, loss, updates, inputs, output_gradients, ordered=True)
        return answers, PrecondorState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def gradients_and_rows(apply, loss_of, weights, x, y):
    """The loss, and of each layer the gradient, the rows that went in and the gradients of what came out.

    apply(weights, taps, x) gives the network's output and a list of the layers' input rows; it adds taps[i], zeros here, to
    what layer i gives, so that their gradients are those of the layers' outputs. loss_of(output, y): the mean over rows.
    """
    taps = [jnp.zeros((len(x), w.shape[0]), w.dtype) for w in weights]

    def loss(weights, taps):
        output, inputs = apply(weights, taps, x)
        return loss_of(output, y), inputs

    (value, inputs), (gradients, output_gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, taps)
    return value, gradients, inputs, output_gradients


def mlp(weights, taps, x):
    """Layers W [d_out, d_in + 1] with the bias folded in, tanh between them; as `apply` of gradients_and_rows."""
    inputs = []
    for place, (w, tap) in enumerate(zip(weights, taps)):
        inputs.append(jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], axis=1))
        x = inputs[-1] @ w.T + tap
        if place + 1 < len(weights):
            x = jnp.tanh(x)
    return x, inputs
