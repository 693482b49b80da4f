"""Models whose memory is measured under activation budgets: small, but with activations that outweigh their parameters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block with causal attention over [B, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (c // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids [B, T] to the mean cross entropy of the next token (as GPT-2, Radford et al. 2019)."""

    def __init__(self, layers: int = 4, width: int = 64, vocabulary: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut (He et al. 2016)."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide_in, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)
        same = wide_in == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(wide_in, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Images [B, 3, H, W] and classes [B] to the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks, self.head = nn.Sequential(*(Residual(*s) for s in shapes)), nn.Linear(64, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), target)


class Encoder(nn.Module):
    """torch's own transformer encoder over [B, T, C] and a perceptron; the mean square of the result."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.mlp = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.SiLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.encoder(x)).square().mean()


BUDGETED: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": lambda: (GPT(), (torch.randint(0, 128, (8, 64)),)),
    "resnet": lambda: (ResNet(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))),
    "encoder": lambda: (Encoder(), (torch.randn(8, 64, 64),)),
}
