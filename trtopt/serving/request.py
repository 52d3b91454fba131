"""Requests of deploy and serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from trtopt.core import shared_options as shared
from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class DeployRequest:
    """The arguments of `trtopt.deploy_triton`, which describes them."""

    engines: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = field(
        metadata=about(help="Plans, with their manifests beside them.", metavar="M.engine…", typed=list[Path])
    )
    _: KW_ONLY
    repo: str | os.PathLike[str] = field(
        metadata=about(help="The model repository; made if absent.", metavar="DIR", short="-r", writes=FOLDER)
    )
    name: str | None = option(None, help="The model's name there; default: the file's.")
    backend: str = option("tensorrt", help="tensorrt: the plan itself; python: trtopt's Session around it.")
    runtime: str = option(
        "auto", help="With python: auto, tensorrt, lean, rtx; onnxruntime: the kept graph, on the CPU."
    )
    instances: int = option(1, help="Copies that run at the same time, on each GPU.", least=1)
    max_delay: str = option("2ms", help="How long a request waits for others to fill a batch.")
    trust_host_code: bool = shared.trust_host_code()
    require: str | None = option(None, help="certified: only engines that trtopt certify has found right.")
    overwrite: bool = option(False, help="Replace a configuration that says something else.")
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators(beside="`runtime='onnxruntime'`")
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class ServeRequest:
    """The arguments of `trtopt.serve`, which describes them."""

    repo: str | os.PathLike[str] = field(
        metadata=about(help="The model repository, as trtopt deploy triton writes it.", metavar="REPO")
    )
    _: KW_ONLY
    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0: all of this machine's.")
    http_port: int = option(8000, help="Port for HTTP.")
    grpc_port: int = option(8001, help="Port for gRPC.")
    metrics_port: int = option(8002, help="Port for Prometheus' metrics.")
    server: str | os.PathLike[str] | None = option(
        None, help="The executable; default: the first tritonserver in PATH."
    )
    reporter: Reporter = SILENT
