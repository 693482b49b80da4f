"""The C++ compiler of this machine: which one, its version, its flags for a target, and torch's own OpenMP library.

Kernels must use the very OpenMP library that torch has loaded: a second one would start a second pool of threads and
would not follow `torch.set_num_threads`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import BuildError
from ...generated.targets import CPU_TARGETS, CpuTarget
from ..config import Config
from .command import run_command

__all__ = ["Toolchain", "chosen_target", "find_toolchain", "host_target", "openmp_library", "runs_here", "why_not_here"]

# Variables by which compilers and linkers find headers, libraries and parts of themselves, or change what they make: "Environment Variables
# Affecting GCC" in GCC's manual, "Environment" in those of ld and clang, and Apple's.
_SHAPING = (
    "CCC_OVERRIDE_OPTIONS", "COMPILER_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "GCC_COMPARE_DEBUG", "GCC_EXEC_PREFIX",
    "GNUTARGET", "LDEMULATION", "LD_RUN_PATH", "LIBRARY_PATH", "MACOSX_DEPLOYMENT_TARGET", "SDKROOT", "SOURCE_DATE_EPOCH",
)  # fmt: skip

_CANDIDATES = ("g++", "clang++", "c++")

_ASAN_NAME = re.compile(r".*/libasan\.so[.0-9]*")
_OPENMP_NAME = re.compile(r"lib(gomp|omp|iomp5)(-[0-9a-f]+)?\.(so|dylib)[.0-9]*")


@dataclass(frozen=True)
class Toolchain:
    """One compiler as it will be called: command words, version text, target, flags, and the OpenMP library or None."""

    command: tuple[str, ...]
    version: str
    target: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    openmp: Path | None

    def identity(self) -> dict[str, str]:
        """Everything that changes what comes out for the same source, as parts of a cache key."""
        return {
            "command": shlex.join(self.command),
            "compiler": self.version,
            "flags": " ".join(self.compile_flags),
            # The folder of the OpenMP library does not reach the artifact, only its name does.
            "link": " ".join(Path(flag).name if os.path.isabs(flag) else flag for flag in self.link_flags),
            "environment": "\n".join(f"{name}={os.environ[name]}" for name in _SHAPING if name in os.environ),
            "machine": platform.machine() if self._is_portable() else _host_cpu(),
        }

    def _is_portable(self) -> bool:
        """Whether the code runs on every machine of its target: no flag but the target's own chooses instructions."""
        own = CPU_TARGETS[self.target].flags if self.target in CPU_TARGETS else ()
        return not any(word.startswith("-m") and word not in own for word in (*self.command, *self.compile_flags))


def find_toolchain(cfg: Config) -> Toolchain:
    """The compiler that the configuration asks for: `cxx`, or the first of $CXX, g++, clang++ and c++ that exists.

    Raises `BuildError` when there is none, when it cannot tell its version, or when this process cannot run what it is to make.
    """
    command = _find_compiler(cfg.cxx)
    version = _version(command, cfg.build_timeout_s)
    openmp = openmp_library()
    # Clang's own OpenMP calls (kmpc) are in libomp and libiomp5 only; GCC's are in all three.
    is_clang = "clang" in version
    if is_clang and openmp is not None and openmp.name.startswith("libgomp"):
        openmp = None
    # A named target runs on every machine of its kind; `auto` is for this very machine.
    machine = ("-march=native",) if cfg.target == "auto" else CPU_TARGETS[cfg.target].flags
    flags = ["-std=c++20", f"-O{cfg.opt_level}", *machine, "-fPIC", "-fvisibility=hidden"]
    flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    if openmp is None:
        flags.append("-fopenmp-simd")
    else:
        flags += ["-Xpreprocessor", "-fopenmp"] if is_clang and sys.platform == "darwin" else ["-fopenmp"]
    sanitizer = _sanitizer(cfg, is_clang)
    flags += [*sanitizer, *_split(cfg.cxx_flags, "the setting cxx_flags")]
    link = ["-shared", *sanitizer]
    if sys.platform == "linux":
        link += ["-Wl,--as-needed", "-Wl,-z,defs"]
    if openmp is not None:
        link.append(str(openmp))
    return Toolchain(command, version, cfg.target, tuple(flags), tuple(link), openmp)


def _sanitizer(cfg: Config, is_clang: bool) -> list[str]:
    """Flags for checked memory. Without its library a process would end, with no more than a line, when it loads the first kernel."""
    if cfg.sanitize == "off":
        return []
    if is_clang or sys.platform != "linux":
        raise BuildError("the setting sanitize needs g++ on Linux")
    if not any(_ASAN_NAME.fullmatch(name) for name in _mapped_files()):
        raise BuildError(
            "the setting sanitize needs its library to be loaded before all others: "
            'start the process with LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"'
        )
    return ["-fsanitize=address", "-fno-omit-frame-pointer"]


@functools.cache
def host_target() -> str:
    """The widest target whose instructions this machine's processor has: `avx512`, `avx2`, `neon` or `scalar`.

    It does not follow `ATEN_CPU_CAPABILITY`, which chooses among torch's own kernels.
    """
    return next(target.name for target in _widest_first() if runs_here(target.name))


def _widest_first() -> list[CpuTarget]:
    return sorted(CPU_TARGETS.values(), key=lambda target: -target.lanes)


@functools.cache
def runs_here(target: str) -> bool:
    """Whether this processor has the instructions of a target; code with others would end the process."""
    return not why_not_here(target)


def why_not_here(target: str) -> str:
    """Why this machine cannot run the code of a target, or an empty text where it can."""
    known = CPU_TARGETS[target]
    if known.architecture == "any":
        return ""
    here = {"aarch64": "arm64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    if known.architecture != here:
        return f"it is for {known.architecture}, and this processor is {here}"
    if here != "x86_64":
        return ""
    found = _features()
    if found is None:  # what torch found is all that there is
        by_torch = CPU_TARGETS.get(torch.backends.cpu.get_cpu_capability().lower())
        found = by_torch.features if by_torch else frozenset()
    missing = known.features - found
    return f"its processor lacks {', '.join(sorted(missing))}" if missing else ""


def _features() -> frozenset[str] | None:
    """What the operating system says that this x86 processor can do; None where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), None)


def chosen_target(cfg: Config) -> str:
    """The target whose vector width kernels are written for: the setting's, or what the compiler makes of `auto` on this machine.

    Flags of the user (`cxx_flags`, or words behind the compiler's name) come last and may take instructions away, or ask for more.
    Raises `BuildError` when there is no compiler, or when the flags ask for instructions that this processor does not have.
    """
    tools = find_toolchain(cfg)
    if cfg.target != "auto" or not (cfg.cxx_flags or len(tools.command) > 1):
        return host_target() if cfg.target == "auto" else cfg.target
    return _target_of(tools.command, tools.compile_flags, cfg.build_timeout_s)


@functools.cache
def _target_of(command: tuple[str, ...], flags: tuple[str, ...], timeout_s: float) -> str:
    """The target whose macro the compiler defines under these flags: the widest one, which is also what the prelude takes."""
    words = [*command, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    ran = run_command(words, timeout_s, errors_apart=True)
    if ran.failure is not None:
        said = (ran.errors or ran.output).strip()
        what = "refuses its flags" if ran.status else f"does not tell its macros: it {ran.failure}"
        raise BuildError(
            f"the C++ compiler {what}\n  command: {shlex.join(words)}\n{said}",
            short=(*said.splitlines()[:3], f"flags: {shlex.join(flags)} (the setting cxx_flags is among them)"),
        )
    macros = {line.split()[1] for line in ran.output.splitlines() if line.startswith("#define ")}
    target = next((t.name for t in _widest_first() if t.guard in macros and "OPFORGE_SCALAR" not in macros), "scalar")
    if not runs_here(target):
        raise BuildError(
            f"the C++ compiler makes code for {target}, which this machine ({host_target()}) cannot run: "
            f"change the setting cxx_flags, or the flags behind the compiler's name ({shlex.join(words)})"
        )
    return target


@functools.cache
def openmp_library() -> Path | None:
    """The OpenMP library that torch has loaded, or None when torch was built without one."""
    package = Path(torch.__file__).parent
    # Wheels carry it beside their other libraries; auditwheel adds a digest to its name and puts it in `torch.libs`.
    beside = [p for d in (package / "lib", package.parent / "torch.libs") if d.is_dir() for p in sorted(d.iterdir())]
    carried = [path for path in beside if _OPENMP_NAME.fullmatch(path.name)]
    loaded = _mapped_openmp()
    for path in carried:
        if not loaded or path.resolve() in loaded:
            return path
    return min(loaded, default=None)


def _mapped_openmp() -> set[Path]:
    """The OpenMP libraries that are loaded in this process; empty where the system does not tell."""
    return {Path(f).resolve() for f in _mapped_files() if _OPENMP_NAME.fullmatch(Path(f).name)}


def _mapped_files() -> set[str]:
    """The files that are mapped into this process; empty where the system does not tell."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}


def _find_compiler(setting: str) -> tuple[str, ...]:
    if setting:
        found = _command(setting)
        if found is None:
            raise BuildError(f"the setting cxx names {setting!r}, which is not on PATH and no executable file")
        return found
    environment = os.environ.get("CXX", "")
    for candidate in (environment, *_CANDIDATES):
        if candidate and (found := _command(candidate)):
            return found
    tried = ", ".join(filter(None, (environment and f"$CXX={environment}", *_CANDIDATES)))
    raise BuildError(f"no C++ compiler found (tried {tried}); install g++, or name one by $CXX or the setting cxx")


def _command(text: str) -> tuple[str, ...] | None:
    """`text` as command words with the program's full path; also of a form like `ccache g++`. None when not found."""
    if whole := shutil.which(text):
        return (whole,)
    words = _split(text, "the C++ compiler")
    program = shutil.which(words[0]) if words else None
    return (program, *words[1:]) if program else None


def _split(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{what} cannot be read as shell words: {text!r} ({error})") from error


_versions: dict[tuple[str, ...], str] = {}
# With the time that it had: a compiler that is given more may answer.
_unusable: dict[tuple[tuple[str, ...], float], BuildError] = {}


def _version(command: tuple[str, ...], timeout_s: float) -> str:
    """The first line that the compiler prints about itself. Raises `BuildError` when it does not run.

    Either is remembered, so that a compiler that does not answer costs a process its time once.
    """
    if command in _versions:
        return _versions[command]
    if (known := _unusable.get((command, timeout_s))) is not None:
        raise BuildError(str(known), known.short)
    ran = run_command([*command, "--version"], timeout_s, errors_apart=True)
    lines = ran.output.splitlines()
    if ran.failure is None and lines:
        return _versions.setdefault(command, lines[0])
    output = (ran.errors + ran.output).strip() or "no output"
    if ran.hung:
        message = f"the C++ compiler {shlex.join(command)} does not tell its version: it {ran.failure}"
    elif ran.status is None:
        message = f"the C++ compiler {shlex.join(command)} does not run: it {ran.failure}: {output}"
    else:
        message = f"{shlex.join(command)} --version exits with {ran.status}: {output}"
    _unusable[command, timeout_s] = BuildError(message)
    raise BuildError(message)


@functools.cache
def _host_cpu() -> str:
    """A digest of what this processor is and can do: -march=native depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {host_target()}"
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    facts = {line for line in lines if line.split(":")[0].strip() in names}
    return f"{platform.machine()} {hashlib.sha256(chr(10).join(sorted(facts)).encode()).hexdigest()}"
