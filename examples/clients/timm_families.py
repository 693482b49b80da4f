"""timm: ten families of image models, each in eval mode and through one step of training."""

from typing import Any

import torch
from client import need, run
from torch import Tensor

import opforge

timm = need("timm")

#: A model of each family, made small.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("test_resnet", {}),
    "EfficientNet": ("test_efficientnet", {}),
    "ConvNeXt": ("test_convnext", {}),
    "ViT": ("test_vit", {}),
    "ByobNet": ("test_byobnet", {}),
    "NFNet": ("test_nfnet", {}),
    "MambaOut": ("test_mambaout", {}),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.0},
    ),
    "RegNet": ("regnetx_002", {}),
    "DenseNet": ("densenet121", {"growth_rate": 8, "block_config": (2, 2, 2)}),
}


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """For each family the logits in eval mode, and the logits and the gradients of a step in training mode."""
    results = {}
    for family, (name, sizes) in FAMILIES.items():
        torch._dynamo.reset()
        model = timm.create_model(name, num_classes=10, **sizes).to(dtype)
        side = sizes.get("img_size", 64)
        x = torch.randn(4, 3, side, side).to(dtype)
        before = opforge.stats()["graphs"]
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        with torch.no_grad():
            results[f"{family}, eval: logits"] = call.eval()(x)
        out = call.train()(x)
        out.square().mean().backward()
        if backend is not None:
            print(family, opforge.stats()["graphs"] - before)
        results[f"{family}, train: logits"] = out.detach()
        for key, parameter in model.named_parameters():
            results[f"{family}, train: {key}"] = parameter.grad
    return results


if __name__ == "__main__":
    run("timm", "ten families, eval and train: " + ", ".join(FAMILIES), program)
