"""Runs Triton kernels in Triton's interpreter where there is no CUDA device.

Triton reads the variable when it is imported, which any test module may do through transformers:
so it is set here, before the first of them.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
