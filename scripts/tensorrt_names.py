"""Write the names that an installed TensorRT has, from which tests/trt/standins.py makes a stand-in, as JSON:

python scripts/tensorrt_names.py tensorrt tests/trt/api/12.0.0.json
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def names_of(module: Any) -> dict[str, Any]:
    """Return a module's version, its enumerations with their values, its classes with their members, and its functions."""
    enums: dict[str, dict[str, int]] = {}
    classes: dict[str, list[str]] = {}
    functions: list[str] = []

    def look(owner: Any, prefix: str) -> None:
        for name, value in vars(owner).items():
            if name.startswith("_"):
                continue
            if isinstance(value, type) and hasattr(value, "__members__"):
                enums[prefix + name] = {key: int(member) for key, member in value.__members__.items()}
            elif isinstance(value, type) and not prefix:
                own = {key for base in value.__mro__[:-2] for key in vars(base)}  # without pybind11's base, and object
                classes[name] = sorted(key for key in own if not key.startswith("_") or key == "__init__")
                look(value, f"{name}.")
            elif callable(value) and not prefix:
                functions.append(name)

    look(module, "")
    names = {"enums": dict(sorted(enums.items())), "classes": dict(sorted(classes.items()))}
    return {"version": module.__version__, **names, "functions": sorted(functions)}


def written(names: dict[str, Any]) -> str:
    """Return the JSON, a class a line, so that two versions can be compared."""
    text = functools.partial(json.dumps, separators=(",", ":"))
    parts = [f'"version":{text(names["version"])}']
    for kind in ("enums", "classes"):
        lines = (f"{text(name)}:{text(value)}" for name, value in names[kind].items())
        parts.append(f'"{kind}":{{\n' + ",\n".join(lines) + "\n}")
    parts.append(f'"functions":{text(names["functions"])}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(written(names_of(importlib.import_module(sys.argv[1]))), encoding="utf-8")
