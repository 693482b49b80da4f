"""torch-geometric: message passing over graphs of changing sizes, trained by one compiled program."""

import torch
from client import need, run
from torch import Tensor, nn

layers = need("torch_geometric.nn", "torch-geometric")


class Network(nn.Module):
    """Features [nodes, 16] and edges int64 [2, E] to 4 numbers for the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [layers.GCNConv(16, 32), layers.SAGEConv(32, 32), layers.GATConv(32, 16, heads=2)]
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x, edges).relu()
        return self.head(layers.global_mean_pool(x, None))


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The losses of steps over six graphs, and the weights after them."""
    model = Network().to(dtype)
    torch._dynamo.config.capture_dynamic_output_shape_ops = (
        True  # the layers drop self-loops: how many depends on the data
    )
    compiled = model if backend is None else torch.compile(model, backend=backend, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for nodes, edges in ((10, 40), (17, 60), (23, 81), (8, 30), (40, 200), (33, 90)):
        optimizer.zero_grad()
        out = compiled(torch.randn(nodes, 16).to(dtype), torch.randint(nodes, (2, edges)))
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | {name: p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    run("torch-geometric", "GCN, SAGE and GAT over six graphs", program)
