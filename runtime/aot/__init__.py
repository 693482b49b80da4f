"""Ahead-of-time dispatch for others: user compilers for forward and backward graphs, and export of functional graphs with signatures."""

from .api import aot_autograd, aot_function, aot_module, aot_module_simplified
from .compilers import make_boxed_compiler, make_boxed_func, nop, print_compile
from .export import aot_export_joint_simple, aot_export_module
from .partitioners import default_partition, min_cut_rematerialization_partition
from .signature import BackwardSignature, GraphSignature

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
