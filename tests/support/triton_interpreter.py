"""What Triton's interpreter gets wrong, put right for the tests that run kernels by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_INSTRUCTIONS = {"rcp.approx.ftz.f32": lambda a: 1 / a, "ex2.approx.ftz.f32": lambda a: 2**a}


def mend() -> None:
    """Instructions of a GPU are computed by numpy. An atomic operation reads the bytes behind its operands as if they were arrays without gaps; what
    was broadcast has one element. And numpy 2.4 makes an integer of no array that has a dimension, which scalars of the interpreter have: a loop to
    a size that is an argument. It also takes bfloat16 below 1.2e-38 for other numbers. Reductions and scans by a function of ours went element by
    element, half a millisecond each: they combine neighbours, all at once, as a GPU does.
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

    def combined(self: Any, left: list[Any], right: list[Any], given: Any) -> list[Any]:
        """The function of a reduction or a scan, of arrays."""
        pairs = [self.to_tensor(d, t.dtype) for side in (left, right) for d, t in zip(side, given, strict=True)]
        found = self.combine_fn.fn(*pairs)
        return [t.handle.data for t in (found if isinstance(found, tuple) else (found,))]

    def reduced(self: Any, given: Any) -> list[Any]:
        parts, axis = self.unravel(given, self.axis)
        data = [t.handle.data for t in parts]
        while (n := data[0].shape[axis]) > 1:
            first, second = ([d.take(range(k, n, 2), axis) for d in data] for k in (0, 1))
            data = combined(self, first, second, parts)
        out = [d if self.keep_dims and self.axis is not None else d.squeeze(axis) for d in data]
        if self.axis is None:
            out = [d.reshape((1,) * given[0].handle.data.ndim) if self.keep_dims else d.item() for d in out]
        return [self.to_tensor(d, t.dtype) for d, t in zip(out, parts, strict=True)]

    def scanned(self: Any, given: Any) -> list[Any]:
        data, step = [t.handle.data for t in given], 1
        n = data[0].shape[self.axis]
        while (
            step < n
        ):  # all n of a block, whose sizes are powers of two; the first `step` elements have nothing before them
            found = combined(self, [np.roll(d, step, self.axis) for d in data], data, given)
            for new, old in zip(found, data, strict=True):
                np.moveaxis(new, self.axis, 0)[:step] = np.moveaxis(old, self.axis, 0)[:step]
            data, step = found, 2 * step
        return [self.to_tensor(d, t.dtype) for d, t in zip(data, given, strict=True)]

    if not hasattr(interpreter.InterpreterBuilder, "mended"):
        kept_convert, interpreter._convert_float = interpreter._convert_float, converted
        interpreter.InterpreterBuilder.create_inline_asm = assembly
        kept_atomic, kept_patch = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter._patch_lang_tensor
        interpreter.InterpreterBuilder.create_atomic_rmw = atomic
        interpreter._patch_lang_tensor = patched
        interpreter.ReduceOps.generic_reduce = reduced
        interpreter.ScanOps.generic_scan = scanned
        interpreter.InterpreterBuilder.mended = True


__all__ = ["mend"]
