"""Builds of a job list, in workers: what can't be built is refused, engines are built from files here or sent."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from trtopt.autotune.building import build, goal_asked
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.core.errors import TrtoptError, UnsupportedRequest
from trtopt.core.files import (
    check_writable,
    existing_file,
    made_folder,
    sha256_file,
    whole,
    write_bytes,
    writing_together,
)
from trtopt.core.host import forget_peak, peak_memory
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.core.progress import Reporter
from trtopt.core.temporary import scratch
from trtopt.core.words import first_of
from trtopt.cuda.device import probe, require_gpu
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.graph.io import external_files
from trtopt.jobs.joblist import in_list
from trtopt.trt import select

Files = Mapping[str, bytes]  # path in a folder of its own → content
_READ = ("calib", "labels")  # options that name one file; `sent` has the others


def examine(builds: Sequence[tuple[str, BuildRequest]], here: bool) -> tuple[str, ...]:
    """Refuse what can't be built, before any work; else the names of this machine's GPUs.

    Args:
        builds: names of jobs, and what they ask for.
        here: they are built on this machine; else only what holds for any is looked at.

    Raises:
        UnsupportedRequest: every reason, with the jobs that it holds for.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, request in builds:
        if why := _refused(request, here):
            names_by_reason.setdefault(why, []).append(name)
    if names_by_reason:
        lines = [f"{first_of(names)}: {why}" for why, names in names_by_reason.items()]
        raise UnsupportedRequest(
            "jobs of the list can't be built " + ("on this machine" if here else "anywhere"),
            lines,
            "nothing was started" + ("; with `ray=` they are built where Ray has what they need" if here else ""),
        )
    return tuple(device.name for device in probe().devices)


def _refused(request: BuildRequest, here: bool) -> str:
    """Why it can't be built; empty: it can, as far as that is known before the work."""
    try:
        if not request.best:
            goal_asked(request)
        if here:
            select(request.backend).refuse(spec_of(request))
        if here and request.best:
            require_gpu("`best=True`", request.device)
    except TrtoptError as error:
        return in_list(" ".join(line.strip() for line in error.lines))
    return ""


class _Kept(Reporter):
    """Warnings, for the job's record."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def build_engine(request: BuildRequest) -> dict[str, Any]:
    """Build, unless the engine is up to date; what a job's record says of it, and the memory that it took.

    Raises: as `build`.
    """
    forget_peak()
    heard = _Kept()
    result = build(**vars(replace(request, reporter=heard)))
    return {
        "cached": result.cached,
        "precision_summary": result.precision_summary,
        "targets": list(result.targets),
        "sha256": sha256_file(result.engine),
        "notes": list(dict.fromkeys([*heard.warnings, *(result.warnings if result.cached else ())])),
        "peak": peak_memory(),
    }


# Where no folder is shared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """A build's small files: those that options name, and the engine that is there, for it may be up to date."""

    options: Mapping[str, Files]
    there: Files


def parcel(request: BuildRequest) -> Parcel:
    """What travels with a request besides its model and its samples.

    Raises:
        UsageError: a file isn't there.
    """
    files = {name: getattr(request, name) for name in _READ}
    plan = Path(request.output)
    both = [plan, manifest_path(plan)]
    return Parcel(
        {name: _content([existing_file(path, f"`{name}=`")]) for name, path in files.items() if path is not None},
        _content(both) if all(path.is_file() for path in both) else {},
    )


def model_files(path: Path) -> Files:
    """A model with its external data.

    Raises:
        UsageError: it isn't there.
        InvalidModel: it names files that aren't its own.
    """
    existing_file(path, "the model")
    try:
        light = onnx.load(path, load_external_data=False)
    except Exception:  # protobuf raises errors of its own; the build says what is wrong with it
        return _content([path])
    return _content([path, *external_files(light, path)], path.parent)


def sample_files(path: Path) -> Files:
    """A folder of images or arrays, or one file."""
    if path.is_file():
        return _content([path])
    suffixes = EXTENSIONS | ARRAYS
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix.lower() in suffixes)
    return _content(files, path)


def build_sent(request: BuildRequest, model: Files, samples: Files | None, small: Parcel) -> dict[str, Any]:
    """`build_engine` of what was sent; besides, the manifest, and the plan if it was built."""
    with scratch() as folder:
        path = Path(os.fspath(request.model))
        paths: dict[str, Any] = {"model": _placed(model, folder / "model") / path.name}
        for name, files in small.options.items():
            paths[name] = _placed(files, folder / name) / next(iter(files))
        for name in ("images", "data"):
            source = getattr(request, name)
            if source is not None and samples is not None:
                place = _placed(samples, folder / name)
                paths[name] = place / Path(source).name if list(samples) == [Path(source).name] else place
        output = _placed(small.there, folder / "engine") / Path(request.output).name
        result = build_engine(replace(request, **paths, output=output))
        manifest = load_manifest(output)
        assert manifest is not None  # it has just been written, or found to be up to date
        described = replace(manifest, source={**manifest.source, "path": str(path)}).save(output)
        plan = None if result["cached"] else whole(output, None)
        return {**result, "plan": plan, "manifest": whole(described)}


def make_place(output: Path) -> None:
    """Make the folder of an engine.

    Raises:
        OutputError: it can't be made, or the engine can't be written there.
    """
    made_folder(output.parent, advice="")
    for path in (output, manifest_path(output)):
        check_writable(path)


def install(output: Path, plan: bytes | None, manifest: bytes) -> None:
    """Write what `build_sent` gave: both files or none; only a manifest that changed where there is no plan.

    Raises:
        OutputError: they can't be written.
    """
    described = manifest_path(output)
    if plan is None:
        if whole(described) != manifest:
            write_bytes(described, manifest)
        return
    with writing_together(output, described) as (partial, partial_manifest):
        partial.write_bytes(plan)
        partial_manifest.write_bytes(manifest)


def _content(files: Iterable[Path], folder: Path | None = None) -> dict[str, bytes]:
    return {str(file.relative_to(folder)) if folder else file.name: whole(file, None) for file in files}


def _placed(files: Files, folder: Path) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(exist_ok=True)
    return folder
