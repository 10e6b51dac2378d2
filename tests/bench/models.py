# SPDX-License-Identifier: Apache-2.0
"""The hidden linear layers of models whose steps are measured."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    title: str
    block: tuple  # d_out, d_in of each layer of a block
    blocks: int

    @property
    def layers(self):
        return self.block * self.blocks


BERT_LARGE = Model("BERT-Large's 144 layers", ((1024, 1024),) * 4 + ((4096, 1024), (1024, 4096)), 24)
# Llama 3.2 1B: 8 heads of keys and values, and three matrices of the feed-forward part.
LLAMA_1B = Model("the 112 layers of a Llama of a billion parameters",
                 ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)), 16)


def of_step(name):
    """Returns the model of which the name of a step speaks."""
    return LLAMA_1B if name.endswith("_llama_1b") else BERT_LARGE
