"""ResNet-18 inference (random weights, batch norm in eval mode): eager, Inductor and opforge side by side."""

from typing import Annotated, Any

import torch
import typer
from side_by_side import command_line, compare, console, quiet, table
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut (He et al. 2015)."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wide_out),
            nn.ReLU(),
            nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wide_out),
        )
        same = stride == 1 and wide_in == wide_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(wide_in, wide_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Images float32 [B, 3, H, W] to logits [B, 1000]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    wide = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(wide, out, stride), Block(out, out, 1)]
        wide = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).eval()


def relative(mine: Any, eager: Any) -> float:
    """The norm of the difference over the norm of eager's result."""
    return float((mine - eager).norm() / eager.norm())


def main(side: Annotated[int, typer.Argument(min=32, help="Height and width of the images.")] = 128) -> None:
    """ResNet-18 inference (random weights, batch norm in eval mode): eager, Inductor and opforge side by side."""
    quiet()
    torch.manual_seed(0)
    runs = compare(resnet18(), (torch.randn(2, 3, side, side),))
    for name, run in runs.items():
        assert relative(run.result, runs["eager"].result) < 1e-5, name
    console.print(table(f"ResNet-18, 2 x 3 x {side} x {side}", runs, relative, "relative norm"))


if __name__ == "__main__":
    command_line(main)
