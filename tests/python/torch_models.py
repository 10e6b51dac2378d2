# SPDX-License-Identifier: Apache-2.0
"""Small models with the structure and the names of widespread ones."""

import torch
import transformers
from torch import nn

SIZES = {"vocab_size": 90, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def of_transformers(model, config, **options):
    return getattr(transformers, model)(getattr(transformers, config)(**options))


class Reader(nn.Module):
    """Words, a recurrent module, and an output for each word."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(90, 8), kind(8, 12, 2), nn.Linear(12, 90)


class UNet(nn.Module):
    """Down, up, and a row of numbers for the time of diffusion."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)])
        self.middle, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)


class Mixer(nn.Module):
    """A selective state space."""

    def __init__(self, dim, state):
        super().__init__()
        self.in_proj, self.conv1d = nn.Linear(dim, 4 * dim, bias=False), nn.Conv1d(2 * dim, 2 * dim, 4, groups=2 * dim)
        self.x_proj, self.dt_proj = nn.Linear(2 * dim, 1 + 2 * state, bias=False), nn.Linear(1, 2 * dim)
        self.A_log, self.D = nn.Parameter(torch.zeros(2 * dim, state)), nn.Parameter(torch.ones(2 * dim))
        self.out_proj = nn.Linear(2 * dim, dim, bias=False)


class Experts(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(4, 2 * dim, dim)), nn.Parameter(torch.zeros(4, dim, dim))


class Mixture(nn.Module):
    """A router, and experts in one stack."""

    def __init__(self, dim):
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 4, bias=False), Experts(dim)


class Blocks(nn.Module):
    """Words, blocks, and an output for each word."""

    def __init__(self, block):
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(90, 16), nn.ModuleList(block() for _ in range(2)), nn.Linear(16, 90, bias=False)


class Lora(nn.Module):
    """As PEFT's: the base is frozen."""

    def __init__(self, base, rank):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.query, self.value = nn.Embedding(90, 16), Lora(nn.Linear(16, 16), 2), Lora(nn.Linear(16, 16), 2)
        self.head = nn.Linear(16, 90, bias=False)
        self.words.requires_grad_(False)
        self.head.requires_grad_(False)


class Linear(nn.Module):
    """As PyTorch Geometric's, which is no subclass of torch's."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(d_out, d_in)), None


Linear.__module__ = "torch_geometric.nn.dense.linear"


class GraphConvolution(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin, self.bias = Linear(d_in, d_out), nn.Parameter(torch.zeros(d_out))


class Graph(nn.Module):
    """Atoms of some kinds, and a number for each molecule."""

    def __init__(self):
        super().__init__()
        self.atoms, self.conv1, self.conv2 = nn.Embedding(20, 16), GraphConvolution(16, 24), GraphConvolution(24, 16)
        self.out = nn.Linear(16, 1)


class Projection(nn.Module):
    """A weight of its own, from the right."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(d_in, d_out))


class Unknown(nn.Module):
    """Most of its matrices are in modules that torch does not have."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(90, 16)
        self.layers = nn.ModuleList(nn.ModuleDict({"mix": Projection(16, 48), "wide": Projection(16, 64)}) for _ in range(2))
        self.dense, self.head = nn.Linear(16, 16), nn.Linear(16, 90)
