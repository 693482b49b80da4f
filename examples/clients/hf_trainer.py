"""transformers: four steps of `Trainer` with `torch_compile_backend="opforge"`, a name that `opforge.install()` adds to accelerate's list."""

import tempfile

import torch
from client import need, run
from torch import Tensor

import opforge

transformers = need("transformers")
need("accelerate")


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """32 random sentences of 12 tokens."""

    ids = torch.randint(3, 128, (32, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[k], "labels": self.ids[k]}


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The losses of four steps, and the weights after them."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes)).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            torch_compile_backend=backend,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Sentences())
        trainer.train()
    losses = torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])
    return {"losses": losses} | {name: p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    with opforge.install():
        run("transformers", "Trainer, four steps", program)
