"""What the inputs and outputs of an exported graph are, in the field names that torch.export's readers know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class BackwardSignature:
    """The backward part of a joint graph. Keys are names of graph outputs."""

    gradients_to_parameters: dict[str, str]
    """Gradient → the parameter's dotted name."""
    gradients_to_user_inputs: dict[str, str]
    """Gradient → the name of the graph input."""
    loss_output: str
    """The output that the gradients are of."""


@dataclass
class GraphSignature:
    """Inputs are `(*input_tokens, *parameters, *buffers, *user_inputs)`; outputs `(*output_tokens, *updated inputs in the order of the inputs,
    *user_outputs, *gradients)`. Names of inputs and outputs are those of the graph's nodes, names of parameters and buffers dotted ones.
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str | None]
    """None for a number or None that is returned as it is."""
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    """Output that holds new contents → the buffer."""
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    """Output that holds new contents → the graph input."""
    in_spec: Any
    """Pytree spec of `((*parameters, *buffers, *args), kwargs)`."""
    out_spec: Any
    """Pytree spec of what the module returns, of `user_outputs`."""
    backward_signature: BackwardSignature | None = None
    input_tokens: list[str] = field(default_factory=list)
    output_tokens: list[str] = field(default_factory=list)
