"""What tests of the products share."""

import torch

DTYPES = (torch.bfloat16, torch.float32)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, for outputs without NaN."""
    return a.dtype == b.dtype and torch.equal(a, b)
