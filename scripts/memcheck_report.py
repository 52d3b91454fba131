"""Says whose the findings of compute-sanitizer's memcheck are; ends with 1 if any may be ours.

    python scripts/memcheck_report.py LOG

Memory that TensorRT (for an engine) and CuPy (its pool) hold until the process ends is told apart by who allocated it.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

OTHERS = ("libnvinfer", "cupy")


def owners(log: str) -> tuple[Counter[str], list[str]]:
    """How many allocations each of `OTHERS` left, and the text of everything else that was found.

    Raises:
        ValueError: memcheck didn't end.
    """
    if "ERROR SUMMARY" not in log:
        raise ValueError("memcheck didn't end: its log has no summary")
    blocks = [block.strip() for block in log.replace("=========", "").split("\n \n")]
    left, bad = Counter[str](), list[str]()
    for block in blocks:
        text = block.removeprefix("COMPUTE-SANITIZER").strip()
        if not text or text.startswith(("LEAK SUMMARY", "ERROR SUMMARY")):
            continue
        owner = next((name for name in OTHERS if name in text), None) if text.startswith("Leaked") else None
        if owner is None:
            bad.append(text)
        else:
            left[owner] += 1
    return left, bad


if __name__ == "__main__":
    try:
        left, bad = owners(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        sys.exit(str(error))
    said = ", ".join(f"{count} by {name}" for name, count in sorted(left.items()))
    print(f"memcheck: {len(bad)} findings that may be ours; allocations left to the end by others: {said or 'none'}")
    print(*bad[:5], sep="\n\n")
    sys.exit(bool(bad))
