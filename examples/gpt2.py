"""GPT-2 (124M shape, random weights), one forward pass: eager, Inductor and opforge side by side."""

import os
import sys
from typing import Annotated, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # only the architecture is used; nothing is fetched

import torch
import typer
from side_by_side import command_line, compare, console, quiet, table
from torch import Tensor, nn


class Logits(nn.Module):
    """Token ids int64 [B, T] to logits float32 [B, T, 50257]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def relative(mine: Any, eager: Any) -> float:
    """The norm of the difference over the norm of eager's result."""
    return float((mine - eager).norm() / eager.norm())


def main(tokens: Annotated[int, typer.Argument(min=1, max=1024, help="Length of the sequence.")] = 64) -> None:
    """GPT-2 (124M shape, random weights), one forward pass: eager, Inductor and opforge side by side."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        sys.exit(f"this example needs the package {error.name!r}: pip install transformers")
    quiet()
    torch.manual_seed(0)
    console.print("making the model …", highlight=False)
    model = Logits(GPT2LMHeadModel(GPT2Config())).eval()
    runs = compare(model, (torch.randint(0, 50000, (1, tokens)),))
    for name, run in runs.items():
        assert relative(run.result, runs["eager"].result) < 1e-5, name
    console.print(table(f"GPT-2, {tokens} tokens", runs, relative, "relative norm"))


if __name__ == "__main__":
    command_line(main)
