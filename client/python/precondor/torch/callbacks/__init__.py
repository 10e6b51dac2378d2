# SPDX-License-Identifier: Apache-2.0
"""Callbacks for frameworks that have the training loop: huggingface and lightning, each imported by itself."""
