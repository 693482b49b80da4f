"""torchao: a model whose weights were quantized to int8, compiled."""

import torch
from client import need, run
from torch import Tensor, nn

quantization = need("torchao.quantization", "torchao")


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The outputs for batches of 1, 5 and 9 rows."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).eval()
    quantization.quantize_(
        model, quantization.Int8WeightOnlyConfig()
    )  # in float32 for all, so that all compute with the same integers
    model = model.to(dtype)
    call = model if backend is None else torch.compile(model, backend=backend)
    with torch.no_grad():
        return {f"{rows} rows": call(torch.randn(rows, 64).to(dtype)) for rows in (1, 5, 9)}


if __name__ == "__main__":
    run("torchao", "int8 weight-only", program)
