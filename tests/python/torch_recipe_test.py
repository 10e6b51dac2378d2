#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of print(Preconditioner) for widespread models: how each weight is trained, and why. Needs no server."""

import re
import unittest
import warnings
from unittest import mock

import torch
from torch import nn

from precondor.torch import Preconditioner, Selection, make_optimizer
import torch_models as models
from torch_models import SIZES, of_transformers


def printed(model, **options):
    """Returns the rows of print(pre) without those of vectors that modules have of their own, and the warnings."""
    with mock.patch.object(Preconditioner, "_open"), warnings.catch_warnings(record=True, action="always") as caught:
        pre = Preconditioner(model, "localhost:1", session="recipe", **options)
    text = str(pre)
    pre.close()
    vectors = {re.escape(name) for name, parameter in model.named_parameters() if parameter.dim() < 2}
    rows = [" | ".join(re.split("  +", row)) for row in text.splitlines()]
    assert rows[:2] == ["Preconditioner of session recipe", "layer or parameter | trained by | why"]
    return [row for row in rows[2:] if not re.match(f"({'|'.join(vectors)})( |$)", row)], [str(one.message) for one in caught]


# Names in blocks that have queries, keys and values apart.
ATTENTION = """
    {0}.q{1} | muon | queries or keys
    {0}.k{1} | muon | queries or keys
    {0}.v{1} | muon with input factor | hidden linear layer
    {0}.{2} | muon with input factor | hidden linear layer"""
LLAMA = ATTENTION.format("model.layers.0.self_attn", "_proj (x 2)", "o_proj (x 2)") + """
    model.layers.0.mlp.gate_proj (x 2) | muon with input factor | hidden linear layer
    model.layers.0.mlp.up_proj (x 2) | muon with input factor | hidden linear layer
    model.layers.0.mlp.down_proj (x 2) | muon with input factor | hidden linear layer"""
BERT = """
    bert.encoder.layer.0.attention.self.query (x 2) | muon | queries or keys
    bert.encoder.layer.0.attention.self.key (x 2) | muon | queries or keys
    bert.encoder.layer.0.attention.self.value (x 2) | muon with input factor | hidden linear layer
    bert.encoder.layer.0.attention.output.dense (x 2) | muon with input factor | hidden linear layer
    bert.encoder.layer.0.intermediate.dense (x 2) | muon with input factor | hidden linear layer
    bert.encoder.layer.0.output.dense (x 2) | muon with input factor | hidden linear layer"""
T5 = {"vocab_size": 90, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
del VISION["vocab_size"]

# Name -> how it is made, and its rows.
MODELS = {
    "LSTM": (lambda: models.Reader(nn.LSTM), """
    head | identity | linear layer at an end
    rnn.weight_ih_l0.group0 (x 4) | muon | gates of a recurrent module
    rnn.weight_hh_l0.group0 (x 4) | muon | gates of a recurrent module
    rnn.weight_ih_l1.group0 (x 4) | muon | gates of a recurrent module
    rnn.weight_hh_l1.group0 (x 4) | muon | gates of a recurrent module
    words.weight | optimizer | embedding of words"""),
    "GRU": (lambda: models.Reader(nn.GRU), """
    head | identity | linear layer at an end
    rnn.weight_ih_l0.group0 (x 3) | muon | gates of a recurrent module
    rnn.weight_hh_l0.group0 (x 3) | muon | gates of a recurrent module
    rnn.weight_ih_l1.group0 (x 3) | muon | gates of a recurrent module
    rnn.weight_hh_l1.group0 (x 3) | muon | gates of a recurrent module
    words.weight | optimizer | embedding of words"""),
    "U-Net": (models.UNet, """
    time.0 | soap | linear layer at an end
    time.2 | muon with input factor | hidden linear layer
    down.0 (x 2) | soap | convolution
    middle | soap | convolution
    up | soap | convolution
    out | soap | convolution"""),
    "Mamba": (lambda: models.Blocks(lambda: models.Mixer(16, 3)), """
    layers.0.in_proj (x 2) | muon with input factor | hidden linear layer
    layers.0.x_proj (x 2) | muon | linear layer of an expert or of few outputs
    layers.0.dt_proj (x 2) | muon with input factor | hidden linear layer
    layers.0.out_proj (x 2) | muon with input factor | hidden linear layer
    head | soap | linear layer at an end
    words.weight | optimizer, 4 x rate | embedding of words
    layers.0.A_log (x 2) | optimizer | a parameter of Mixer
    layers.0.conv1d.weight (x 2) | optimizer | a side of 1"""),
    "MoE": (lambda: models.Blocks(lambda: models.Mixture(16)), """
    layers.0.router (x 2) | muon with input factor | hidden linear layer
    head | soap | linear layer at an end
    layers.0.experts.gate_up_proj.expert0 (x 8) | muon | stack of experts
    layers.0.experts.down_proj.expert0 (x 8) | muon | stack of experts
    words.weight | optimizer, 4 x rate | embedding of words"""),
    "LoRA": (models.Adapted, """
    query.lora_A.default | muon | queries or keys
    query.lora_B.default | muon | queries or keys
    value.lora_A.default | muon | linear layer of an expert or of few outputs
    value.lora_B.default | muon with input factor | hidden linear layer
    words.weight | nothing | frozen
    query.base_layer.weight | nothing | frozen
    value.base_layer.weight | nothing | frozen
    head.weight | nothing | frozen"""),
    "GNN": (models.Graph, """
    conv1.lin | muon with input factor | hidden linear layer
    conv2.lin | muon with input factor | hidden linear layer
    atoms.weight | optimizer, 4 x rate | embedding of words
    out.weight | optimizer | a side of 1"""),
}
OF_TRANSFORMERS = {
    "GPT-2": (("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 90, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}), """
    transformer.h.0.attn.c_attn (x 2) | muon with input factor | hidden linear layer
    transformer.h.0.attn.c_proj (x 2) | muon with input factor | hidden linear layer
    transformer.h.0.mlp.c_fc (x 2) | muon with input factor | hidden linear layer
    transformer.h.0.mlp.c_proj (x 2) | muon with input factor | hidden linear layer
    transformer.wte.weight | soap | embedding that another module shares
    transformer.wpe.weight | optimizer | embedding"""),
    "Llama": (("LlamaForCausalLM", "LlamaConfig", SIZES), LLAMA + """
    lm_head | soap | linear layer at an end
    model.embed_tokens.weight | optimizer, 4 x rate | embedding of words"""),
    "Llama with tied words": (("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}), LLAMA + """
    model.embed_tokens.weight | soap | embedding that another module shares"""),
    # Keys of the feed-forward layers are hidden units.
    "RWKV": (("RwkvForCausalLM", "RwkvConfig", {"vocab_size": 90, "hidden_size": 16, "num_hidden_layers": 2}), """
    rwkv.blocks.0.attention.key (x 2) | muon | queries or keys
    rwkv.blocks.0.attention.value (x 2) | muon with input factor | hidden linear layer
    rwkv.blocks.0.attention.receptance (x 2) | muon with input factor | hidden linear layer
    rwkv.blocks.0.attention.output (x 2) | muon with input factor | hidden linear layer
    rwkv.blocks.0.feed_forward.key (x 2) | muon with input factor | hidden linear layer
    rwkv.blocks.0.feed_forward.receptance (x 2) | muon with input factor | hidden linear layer
    rwkv.blocks.0.feed_forward.value (x 2) | muon with input factor | hidden linear layer
    head | soap | linear layer at an end
    rwkv.embeddings.weight | optimizer, 4 x rate | embedding of words
    rwkv.blocks.0.attention.time_mix_key (x 2) | optimizer | a parameter of RwkvSelfAttention
    rwkv.blocks.0.attention.time_mix_value (x 2) | optimizer | a parameter of RwkvSelfAttention
    rwkv.blocks.0.attention.time_mix_receptance (x 2) | optimizer | a parameter of RwkvSelfAttention
    rwkv.blocks.0.feed_forward.time_mix_key (x 2) | optimizer | a parameter of RwkvFeedForward
    rwkv.blocks.0.feed_forward.time_mix_receptance (x 2) | optimizer | a parameter of RwkvFeedForward"""),
    "Phi-3": (("Phi3ForCausalLM", "Phi3Config", {**SIZES, "num_key_value_heads": 1, "pad_token_id": 0}), """
    model.layers.0.self_attn.qkv_proj.group0 (x 6) | muon with input factor | hidden linear layer
    model.layers.0.self_attn.o_proj (x 2) | muon with input factor | hidden linear layer
    model.layers.0.mlp.gate_up_proj (x 2) | muon with input factor | hidden linear layer
    model.layers.0.mlp.down_proj (x 2) | muon with input factor | hidden linear layer
    lm_head | soap | linear layer at an end
    model.embed_tokens.weight | optimizer, 4 x rate | embedding of words"""),
    "BERT for masked words": (("BertForMaskedLM", "BertConfig", SIZES), BERT + """
    cls.predictions.transform.dense | muon with input factor | hidden linear layer
    bert.embeddings.word_embeddings.weight | soap | embedding that another module shares
    bert.embeddings.position_embeddings.weight | soap | embedding before a norm
    bert.embeddings.token_type_embeddings.weight | soap | embedding before a norm"""),
    # Its two classes are as many as rows of token_type_embeddings.
    "BERT for classes": (("BertForSequenceClassification", "BertConfig", SIZES), BERT + """
    bert.pooler.dense | muon with input factor | hidden linear layer
    classifier | muon | linear layer of an expert or of few outputs
    bert.embeddings.word_embeddings.weight | optimizer, 4 x rate | embedding of words
    bert.embeddings.position_embeddings.weight | optimizer, 4 x rate | embedding of words
    bert.embeddings.token_type_embeddings.weight | optimizer, 4 x rate | embedding of words"""),
    "T5": (("T5ForConditionalGeneration", "T5Config", T5), ATTENTION.format("encoder.block.0.layer.0.SelfAttention", "", "o") + """
    encoder.block.0.layer.1.DenseReluDense.wi | muon with input factor | hidden linear layer
    encoder.block.0.layer.1.DenseReluDense.wo | muon with input factor | hidden linear layer""" +
           ATTENTION.format("decoder.block.0.layer.0.SelfAttention", "", "o") + ATTENTION.format("decoder.block.0.layer.1.EncDecAttention", "", "o") + """
    decoder.block.0.layer.2.DenseReluDense.wi | muon with input factor | hidden linear layer
    decoder.block.0.layer.2.DenseReluDense.wo | muon with input factor | hidden linear layer
    shared.weight | soap | embedding that another module shares
    encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight | optimizer | embedding
    decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight | optimizer | embedding"""),
    "T5 encoder": (("T5EncoderModel", "T5Config", T5), ATTENTION.format("encoder.block.0.layer.0.SelfAttention", "", "o") + """
    encoder.block.0.layer.1.DenseReluDense.wi | muon with input factor | hidden linear layer
    encoder.block.0.layer.1.DenseReluDense.wo | muon with input factor | hidden linear layer
    shared.weight | optimizer, 4 x rate | embedding of words
    encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight | optimizer | embedding"""),
    "ViT": (("ViTForImageClassification", "ViTConfig", VISION), """
    vit.embeddings.patch_embeddings.projection | soap | convolution""" + ATTENTION.format("vit.layers.0.attention", "_proj (x 2)", "o_proj (x 2)") + """
    vit.layers.0.mlp.fc1 (x 2) | muon with input factor | hidden linear layer
    vit.layers.0.mlp.fc2 (x 2) | muon with input factor | hidden linear layer
    classifier | soap | linear layer at an end
    vit.embeddings.cls_token | optimizer | a parameter of ViTEmbeddings
    vit.embeddings.position_embeddings | optimizer | a parameter of ViTEmbeddings"""),
    # Its only embedding is one of positions.
    "CLIP's images": (("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**VISION, "projection_dim": 8}), """
    vision_model.embeddings.patch_embedding | soap | convolution""" +
                      ATTENTION.format("vision_model.encoder.layers.0.self_attn", "_proj (x 2)", "out_proj (x 2)") + """
    vision_model.encoder.layers.0.mlp.fc1 (x 2) | muon with input factor | hidden linear layer
    vision_model.encoder.layers.0.mlp.fc2 (x 2) | muon with input factor | hidden linear layer
    visual_projection | soap | linear layer at an end
    vision_model.embeddings.position_embedding.weight | optimizer | embedding"""),
    "ResNet": (("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}), """
    resnet.embedder.embedder.convolution | soap | convolution
    resnet.encoder.stages.0.layers.0.layer.0.convolution (x 6) | soap | convolution
    resnet.encoder.stages.1.layers.0.shortcut.convolution | soap | convolution
    classifier.1 | soap | linear layer at an end"""),
}


class RecipeTest(unittest.TestCase):
    maxDiff = None

    def check(self, model, rows, **options):
        found, warned = printed(model, **options)
        self.assertEqual(sorted(found), sorted(row.strip() for row in rows.strip().splitlines()))
        self.assertEqual(warned, [])

    def test_widespread_models(self):
        for name, (make, rows) in MODELS.items():
            with self.subTest(name):
                self.check(make(), rows)

    def test_models_of_transformers(self):
        for name, ((model, config, options), rows) in OF_TRANSFORMERS.items():
            with self.subTest(name):
                self.check(of_transformers(model, config, **options), rows)

    def test_matrices_of_unknown_modules(self):
        """They are trained by muon where they are most of the model, with one warning."""
        rows, warned = printed(models.Unknown())
        self.assertEqual(rows, ["dense | muon with input factor | hidden linear layer", "head | soap | linear layer at an end",
                                "layers.0.mix.kernel (x 2) | muon | matrix of an unknown module",
                                "layers.0.wide.kernel (x 2) | muon | matrix of an unknown module",
                                "words.weight | optimizer, 4 x rate | embedding of words"])
        self.assertEqual(len(warned), 1)
        self.assertRegex(warned[0], r"in modules that it does not know\. muon trains them by their gradients: layers\.0\.wide\.kernel, ")

    def test_unknown_are_matrices_alone(self):
        class Lists(nn.Module):
            def __init__(self):
                super().__init__()
                self.sides = nn.ParameterList([nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 6))])
                self.heads, self.norm = nn.Parameter(torch.zeros(6, 2, 3)), nn.LayerNorm([4, 6])

        rows, warned = printed(Lists())
        self.assertEqual(rows, ["sides.0 (x 2) | muon | matrix of an unknown module", "heads | optimizer | a parameter of Lists",
                                "norm.weight | optimizer | a parameter of LayerNorm", "norm.bias | optimizer | a parameter of LayerNorm"])
        self.assertRegex(warned[0], r"by their gradients: sides\.0, sides\.1\. register_layer")

    def test_a_model_that_is_left_to_adamw(self):
        rows, warned = printed(models.Unknown(), selection=Selection(max_dim=20))
        self.assertEqual(rows, ["dense | mkor, 0.5 x rate | hidden linear layer",
                                "words.weight | optimizer, 0.5 x rate | embedding of words",
                                "layers.0.mix.kernel (x 2) | optimizer, 0.5 x rate | a parameter of Projection",
                                "layers.0.wide.kernel (x 2) | optimizer, 0.5 x rate | a parameter of Projection",
                                "head.weight | optimizer, 0.5 x rate | its longer side of 90 is not in [2, 20]"])
        self.assertEqual(len(warned), 1)
        self.assertRegex(warned[0], r"no layers, and are left to the optimizer.* AdamW at half of lr.*: head\.weight, ")

    def test_an_optimizer_that_is_made_first_changes_nothing(self):
        for options in ({}, {"selection": Selection(max_dim=20)}):
            for make in (models.Unknown, lambda: models.Blocks(lambda: models.Mixture(16)), lambda: models.Reader(nn.LSTM)):
                model = make()
                self.assertEqual(printed(model, optimizer=make_optimizer(model, 0.1, **options), **options), printed(model, **options))

    def test_input_factors(self):
        """Layers of up to 2,048 inputs, and up to 4 for an output, have them, but for experts and separate queries and keys."""
        class Long(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.wide, self.longer = nn.Embedding(90, 6), nn.Linear(6, 2047), nn.Linear(2048, 512, bias=False)
                self.few, self.expert_1 = nn.Linear(33, 8), nn.Linear(6, 6)
                self.longest, self.attention = nn.Linear(2048, 512), nn.MultiheadAttention(6, 2, kdim=4, vdim=4)
                self.to_q, self.kernel, self.sequence = (nn.Linear(6, 6) for _ in range(3))
                self.key_layer = nn.Linear(6, 8)  # keys, because queries lie beside them

        self.check(Long(), """
            wide | muon with input factor | hidden linear layer
            longer | muon with input factor | hidden linear layer
            few | muon | linear layer of an expert or of few outputs
            expert_1 | muon | linear layer of an expert or of few outputs
            longest | muon | hidden linear layer
            attention.q_proj | muon | queries or keys
            attention.k_proj | muon | queries or keys
            attention.v_proj | muon with input factor | hidden linear layer
            attention.out_proj | muon with input factor | hidden linear layer
            to_q | muon | queries or keys
            key_layer | muon | queries or keys
            kernel | muon with input factor | hidden linear layer
            sequence | muon with input factor | hidden linear layer
            words.weight | optimizer, 4 x rate | embedding of words""")

    def test_embeddings_before_a_norm(self):
        """Beside tied words: those in a module that has but embeddings and norms, or with a table of types."""
        for norms, types, before in ((True, 5, True), (False, 4, True), (False, 5, False)):
            with self.subTest(norms=norms, types=types):
                tables = nn.ModuleDict({"words": nn.Embedding(20, 8), "places": nn.Embedding(9, 8), "types": nn.Embedding(types, 8),
                                        "other": nn.Embedding(9, 7)})
                if norms:
                    tables["norm"] = nn.LayerNorm(8)
                model = nn.ModuleDict({"tables": tables, "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 20)})
                model["head"].weight = tables["words"].weight
                rows, _ = printed(model)
                row = "soap | embedding before a norm" if before else "optimizer | embedding"
                self.assertEqual([one for one in rows if one.startswith("tables.")], sorted([
                    "tables.words.weight | soap | embedding that another module shares", f"tables.places.weight | {row}",
                    f"tables.types.weight | {row}", "tables.other.weight | optimizer | embedding"], key=lambda one: "optimizer" in one))

    def test_a_users_choice_is_named(self):
        model = models.Blocks(lambda: models.Mixture(16))
        self.check(model, """
            layers.0.router | mkor | hidden linear layer
            layers.1.router | kfac | layer_methods
            head.weight | optimizer | skip
            layers.0.experts.gate_up_proj.expert0 (x 8) | kron | parameter_methods
            layers.0.experts.down_proj (x 2) | optimizer | stack of experts
            words.weight | soap | embedding of words""", method="mkor", layer_methods={r".*1\.router": "kfac"}, skip=["head"],
                   parameter_methods={".*up_proj": "kron"}, selection=Selection(embeddings="soap"))
        self.check(models.Reader(nn.LSTM), """
            head | kfac | layer_methods
            rnn.weight_ih_l0.group0 (x 4) | muon | gates of a recurrent module
            rnn.weight_hh_l0.group0 (x 4) | muon | gates of a recurrent module
            rnn.weight_ih_l1.group0 (x 4) | muon | gates of a recurrent module
            rnn.weight_hh_l1.group0 (x 4) | muon | gates of a recurrent module
            words.weight | optimizer | embedding of words""", layer_methods={".*": "kfac"})

    def test_blocks_are_shown(self):
        (model, config, options), rows = OF_TRANSFORMERS["GPT-2"]
        self.check(of_transformers(model, config, **options), rows.replace("c_attn (x 2)", "c_attn.group0 (x 6)"),
                   selection=Selection(blocks={r".*\.c_attn": 3}))
        (model, config, options), rows = OF_TRANSFORMERS["Phi-3"]
        self.check(of_transformers(model, config, **options), rows.replace("qkv_proj.group0 (x 6)", "qkv_proj (x 2)"),
                   selection=Selection(blocks={".*qkv_proj": 1}))
        with mock.patch.object(Preconditioner, "_open"):
            for method, sizes in (("muon", [16, 8, 8]), ("soap", [16, 8, 8]), ("mkor", [32])):
                pre = Preconditioner(of_transformers(model, config, **options), "localhost:1", session="blocks", method=method)
                self.assertEqual([layer.d_out for layer in pre.layers if "0.self_attn.qkv" in layer.name], sizes)
                pre.close()

    def test_a_divided_end_is_an_end(self):
        model = nn.ModuleDict({"words": nn.Embedding(12, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 12)})
        with mock.patch.object(Preconditioner, "_open"):
            pre = Preconditioner(model, "localhost:1", session="ends", selection=Selection(blocks={"head": 3, ".*": 1}))
        self.assertIn("head.group0 (x 3) | soap", "\n".join(" | ".join(re.split("  +", row)) for row in str(pre).splitlines()))
        pre.close()

    def test_the_multiple_is_that_of_the_group(self):
        model = nn.ModuleDict({"words": nn.Embedding(90, 16, sparse=True), "names": nn.Embedding(90, 16), "hidden": nn.Linear(16, 16),
                               "head": nn.Linear(16, 3)})
        self.check(model, """
            hidden | muon with input factor | hidden linear layer
            head | muon | linear layer of an expert or of few outputs
            names.weight | soap | parameter_methods
            words.weight | optimizer, 4 x rate | its gradients are sparse""", parameter_methods={".*s.weight": "soap"})

    def test_an_embedding_is_of_words_unless_its_own_name_says_more(self):
        words, other = "optimizer, 4 x rate | embedding of words", "optimizer | embedding"
        for name, row in (("pos_tagger.embedding", words), ("posterior", words), ("composEmbedding", words), ("pos_embedding", other),
                          ("positionEmbedding", other), ("text.posEmbedding", other), ("learnedPosition", other), ("PositionEmbedding", other),
                          ("wpe", other), ("tokenType", other), ("positions.0", other)):
            with self.subTest(name):
                model = nn.ModuleDict({"first": nn.Linear(8, 8), "hidden": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
                place = model
                for part in name.split(".")[:-1]:
                    place.add_module(part, nn.Module())
                    place = getattr(place, part)
                place.add_module(name.rpartition(".")[2], nn.Embedding(20, 8))
                self.assertIn(f"{name}.weight | {row}", printed(model)[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
