# SPDX-License-Identifier: Apache-2.0
"""The tasks of the training benchmark: a model, its batches and its held-out loss, each on real data."""

import collections
import dataclasses
import functools
import itertools
import pathlib
import re
import sys
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client" / "python" / "examples"))

import convnet
import gpt
from bible_text import Characters, king_james, verses
from digits_data import Digits

PHOTOGRAPHS = pathlib.Path("/usr/share/backgrounds/mate/nature")  # Debian's mate-backgrounds
NOISE = 0.1  # standard deviation; pixels are in 0 ... 1
CROP = 32


@dataclasses.dataclass(frozen=True)
class Task:
    """make_model is called after torch.manual_seed. batch(step, seed) is independent of the method. held_out(model) is a mean loss.

    not_hidden: names of matrices that methods for hidden layers leave to AdamW.
    """

    steps: int
    make_model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    held_out: Callable[[nn.Module], torch.Tensor]
    not_hidden: tuple = ()


@functools.lru_cache(None)
def char_gpt(steps, width=128, blocks=5):
    data = Characters(king_james(), 64)
    held_out = data.held_out_batch(64)
    return Task(steps, lambda: gpt.Gpt(len(data.vocabulary), 64, width, blocks, 4),
                lambda step, seed: data.batch(step, 16, seed), gpt.loss_of, lambda model: gpt.loss_of(model, held_out),
                ("characters.weight", "places.weight", "head.weight"))


class Lstm(nn.Module):
    """Logits of the character that follows each."""

    def __init__(self, vocabulary, narrow, wide):
        super().__init__()
        self.characters, self.recurrent = nn.Embedding(vocabulary, narrow), nn.LSTM(narrow, wide, batch_first=True)
        self.head = nn.Linear(wide, vocabulary)

    def forward(self, characters):
        return self.head(self.recurrent(self.characters(characters))[0])


@functools.lru_cache(None)
def char_lstm(steps):
    data = Characters(king_james(), 48)
    held_out = data.held_out_batch(64)
    return Task(steps, lambda: Lstm(len(data.vocabulary), 48, 96), lambda step, seed: data.batch(step, 16, seed), gpt.loss_of,
                lambda model: gpt.loss_of(model, held_out), ("characters.weight", "head.weight"))


def mlp(widths):
    """Linear layers with tanh between them."""
    modules = []
    for d_in, d_out in zip(widths, widths[1:]):
        layer = nn.Linear(d_in, d_out)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


@functools.lru_cache(None)
def autoencoder():
    data = Digits()

    def loss(model, batch):
        return functional.mse_loss(model(batch[0]), batch[0])

    return Task(600, lambda: mlp((64, 48, 24, 8, 24, 48, 64)),
                lambda step, seed: data.batch(step, 128, seed), loss, lambda model: loss(model, data.held_out))


@functools.lru_cache(None)
def noisy_digits():
    """The residual net with batch norm of convnet.py. Each batch has noise of its own, so that 1,438 images are not learnt by heart."""
    data = Digits()

    def noisy(batch, seed):
        images = batch[0].view(-1, 1, convnet.SIDE, convnet.SIDE)
        return images + 0.25 * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)), batch[1]

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    held_out = noisy([tensor.repeat(4, *[1] * (tensor.dim() - 1)) for tensor in data.held_out], 0)
    return Task(100, convnet.resnet, lambda step, seed: noisy(data.batch(step, 128, seed), seed * 1_000_003 + step), loss,
                lambda model: loss(model, held_out), ("8.weight",))


class Photographs:
    """Noisy crops [n, 3, 32, 32] of photographs at a quarter of their size, and the crops. Every fifth photograph is held out."""

    def __init__(self, folder=PHOTOGRAPHS):
        from PIL import Image  # pylint: disable=import-outside-toplevel
        files = sorted(folder.glob("*.jpg"))
        if len(files) < 5:
            raise SystemExit(f"{folder}: expected at least 5 photographs, got {len(files)}; install Debian's mate-backgrounds")
        images = []
        for file in files:
            with Image.open(file) as image:
                small = image.convert("RGB").reduce(4)
                pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
                images.append(pixels.view(small.height, small.width, 3).permute(2, 0, 1) / 255.0)
        self.train = [image for i, image in enumerate(images) if i % 5 != 4]
        self.held_out = self.crops([image for i, image in enumerate(images) if i % 5 == 4], 64, torch.Generator().manual_seed(0))

    def crops(self, images, count, generator):
        clean = []
        for _ in range(count):
            image = images[torch.randint(len(images), (), generator=generator)]
            y, x = (int(torch.randint(size - CROP, (), generator=generator)) for size in image.shape[1:])
            clean.append(image[:, y:y + CROP, x:x + CROP])
        clean = torch.stack(clean)
        return clean + NOISE * torch.randn(clean.shape, generator=generator), clean

    def batch(self, step, seed):
        return self.crops(self.train, 16, torch.Generator().manual_seed(seed * 1_000_003 + step))


def denoiser(norm):
    """Five 3 x 3 convolutions, the inner ones with 32 channels."""
    modules = []
    for before, after in ((3, 32), (32, 32), (32, 32), (32, 32)):
        modules += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*modules, nn.Conv2d(32, 3, 3, padding=1))


@functools.lru_cache(None)
def denoising(norm):
    data = Photographs()

    def loss(model, batch):
        return functional.mse_loss(model(batch[0]), batch[1])

    return Task(200, lambda: denoiser(norm), data.batch, loss,
                lambda model: 100 * loss(model, data.held_out))


class Passages:
    """Passages of WORDS words of the King James text, and which part of it each is from: [n, WORDS] and [n]. The KNOWN most frequent
    words have numbers, all others share one. Of each book the last tenth is held out."""

    WORDS, KNOWN = 32, 2000
    BOOKS = (5, 12, 5, 17, 5, 22)  # law, history, wisdom, prophets; gospels and acts, letters

    def __init__(self):
        books = [[word for _, text in group for word in re.findall("[a-z]+", text.lower())]
                 for _, group in itertools.groupby(verses(), key=lambda verse: verse[0])]
        frequent = collections.Counter(itertools.chain(*books)).most_common(self.KNOWN)
        place = {word: i for i, (word, _) in enumerate(frequent)}
        parts = itertools.chain(*([part] * count for part, count in enumerate(self.BOOKS)))
        self._train, held_out = [], []
        for part, words in zip(parts, books, strict=True):
            numbers = torch.tensor([place.get(word, self.KNOWN) for word in words])
            boundary = len(numbers) - len(numbers) // 10
            self._train += self._windows(numbers[:boundary], part, 4)
            held_out += self._windows(numbers[boundary:], part, self.WORDS)
        self.held_out = self._stack(held_out[::5])

    def _windows(self, numbers, part, step):
        return [(numbers[i:i + self.WORDS], part) for i in range(0, len(numbers) - self.WORDS + 1, step)]

    @staticmethod
    def _stack(passages):
        return torch.stack([words for words, _ in passages]), torch.tensor([part for _, part in passages])

    def batch(self, step, seed):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return self._stack([self._train[i] for i in torch.randint(len(self._train), (32,), generator=generator)])


class Reader(nn.Module):
    """A transformer that looks in both directions; the mean over a passage decides."""

    def __init__(self, vocabulary, length, dim, layers, classes):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(gpt.Block(dim, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        gpt.set_first_weights(self, layers)

    def forward(self, words):
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x, 0.0)
        return self.head(self.norm(x).mean(1))


@functools.lru_cache(None)
def passages():
    data = Passages()

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    return Task(300, lambda: Reader(data.KNOWN + 1, data.WORDS, 96, 3, len(data.BOOKS)), data.batch, loss,
                lambda model: loss(model, data.held_out), ("words.weight", "places.weight", "head.weight"))


class Bert(nn.Module):
    """Logits of each character of a text in which some are hidden; the words' weight is the head's too."""

    def __init__(self, vocabulary, length, dim, layers):
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim), nn.Embedding(2, dim)
        self.blocks = nn.ModuleList(gpt.Block(dim, 4) for _ in range(layers))
        self.first_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dense, self.head = nn.Linear(dim, dim), nn.Linear(dim, vocabulary)
        gpt.set_first_weights(self, layers)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.first_norm(self.words(words) + self.places.weight + self.types.weight[0])
        for block in self.blocks:
            x = block(x, 0.0)
        return self.head(self.norm(functional.gelu(self.dense(x))))


@functools.lru_cache(None)
def masked(steps):
    data = Characters(king_james(), 16)
    mask = len(data.vocabulary)

    def hide(batch, seed):
        characters = batch[0]
        hidden = torch.rand(characters.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        return characters.masked_fill(hidden, mask), characters.masked_fill(~hidden, -100)  # which cross_entropy leaves out

    held_out = hide(data.held_out_batch(128), 0)
    return Task(steps, lambda: Bert(mask + 1, 16, 64, 2), lambda step, seed: hide(data.batch(step, 32, seed), seed * 1_000_003 + step),
                gpt.loss_of, lambda model: gpt.loss_of(model, held_out), ("words.weight", "places.weight", "types.weight"))


class OwnLinear(nn.Module):
    """A linear layer that Preconditioner does not know."""

    def __init__(self, linear):
        super().__init__()
        self.kernel, self.bias = nn.Parameter(linear.weight.detach().T.clone()), nn.Parameter(torch.zeros_like(linear.bias))

    def forward(self, x):
        return x @ self.kernel + self.bias


@functools.lru_cache(None)
def own_modules():
    data = Characters(king_james(), 48)
    held_out = data.held_out_batch(64)

    def make_model():
        model = gpt.Gpt(len(data.vocabulary), 48, 64, 3, 4)
        for block in model.blocks:
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, name, OwnLinear(module))
        return model

    return Task(300, make_model, lambda step, seed: data.batch(step, 16, seed), gpt.loss_of, lambda model: gpt.loss_of(model, held_out),
                ("characters.weight", "places.weight", "head.weight"))


# Small models of transformers. GPT-2 and OPT have tied words and a table of positions; GPT-NeoX and Llama turn queries and keys instead.
OF_TRANSFORMERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
                                               "embd_pdrop": 0.0, "attn_pdrop": 0.0}, ("transformer.wte", "transformer.wpe")),
    "opt": ("OPTForCausalLM", "OPTConfig", {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
                                            "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 64},
            ("model.decoder.embed_tokens", "model.decoder.embed_positions")),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
                                                     "num_attention_heads": 4, "max_position_embeddings": 64}, ("gpt_neox.embed_in", "lm_head")),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4,
                                                  "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False},
              ("model.embed_tokens", "lm_head"))}


@functools.lru_cache(None)
def of_transformers(name):
    import transformers  # pylint: disable=import-outside-toplevel
    data = Characters(king_james(), 64)
    held_out = data.held_out_batch(64)
    model, config, options, ends = OF_TRANSFORMERS[name]

    def make_model():
        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=len(data.vocabulary), use_cache=False, **options))

    def loss(model, batch):
        return gpt.loss_of(lambda characters: model(characters).logits, batch)

    return Task(200, make_model, lambda step, seed: data.batch(step, 16, seed), loss, lambda model: loss(model, held_out),
                tuple(f"{end}.weight" for end in ends))


TASKS = {"gpt": lambda: char_gpt(300), "gpt-1000": lambda: char_gpt(1000), "gpt-6m": lambda: char_gpt(300, 256, 8),
         "lstm": lambda: char_lstm(300), "digits": autoencoder, "denoise": lambda: denoising(False),
         "denoise-norm": lambda: denoising(True), "passages": passages, "bert": lambda: masked(800), "bert-640": lambda: masked(640),
         "bert-730": lambda: masked(730), "resnet": noisy_digits, "own": own_modules,
         **{name: functools.partial(of_transformers, name) for name in OF_TRANSFORMERS}}
# Middles, before a method's multiple.
RATES = {"gpt": 0.004, "gpt-1000": 0.004, "gpt-6m": 0.004, "lstm": 0.016, "digits": 0.016, "denoise": 0.004, "denoise-norm": 0.004,
         "passages": 0.004, "bert": 0.008, "bert-640": 0.008, "bert-730": 0.008, "resnet": 0.008, "own": 0.008,
         **dict.fromkeys(OF_TRANSFORMERS, 0.016)}
