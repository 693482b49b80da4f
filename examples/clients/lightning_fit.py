"""Lightning: `Trainer.fit` of a compiled module, and the same training by hand with Fabric."""

import logging
import warnings

import torch
from client import need, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

lightning = need("lightning")
logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """32 numbers to 8 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(dtype: torch.dtype) -> "torch.utils.data.DataLoader[tuple[Tensor, ...]]":
    data = torch.utils.data.TensorDataset(torch.randn(64, 32).to(dtype), torch.randint(8, (64,)))
    return torch.utils.data.DataLoader(data, batch_size=16)


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The weights after four steps of each of the two."""
    model = Classifier().to(dtype)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(model if backend is None else torch.compile(model, backend=backend), loader(dtype))

    fabric, net = lightning.Fabric(accelerator="cpu"), network().to(dtype)
    compiled = net if backend is None else torch.compile(net, backend=backend)
    compiled, optimizer = fabric.setup(compiled, torch.optim.SGD(net.parameters(), 0.1))
    for x, y in fabric.setup_dataloaders(loader(dtype)):
        fabric.backward(cross_entropy(compiled(x), y))
        optimizer.step()
        optimizer.zero_grad()
    pairs = [*model.network.named_parameters("Trainer"), *net.named_parameters("Fabric")]
    return {name: p.detach() for name, p in pairs}


if __name__ == "__main__":
    run("lightning", "Trainer.fit and Fabric", program)
