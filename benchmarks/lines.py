"""Prints the lines of each folder, hand-written and generated apart (run by `make check`)."""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = (".py", ".yaml", ".j2", ".h", ".cpp")
LONGEST = 500


def main() -> None:
    """Count the tracked and the new, not ignored, source files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    lines: Counter[str] = Counter()
    long = []
    for name in sorted(set(listed)):
        path = ROOT / name
        if path.suffix not in KINDS or not path.is_file():
            continue
        n = path.read_bytes().count(b"\n")
        parts = path.relative_to(ROOT).parts
        folder = (
            "/".join(parts[:2]) if parts[0] == "runtime" and len(parts) > 2 else parts[0] if len(parts) > 1 else "."
        )
        made = parts[0] == "generated" or parts[:2] in (("tests", "generated"), ("tests", "snapshots"))
        lines[("generated: " if made else "") + folder] += n
        if n > LONGEST and not made:
            long.append(f"{name}: {n} lines (over {LONGEST})")
    for folder, n in sorted(lines.items()):
        print(f"{n:7d}  {folder}")
    generated = sum(n for folder, n in lines.items() if folder.startswith("generated: "))
    print(f"{sum(lines.values()) - generated:7d}  hand-written\n{generated:7d}  generated")
    print(*long, sep="\n", end="\n" if long else "")


if __name__ == "__main__":
    main()
