"""What Triton's interpreter gets wrong, put right for the tests that run kernels by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_INSTRUCTIONS = {"rcp.approx.ftz.f32": lambda a: 1 / a, "ex2.approx.ftz.f32": lambda a: 2**a}


def mend() -> None:
    """Instructions of a GPU are computed by numpy. An atomic operation reads the bytes behind its operands as if they were arrays without gaps; what
    was broadcast has one element. And numpy 2.4 makes an integer of no array that has a dimension, which scalars of the interpreter have: a loop to
    a size that is an argument. It also takes bfloat16 below 1.2e-38 for other numbers.
    """
    import numpy as np
    from triton.runtime import interpreter

    def whole(handle: Any) -> Any:
        return interpreter.TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)

    def atomic(self: Any, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        return kept_atomic(self, rmw_op, whole(ptr), whole(val), whole(mask), sem, scope)

    def patched(tensor: Any, scope: Any) -> None:
        kept_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def assembly(self: Any, text: str, constraints: str, values: list[Any], kind: Any, pure: bool, pack: int) -> Any:
        with np.errstate(all="ignore"):
            found = interpreter.TensorHandle(_INSTRUCTIONS[text.split()[0]](values[0].data), values[0].dtype)
        return SimpleNamespace(get_result=lambda _: found)

    def converted(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return given.view(np.uint16).astype(np.uint32) << 16
        return kept_convert(given, source, target, rounding)

    if not hasattr(interpreter.InterpreterBuilder, "mended"):
        kept_convert, interpreter._convert_float = interpreter._convert_float, converted
        interpreter.InterpreterBuilder.create_inline_asm = assembly
        kept_atomic, kept_patch = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter._patch_lang_tensor
        interpreter.InterpreterBuilder.create_atomic_rmw = atomic
        interpreter._patch_lang_tensor = patched
        interpreter.InterpreterBuilder.mended = True


__all__ = ["mend"]
