"""Launch checks: every tensor's shape, dtype, device and alignment, with the name of what is wrong.

Dimensions are symbols: the first tensor that has one fixes its value, every later one must agree.
"""

from __future__ import annotations

import torch

INT32 = (torch.int32,)
INT32_OR_64 = (torch.int32, torch.int64)
MAX_LRU_ROWS = 32_767
"""int16 holds the LRU order."""

CHUNK_BYTES = 16


class LaunchChecks:
    """Checks of one launch of `op`, all of whose device tensors must be on `device`."""

    def __init__(self, op: str, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"{op} needs CUDA tensors, got a tensor on {device}")
        self._op = op
        self._device = device
        self._dims: dict[str, tuple[int, str]] = {}

    def __getitem__(self, dim: str) -> int:
        return self._dims[dim][0]

    def tensor(self, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], *dims: str | int) -> None:
        """A device tensor whose last dimension, at least, is contiguous."""
        self._dtype(name, tensor, dtypes)
        self._shape(name, tensor, dims)
        self._on_device(name, tensor)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{self._op}: {name} must be contiguous in its last dimension, got {tensor.stride()}")

    def contiguous(self, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], *dims: str | int) -> None:
        self.tensor(name, tensor, dtypes, *dims)
        if not tensor.is_contiguous():
            raise ValueError(f"{self._op}: {name} must be contiguous, got shape {self._shape_and_stride(tensor)}")

    def device_rows(self, name: str, rows: torch.Tensor, num_rows: str) -> None:
        self._rows(name, rows, num_rows)
        self._on_device(name, rows)

    def host_rows(self, name: str, rows: torch.Tensor, num_rows: str) -> None:
        """Rows the device reaches by their address: pinned host memory (or memory of the device itself)."""
        self._rows(name, rows, num_rows)
        if rows.device == self._device:
            return
        if rows.device.type != "cpu" or not rows.is_pinned():
            raise ValueError(f"{self._op}: {name} must be pinned host memory, got a tensor on {rows.device}")

    def part(self, name: str, part: torch.Tensor, num_tokens: str, dim: int) -> torch.Tensor:
        """bf16 [tokens, dim] or [tokens, 1, dim]; returned without the middle dimension."""
        if part.dim() == 3 and part.shape[1] == 1:
            part = part.squeeze(1)
        self.tensor(name, part, (torch.bfloat16,), num_tokens, dim)
        return part

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self._op}: {message}")

    def _rows(self, name: str, rows: torch.Tensor, num_rows: str) -> None:
        self._dtype(name, rows, (torch.uint8,))
        self._shape(name, rows, (num_rows, "row_bytes"))
        stride = rows.stride(0) if rows.shape[0] > 1 else max(rows.stride(0), rows.shape[1])
        if rows.shape[1] % CHUNK_BYTES or rows.data_ptr() % CHUNK_BYTES or stride % CHUNK_BYTES:
            raise ValueError(
                f"{self._op}: rows of {name} must be multiples of {CHUNK_BYTES} bytes, at addresses that are, got "
                f"shape {self._shape_and_stride(rows)} at {rows.data_ptr():#x}"
            )
        if rows.stride(1) != 1 or stride < rows.shape[1]:
            raise ValueError(f"{self._op}: rows of {name} must not overlap, got {self._shape_and_stride(rows)}")

    def _dtype(self, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        if tensor.dtype not in dtypes:
            legal = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{self._op}: {name} must be {legal}, got {str(tensor.dtype).removeprefix('torch.')}")

    def _on_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise ValueError(f"{self._op}: {name} must be on {self._device}, got {tensor.device}")

    def _shape(self, name: str, tensor: torch.Tensor, dims: tuple[str | int, ...]) -> None:
        if tensor.dim() != len(dims):
            wanted = ", ".join(str(dim) for dim in dims)
            raise ValueError(f"{self._op}: {name} must have shape [{wanted}], got {list(tensor.shape)}")
        for axis, (dim, size) in enumerate(zip(dims, tensor.shape, strict=True)):
            if isinstance(dim, int):
                wanted_size, source = dim, "required"
            else:
                wanted_size, source = self._dims.setdefault(dim, (size, f"{dim} of {name}"))
            if size != wanted_size:
                raise ValueError(f"{self._op}: {name} has {size} in dimension {axis}, must be {wanted_size} ({source})")

    @staticmethod
    def _shape_and_stride(tensor: torch.Tensor) -> str:
        return f"{list(tensor.shape)} with strides {list(tensor.stride())}"
