"""sentence-transformers: `encode` of a compiled model, for batches of changing sizes."""

import tempfile
from pathlib import Path

import torch
from client import need, run
from torch import Tensor

library = need("sentence_transformers", "sentence-transformers")
models, transformers = need("sentence_transformers.models"), need("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sees", "likes", "a", "small", "bird"]
BATCHES = [
    ["the cat sees a bird"],
    ["a dog", "the small dog likes the cat", "a bird sees a small bird"],
    ["the dog"] * 5,
]


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """Embeddings of three batches by a random BERT with mean pooling."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "vocab.txt"
        words.write_text("\n".join(WORDS))
        transformers.BertTokenizer(str(words)).save_pretrained(folder)
        transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
        bert = models.Transformer(folder)
    model = (
        library.SentenceTransformer(modules=[bert, models.Pooling(64), models.Normalize()], device="cpu")
        .to(dtype)
        .eval()
    )
    if backend is not None:
        model.compile(backend=backend)
    results = {}
    for k, batch in enumerate(BATCHES):
        results[f"batch {k}"] = model.encode(batch, convert_to_tensor=True, show_progress_bar=False)
    return results


if __name__ == "__main__":
    run("sentence-transformers", "encode, three sizes", program)
