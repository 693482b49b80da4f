"""User compilers, partition functions and export: PyTorch's ahead-of-time names (docs/aot.md)."""

from .runtime.aot import (
    BackwardSignature,
    GraphSignature,
    aot_autograd,
    aot_export_joint_simple,
    aot_export_module,
    aot_function,
    aot_module,
    aot_module_simplified,
    default_partition,
    make_boxed_compiler,
    make_boxed_func,
    min_cut_rematerialization_partition,
    nop,
    print_compile,
)

__all__ = [
    "BackwardSignature",
    "GraphSignature",
    "aot_autograd",
    "aot_export_joint_simple",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "default_partition",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
]
