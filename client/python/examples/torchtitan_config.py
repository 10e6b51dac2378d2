# SPDX-License-Identifier: Apache-2.0
"""Configurations of torchtitan 0.3 with Precondor's optimizer. To start its trainer in a checkout of it, which has test data:

  export PYTHONPATH=FOLDER_OF_THIS_FILE
  torchrun --nproc_per_node 8 -m torchtitan.train --module torchtitan_config --config llama3_debugmodel --optimizer.lr 0.003
"""

from dataclasses import dataclass

from precondor.torch import Preconditioner
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.llama3 import config_registry


class PrecondorOptimizer(OptimizersContainer):
    """The optimizer of Preconditioner.make_optimizer, which calls Preconditioner.step itself. Checkpoints have the factors."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The inherited fields have no effect."""
        lr: float = 0.002
        weight_decay: float = 0.1
        address: str = "local"
        session: str = "torchtitan"
        method: str | None = None

    def __init__(self, config, *, model_parts):
        model, = self.model_parts = model_parts  # pipeline parallelism is not supported
        self.pre = Preconditioner(model, config.address, session=config.session, method=config.method)
        optimizer = self.pre.make_optimizer(config.lr, weight_decay=config.weight_decay)
        self.pre.attach(optimizer)
        names = {parameter: canonical_fqn(name) for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            group["param_names"] = [names[parameter] for parameter in group["params"]]  # torchtitan's checkpoints go by names
        self.optimizers = [optimizer]
        self._post_init(list(names))

    def state_dict(self):
        return {**super().state_dict(), "precondor": self.pre.state_dict(factors=True)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.pre.load_state_dict(state_dict["precondor"])


def with_precondor(config):
    """The configuration, with Precondor's optimizer."""
    config.optimizer = PrecondorOptimizer.Config()
    config.training.disable_cuda_graphs = True
    return config


def llama3_debugmodel():
    return with_precondor(config_registry.llama3_debugmodel())
