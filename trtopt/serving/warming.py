"""A server's HTTP warmed up: Triton's own warm-up reaches the models, and leaves the way to them cold.

A first request of half a megabyte took half as long again as the next ones, whatever the model.
"""

from __future__ import annotations

import contextlib
import json
import math
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtopt.core.files import whole
from trtopt.serving.control import opener

_CALLS = 3
_BYTES = {"BOOL": 1, "BF16": 2, **{f"FP{bits}": bits // 8 for bits in (16, 32, 64)}} | {
    f"{sign}INT{bits}": bits // 8 for sign in ("", "U") for bits in (8, 16, 32, 64)
}


def warm_up(address: str, repo: Path) -> None:
    """Send each model of a repository the first sample of its configuration's warm-up, as a client does it, a few times.

    What a model refuses, it has said in the server's log; it is loaded, and this is no reason to end.
    """
    client = opener()
    for folder in sorted(path.parent for path in repo.glob("*/config.pbtxt")):
        model = f"http://{address}/v2/models/{urllib.parse.quote(folder.name, safe='')}"
        with contextlib.suppress(OSError, ValueError, KeyError):
            with client.open(f"{model}/config", timeout=10) as answer:
                config = json.load(answer)
            for sample in config.get("model_warmup", ())[:1]:
                for _ in range(_CALLS):
                    with client.open(_request(f"{model}/infer", folder, config, sample), timeout=60) as answer:
                        answer.read()


def _request(
    address: str, folder: Path, config: Mapping[str, Any], sample: Mapping[str, Any]
) -> urllib.request.Request:
    """For binary tensors in and out; KeyError for a type that they don't carry."""
    inputs, content = [], b""
    batch = [int(sample["batch_size"])] if int(config.get("max_batch_size", 0)) else []
    for name, tensor in sample["inputs"].items():
        kind = tensor["data_type"].removeprefix("TYPE_")
        shape = [*batch, *map(int, tensor["dims"])]
        file = tensor.get("input_data_file")
        data = whole(folder / "warmup" / file) if file else bytes(_BYTES[kind] * math.prod(shape))
        size = {"binary_data_size": len(data)}
        inputs.append({"name": name, "datatype": kind, "shape": shape, "parameters": size})
        content += data
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return urllib.request.Request(address, head + content, headers)
