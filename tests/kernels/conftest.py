"""Runs the Triton kernels in Triton's interpreter where there is no CUDA device.

The variable is read when a kernel's module is imported, so it is set before any test module is.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
