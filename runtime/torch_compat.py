"""The only module that imports private torch names: what each is for, and the versions it was tested on (2.11, 2.13)."""

# Allocation and re-viewing without the dispatcher: a third of the cost of torch.empty_strided / torch.as_strided. [2.11, 2.13]
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu  # noqa: E402
from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret_tensor  # noqa: E402, F401
