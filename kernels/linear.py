"""linear: x @ weight.T + bias, with weights of every form."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels import native
from legato.kernels.layout import require_contiguous, require_contiguous_rows, require_shape
from legato.kernels.pack import pack_quantized, pack_tensor
from legato.kernels.weight import PackedWeight, QuantizedWeight

if TYPE_CHECKING:
    from legato.kernels.weight import Weight

# Rows of one C operation: bounds its scratch memory, and is far beyond where weights are re-used.
_MAX_ROWS = 2048
# LG_WRITE and so on in `kernels/csrc/gemm.h`.
_FINISH_CODES = {"write": 0, "add": 1, "silu": 2, "gelu_tanh": 3}
_deterministic = False


def pack_weight(weight: Tensor | QuantizedWeight, *, gated: bool = False) -> Weight:
    """Brings a weight [out, in] into the form that `linear` reads fastest on its device.

    On a CPU with C kernels that is a `PackedWeight`, a copy; else the weight itself.

    Args:
        weight: with `gated`, a gate's rows and then as many of up.
        gated: for `gated_linear` instead of `linear`.

    Raises:
        ValueError: it cannot be packed.
    """
    values = weight if isinstance(weight, Tensor) else weight.values
    if not native.available() or values.device.type != "cpu":
        return weight
    if isinstance(weight, Tensor):
        return pack_tensor(weight, gated=gated)
    return pack_quantized(weight, gated=gated)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
) -> Tensor:
    """x [T, in] and a weight [out, in] to [T, out].

    Args:
        x: rows may have any stride.
        weight: plain, quantised or from `pack_weight`; a packed one takes fp32 rows on the CPU.
        bias: [out], of x's dtype.
        out: [T, out], its rows may have any stride; made where it is None.
        accumulate: adds to `out`, which must be given, instead of overwriting it.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    size_out = _require_input(x, weight, bias)
    if out is not None:
        require_shape(out, (x.shape[0], size_out), "out")
    elif accumulate:
        raise ValueError("accumulate needs out")
    if x.is_cuda and isinstance(weight, QuantizedWeight):
        from legato.kernels import quant_linear_triton

        if out is None:
            out = x.new_empty(x.shape[0], size_out)
        return quant_linear_triton.linear(x, weight, bias, out, accumulate=accumulate)
    if isinstance(weight, PackedWeight):
        if out is None:
            out = x.new_empty(x.shape[0], size_out)
        if weight.gated:
            raise ValueError("a weight packed with gated=True is for gated_linear")
        multiply_packed(x, weight, bias, out, "add" if accumulate else "write")
        return out
    if native.recording():
        raise RuntimeError("a recorded program holds C kernels only; the weight is not packed")
    wide = weight if isinstance(weight, Tensor) else weight.dequantize()
    result = (_in_one_order if _deterministic else F.linear)(x, wide.to(x.dtype), bias)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def set_deterministic(*, enabled: bool) -> None:
    """Makes a row's bits independent of the other rows for plain float weights too.

    cuBLAS and oneDNN choose a kernel, and with it the order of sums, by the number of rows. Packed
    and quantised weights need no setting. For the process: set it before the first `linear`.
    """
    global _deterministic
    _deterministic = enabled


def _in_one_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.is_cuda:
        from legato.kernels import linear_triton

        return linear_triton.linear(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]))
    rows = [F.linear(row[None], weight, bias) for row in x]
    return torch.cat(rows) if rows else F.linear(x, weight, bias)


def _require_input(x: Tensor, weight: Weight, bias: Tensor | None) -> int:
    """N of the weight [N, K]."""
    if isinstance(weight, Tensor):
        size_out, size_in = weight.shape
    else:
        size_out, size_in = weight.out_features, weight.in_features
    if x.dim() != 2 or x.shape[1] != size_in:
        raise ValueError(f"x must have shape (T, {size_in}), got {tuple(x.shape)}")
    if bias is not None:
        require_shape(bias, (size_out,), "bias")
    return size_out


def multiply_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, finish: str
) -> None:
    """The C kernel's product of `linear` and `gated_linear`, which say what the arguments are.

    Args:
        finish: "write", "add" (to `out`); of a gated weight "silu", "gelu_tanh".
    """
    _require_input(x, weight, bias)
    for name, tensor in (("x", x), ("bias", bias), ("out", out)):
        if tensor is not None and not native.takes(tensor):
            raise ValueError(
                f"with a packed weight, {name} must be fp32 on the CPU, "
                f"got {tensor.dtype} on {tensor.device}"
            )
    require_contiguous_rows(x=x, out=out)
    if bias is not None:
        require_contiguous(bias=bias)
    groups: tuple[int, ...] = ()
    if weight.group_size:
        activation_group = _activation_group(weight.group_size, weight.in_features)
        groups = (weight.group_size, activation_group, *weight.group_codes)
    for first in range(0, x.shape[0], _MAX_ROWS):
        rows, to = x[first : first + _MAX_ROWS], out[first : first + _MAX_ROWS]
        sizes = (
            rows.shape[0], weight.out_features, weight.in_features,
            rows.stride(0), to.stride(0), _FINISH_CODES[finish],
            *groups,
        )  # fmt: skip
        tensors = (rows, weight.data, bias, to, weight.scales, weight.offsets)
        native.launch(f"lg_linear_{weight.kind}", tensors, sizes)


def _activation_group(group_size: int, size_in: int) -> int:
    """How many neighbours in a row of x share a scale; see `kernels/csrc/gemm_quant.c`."""
    if group_size >= size_in:
        return 128
    return gcd(group_size, 128)
