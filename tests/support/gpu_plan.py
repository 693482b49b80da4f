"""Plans as for a GPU of 132 processors, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opforge.generated.rewrites import RULES
from opforge.runtime.check.plan import check
from opforge.runtime.compile_fx import written_inside
from opforge.runtime.config import Config
from opforge.runtime.dispatch.trace import trace
from opforge.runtime.fuse.products import Selector
from opforge.runtime.graph.rewrite import rewrite
from opforge.runtime.kernels.plan import Plan
from opforge.runtime.lower.graph import _atomic, _Lowerer
from opforge.runtime.lower.one_hot import one_hot_sums
from opforge.runtime.lower.outputs import separate_outputs
from opforge.runtime.targets.cuda import prepared, scheduled

from .machines import H200

NUM_SMS = H200.num_sms


def planned(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    num_sms: int = NUM_SMS,
    select: Selector | None = None,
    writes: bool = False,
) -> Plan:
    """The checked plan of a function, with the rewrites for a GPU. With few processors, few long rows are not cut into parts. `select`: which
    products are computed with what is beside them. With `writes` the graph itself gives inputs their new contents.
    """
    with torch.no_grad():
        traced = trace(fn, list(inputs))
    rewrite(traced.graph, RULES, device="cuda")
    lowerer = _Lowerer(traced.graph, "cpu", True, 0)
    lowerer.b.atomic, lowerer.b.unordered = _atomic(), True
    loops = lowerer.run(written_inside(traced) if writes else {}).program
    program = prepared(one_hot_sums(separate_outputs(loops)), replace(H200, num_sms=num_sms))
    plan = scheduled(program, Config(), replace(H200, num_sms=num_sms), select=select)
    check(program, plan)
    return plan


__all__ = ["H200", "NUM_SMS", "planned"]
