"""Which line of a stack trace is the user's."""

import torch
from torch import fx

from opforge.runtime.dispatch.record.source import source_of, user_frame

INSIDE = f"{torch.__path__[0]}/nn/modules/sparse.py"
TRACE = f"""  File "/home/me/model.py", line 7, in forward
    h = self.emb(k)
        ^^^^^^^^^^^
  File "{INSIDE}", line 191, in forward
    return F.embedding(
"""


def node(**meta: object) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta.update(meta)
    return made


def test_frames_of_torch_are_left_out() -> None:
    assert str(user_frame(TRACE)) == "model.py:7 in forward: h = self.emb(k)"


def test_of_torch_s_frames_alone_the_innermost_is_told() -> None:
    trace = "\n".join(TRACE.split("\n")[3:])
    assert str(user_frame(trace)) == "sparse.py:191 in forward: return F.embedding("


def test_no_trace_and_no_text() -> None:
    assert user_frame(None) is None
    assert user_frame("") is None
    two = 'File "<stdin>", line 1, in <module>\nFile "C:\\\\a\\b.py", line 2, in f'
    assert str(user_frame(two)) == "b.py:2 in f"


def test_without_a_line_the_module_is_told() -> None:
    stack = {"1": ("L['fn']", torch.nn.Sequential), "2": ("L['fn'].1.emb", torch.nn.Embedding)}
    assert source_of(node(stack_trace=TRACE, nn_module_stack=stack)) == "model.py:7 in forward: h = self.emb(k)"
    assert source_of(node(nn_module_stack=stack)) == "module 1.emb, an Embedding"
    assert source_of(node(nn_module_stack={"1": ("L['self']", "torch.nn.modules.linear.Linear")})) == "module Linear"
    assert source_of(node()) == ""
