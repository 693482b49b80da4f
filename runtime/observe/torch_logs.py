"""The texts of a compile under the names of torch's own switches: `TORCH_LOGS=output_code` prints them, `TORCH_TRACE=FOLDER` puts them into
the structured trace, of which `tlparse` makes pages.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from ..torch_compat import artifact_logger, current_compile, structured_entry, structured_trace

__all__ = ["LINES", "TOLD", "Told", "logger_of", "note", "tell", "wanted"]


@dataclass(frozen=True)
class Told:
    """Where a text is told.

    title     its first line in the log.
    switch    the name in TORCH_LOGS that prints it.
    entry     the name of its entry in the structured trace, which tlparse knows; "" for an artifact that has the title for its name.
    """

    title: str
    switch: str
    entry: str = ""


#: By what the text is.
TOLD = {
    "pre-grad graph": Told("graph before differentiation", "pre_grad_graphs"),
    "joint graph": Told("joint graph of forward and backward", "aot_joint_graph", "aot_joint_graph"),
    "inference graph": Told("functional graph", "aot_graphs", "aot_inference_graph"),
    "forward graph": Told("forward graph", "aot_graphs", "aot_forward_graph"),
    "backward graph": Told("backward graph", "aot_graphs", "aot_backward_graph"),
    "post-grad graph": Told("graph after rewrites", "post_grad_graphs", "inductor_post_grad_graph"),
    "loops": Told("loops before fusion", "ir_pre_fusion"),
    "schedule": Told("schedule", "schedule"),
    "fusion": Told("kernels after fusion", "fusion"),
    "kernels": Told("kernel code", "kernel_code"),
    "code": Told("code", "output_code", "inductor_output_code"),
    "captured backward": Told("backward as it was captured", "compiled_autograd", "compiled_autograd_graph"),
    "work": Told("bytes and operations", "inductor_metrics"),
}
#: Switches under which single lines are told, by `note`.
LINES = ("cudagraphs", "perf_hints", "compiled_autograd_verbose")


def wanted(what: str) -> bool:
    """Whether anybody reads the text of that key of `TOLD`."""
    return structured_trace() or _is_on(TOLD[what].switch)


def tell(what: str, prefix: str, text: str, compile_id: object) -> None:
    """Print the text where its switch is on, and put it into the structured trace where there is one.

    what        a key of `TOLD`.
    prefix      what names the graph, before the title; "" for the whole program's.
    compile_id  Dynamo's number of the compile, under which tlparse shows it: also of a backward that is compiled later.
    """
    told = TOLD[what]
    title = prefix + told.title
    if compile_id is not None and current_compile() is None:
        title += f" [{compile_id}]"  # which torch writes itself while Dynamo compiles
    if _is_on(told.switch):
        _logger(told.switch).debug("opforge: %s\n%s", title, text)  # type: ignore[union-attr]
    if structured_trace():
        structured_entry(told.entry, (prefix + told.title).replace(" ", "_"), lambda: text, compile_id)


def note(switch: str, line: str) -> None:
    """One of `LINES`: a line where its switch is on."""
    if _is_on(switch):
        _logger(switch).info("opforge: %s", line)  # type: ignore[union-attr]


def logger_of(switch: str) -> logging.Logger | None:
    """The logger of a switch that is on, for others to write to; None where it is off."""
    return _logger(switch) if _is_on(switch) else None


def _is_on(switch: str) -> bool:
    logger = _logger(switch)
    return logger is not None and logger.isEnabledFor(logging.DEBUG)


@functools.cache
def _logger(switch: str) -> logging.Logger | None:
    """Below torch's own logger, whose handler prints what the switches ask for; None where this torch has no such switch."""
    return artifact_logger("torch.opforge", switch)
