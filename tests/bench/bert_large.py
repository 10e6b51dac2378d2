# SPDX-License-Identifier: Apache-2.0
"""BERT-Large's linear layers, 144 in all."""

BLOCK = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]  # d_out, d_in
BLOCKS = 24
