"""diffusers: `compile_repeated_blocks(backend="opforge")` of a small Flux transformer: one graph for blocks of a kind."""

import torch
from client import need, run
from torch import Tensor

import opforge

diffusers = need("diffusers")


def program(dtype: torch.dtype, backend: str | None) -> dict[str, Tensor]:
    """The predicted noise for an image of 8 x 8 patches and 6 tokens of text."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "in_channels": 4}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = diffusers.FluxTransformer2DModel(num_layers=3, num_single_layers=4, **sizes, **text).eval().to(dtype)
    if backend is not None:
        model.compile_repeated_blocks(backend=backend, fullgraph=True)
    places = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1)
    with torch.no_grad():
        noise = model(
            hidden_states=torch.randn(1, 64, 4).to(dtype),
            encoder_hidden_states=torch.randn(1, 6, 32).to(dtype),
            pooled_projections=torch.randn(1, 32).to(dtype),
            timestep=torch.tensor([0.5]).to(dtype),
            img_ids=places.view(64, 3).to(dtype),
            txt_ids=torch.zeros(6, 3).to(dtype),
        ).sample
    if backend is not None:
        assert opforge.stats()["graphs"] <= 3, "one for each kind of block, and one for other strides, not seven"
    return {"noise": noise}


if __name__ == "__main__":
    run("diffusers", "compile_repeated_blocks of Flux", program)
