"""Private names of torch's logs and its structured trace."""

import sys
from collections.abc import Callable
from typing import Any

import torch

# Whether a profiler is on in this thread: one call without arguments, of 40 ns.
from torch._C._autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]

__all__ = [
    "artifact_logger", "current_compile", "debug_folder", "dynamo_counters", "graph_breaks", "minifier_after", "profiler_enabled", "structured_entry",
    "structured_trace",
]  # fmt: skip


def artifact_logger(module: str, switch: str) -> Any:
    """The logger that the name `switch` in TORCH_LOGS turns on, or None where torch has no such name."""
    known = torch._logging._internal.log_registry.artifact_names
    return torch._logging.getArtifactLogger(module, switch) if switch in known else None


def current_compile() -> Any:
    """Dynamo's number of the compile that is running, or None."""
    return torch._guards.CompileContext.current_compile_id()


def graph_breaks() -> dict[str, int]:
    """Why Dynamo has split programs into several graphs so far, and how often; empty where it has not been loaded."""
    found: dict[str, int] = {}
    for text, count in (dynamo_counters() or {}).get("graph_break", {}).items():
        title, *rest = str(text).strip().splitlines() or [""]
        about = next((line for line in map(str.strip, rest) if line.startswith("Explanation: ")), "")
        why = f"{title}: {about.removeprefix('Explanation: ')}" if about else title
        found[why] = found.get(why, 0) + count
    return found


def dynamo_counters() -> dict[str, Any] | None:
    """Torch's counts of what it compiled, by table and name; a table is there when it is first asked for. None where Dynamo was not loaded."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", None)


def debug_folder() -> str:
    """This process's folder below `torch._dynamo.config.debug_dir_root`: torch_compile_debug/run_… in the working directory, unless set."""
    import torch._dynamo.utils

    return str(torch._dynamo.utils.get_debug_dir())


def minifier_after() -> str | None:
    """After which part of torch its minifier starts (TORCHDYNAMO_REPRO_AFTER), or None."""
    import torch._dynamo.config

    after: str | None = torch._dynamo.config.repro_after
    return after


def structured_trace() -> bool:
    """Whether anything takes it: without TORCH_TRACE its handler has no folder, until the first entry of all removes it."""
    handlers = torch._logging._internal.trace_log.handlers  # pytest has some of its own there
    return any(getattr(h, "root_dir", h) is not None and "Torch" in type(h.formatter).__name__ for h in handlers)


def structured_entry(entry: str, name: str, text: Callable[[], str], compile_id: Any) -> None:
    """A text in the structured trace: as the entry of that name, or with "" as an artifact."""
    about = {"filename": f"{name}.py"} if "code" in entry else {} if entry else {"name": name, "encoding": "string"}
    told: dict[str, Any] = {"payload_fn": text, "expect_trace_id": False, "compile_id": compile_id}
    torch._logging.trace_structured(entry or "artifact", lambda: about, **told)
