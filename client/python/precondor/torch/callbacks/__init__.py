# SPDX-License-Identifier: Apache-2.0
"""Callbacks for frameworks that own the training loop. Import the modules huggingface and lightning separately."""
