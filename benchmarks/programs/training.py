"""Training steps: models with their losses and optimizers, small enough for two cores."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Logits, LSTMLoop, ResNet18


@dataclass(frozen=True)
class TrainProgram:
    """One training set-up.

    make       returns a module whose forward gives the loss for one batch; called under a fixed seed.
    batch      the inputs of step k (its own generator: every backend sees the same).
    optimizer  of the parameters; None: gradients only.
    clip       largest gradient norm, None for no clipping.
    accumulate batches for one step of the optimizer.
    """

    name: str
    shape: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    clip: float | None = None
    accumulate: int = 1
    needs: tuple[str, ...] = ()


class TokenLoss(nn.Module):
    """Cross entropy of a model's logits [B, T, V] against token ids [B, T]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class ClassLoss(nn.Module):
    """Cross entropy of a model's logits [B, C] against classes [B]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), target)


class MeanSquare(nn.Module):
    """Mean squared difference between a model's output and a target of its shape."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), target)


class Bf16(nn.Module):
    """A loss module under autocast to bfloat16."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.loss(*batch)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=2000,
        n_positions=128,
        n_embd=192,
        n_layer=3,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return TokenLoss(Logits(GPT2LMHeadModel(config)))


class BertTokens(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=2000, hidden_size=192, num_hidden_layers=3, num_attention_heads=6, intermediate_size=768,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )  # fmt: skip
        self.encoder = BertModel(config)
        self.head = nn.Linear(192, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids=ids).last_hidden_state)


class Down(nn.Sequential):
    """Two 3x3 convolutions with group norm and SiLU."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__(
            nn.Conv2d(wide_in, wide_out, 3, 1, 1), nn.GroupNorm(4, wide_out), nn.SiLU(),
            nn.Conv2d(wide_out, wide_out, 3, 1, 1), nn.GroupNorm(4, wide_out), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Images [B, 3, H, W] to images: two levels with skips (Ronneberger et al. 2015), nearest upsampling."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = Down(3, wide), Down(wide, 2 * wide)
        self.middle = Down(2 * wide, 2 * wide)
        self.up2, self.up1 = Down(4 * wide, wide), Down(2 * wide, wide)
        self.out = nn.Conv2d(wide, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.avg_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        y = self.up2(torch.cat((F.interpolate(c, scale_factor=2.0), b), 1))
        return self.out(self.up1(torch.cat((F.interpolate(y, scale_factor=2.0), a), 1)))


class LSTMClassifier(nn.Module):
    """Sequences [T, B, I] to class logits [B, 10] by the last state of a loop of LSTM cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.head = LSTMLoop(32, 64), nn.Linear(64, 10)

    def forward(self, xs: Tensor) -> Tensor:
        return self.head(self.loop(xs)[-1])


def tokens(batch: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Token ids and targets of [batch, length]."""
    return lambda g: (
        torch.randint(0, 2000, (batch, length), generator=g),
        torch.randint(0, 2000, (batch, length), generator=g),
    )


def images(batch: int, size: int, classes: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Images [batch, 3, size, size] and classes."""
    return lambda g: (torch.randn(batch, 3, size, size, generator=g), torch.randint(0, classes, (batch,), generator=g))


def bert() -> nn.Module:
    return TokenLoss(BertTokens())


def resnet18() -> nn.Module:
    return ClassLoss(ResNet18())


def lstm() -> nn.Module:
    return ClassLoss(LSTMClassifier())


def mlp() -> nn.Module:
    return ClassLoss(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, foreach=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, foreach=True)


def pairs(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Two random tensors of `shape`: input and target."""
    return lambda g: (torch.randn(*shape, generator=g), torch.randn(*shape, generator=g))


def classes(*shape: int, batch: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """A random tensor of `shape` and `batch` classes of ten."""
    return lambda g: (torch.randn(*shape, generator=g), torch.randint(0, 10, (batch,), generator=g))


TOKENS = ("transformers",)
TRAINING = {
    p.name: p
    for p in (
        TrainProgram("gpt2", "3 layers of 192, 2 x 64 tokens", gpt2, tokens(2, 64), adamw, needs=TOKENS),
        TrainProgram("bert", "3 layers of 192, 2 x 64 tokens", bert, tokens(2, 64), adamw, clip=1.0, needs=TOKENS),
        TrainProgram("resnet18", "2 x 3 x 64 x 64, batch norm in training", resnet18, images(2, 64, 1000), sgd),
        TrainProgram("lstm", "12 steps, 16 x 32 to 64", lstm, classes(12, 16, 32, batch=16), adamw),
        TrainProgram("unet", "2 x 3 x 32 x 32", lambda: MeanSquare(UNet()), pairs(2, 3, 32, 32), adamw),
        TrainProgram("gpt2_bf16", "gpt2 under autocast", lambda: Bf16(gpt2()), tokens(2, 64), adamw, needs=TOKENS),
        TrainProgram("mlp", "64 x 64 to 10, 2 batches a step", mlp, classes(64, 64, batch=64), sgd, accumulate=2),
    )
}
