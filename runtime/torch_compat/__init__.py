"""The only package that imports private torch names: each with what it is for.

Versions that it was tested on: docs/versions.md; what only some of them have is said where it is used.
"""

from .artifacts import *  # noqa: F403
from .autograd import *  # noqa: F403
from .logs import *  # noqa: F403
from .memory import *  # noqa: F403
from .operators import *  # noqa: F403
from .sizes import *  # noqa: F403
from .tracing import *  # noqa: F403
from .versions import *  # noqa: F403
