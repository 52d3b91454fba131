"""Archives for hosts without a network: an engine or a model, and the wheels that run it, with a script that installs them.

trtopt.bundle("resnet50.engine", "resnet50.tar", python="3.10")
"""

from __future__ import annotations

import email
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit
from zipfile import BadZipFile, ZipFile

from packaging.requirements import InvalidRequirement, Requirement

from trtopt.calibration.table import Table
from trtopt.core.documents import Plain, read_toml
from trtopt.core.errors import BundleFailed, EngineError, UsageError, require
from trtopt.core.files import existing_file, json_bytes, sha256_file, writing
from trtopt.core.options import taking
from trtopt.core.temporary import scratch
from trtopt.core.values import choice
from trtopt.core.version import __version__
from trtopt.engine.manifest import Manifest, kept_graph, load_manifest, manifest_path
from trtopt.graph.io import load_model, named_weights
from trtopt.serving.request import BundleRequest

FORMAT = "trtopt-bundle-1"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SCRIPT, SUMS, ABOUT, REQUIREMENTS = "install.sh", "SHA256SUMS", "bundle.json", "requirements.txt"
MADE = "made"  # the folder of wheels that are made here
_PLATFORM = re.compile(r"manylinux_2_(\d+)_(x86_64|aarch64)")
_OLD_TAGS = {17: "manylinux2014", 12: "manylinux2010"}  # glibc's minor version → what it was called before
_LEAST_GLIBC = 17
_TENSORRT = {"tensorrt": ("tensorrt", "gpu"), "rtx": ("tensorrt-rtx", "gpu")}  # family → package, extra beside it
_IN_NVIDIAS = (
    "the libraries of TensorRT 10 and 11 are in NVIDIA's own index: PIP_EXTRA_INDEX_URL=https://pypi.nvidia.com"
)
_SCRIPT = Path(__file__).with_name("install.sh")


@dataclass(frozen=True)
class BundledFile:
    """A file of a bundle, by its path in there."""

    path: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Bundle(Plain):
    """What `bundle` wrote.

    Attributes:
        path: the archive; everything in it lies in one folder, `name`.
        sha256: of the archive, to compare by where it is unpacked.
        python, platform: what it is for.
        packages: name → version of what is installed from it.
        next: the command that runs, or builds, what is in it.
    """

    path: Path
    name: str
    sha256: str
    nbytes: int
    python: str
    platform: str
    packages: Mapping[str, str]
    files: tuple[BundledFile, ...]
    next: str
    notes: tuple[str, ...] = ()


@taking(BundleRequest)
def bundle(request: BundleRequest) -> Bundle:
    """Write an archive that installs and runs an engine, or builds a model, on a host without a network.

    In it: the engine with its manifest and kept graph, or the ONNX model with its weights and a calibration table; the wheels
    of trtopt and of all that it needs there, in the versions that were resolved now; their SHA-256 sums; `install.sh`, which
    checks them and installs into a virtual environment with nothing but that Python. Equal wheels and files give equal bytes.

    Args:
        model: a plan, or an ONNX file, which is to be built there.
        output: the archive (tar).
        calib: beside an ONNX file: the calibration table for its INT8 build.
        python: of that host, such as "3.10"; None: as here.
        platform: of that host: "manylinux_2_28_x86_64" for glibc 2.28 or newer.
        extras: of trtopt's, instead of those that the engine asks for: "gpu" with its TensorRT.
        requirement: more requirements, such as "tensorrt-lean-cu12-libs==10.16.1.11".
        wheel: wheel files that no index has; trtopt's own, where this one wasn't installed from a checkout.
        constraint: a file of versions to keep to, such as a requirements.lock.

    Raises:
        UsageError: no such file, or options that don't go together.
        EngineError, EngineMismatch: the manifest can't be read, or is another plan's or kept graph's.
        MissingDependency: uv or pip isn't installed (the extra bundle).
        BundleFailed: a wheel can't be had for that Python and platform; what uv or pip said is quoted.
        OutputError: the archive can't be written. Nothing is left behind.
    """
    path = existing_file(request.model, "the engine or model")
    platform = _PLATFORM.fullmatch(request.platform)
    if platform is None or int(platform[1]) < _LEAST_GLIBC:
        raise UsageError(
            f"`platform={request.platform!r}` isn't known: write manylinux_2_N_x86_64 or …_aarch64, for glibc 2.N or newer, "
            f"N at least {_LEAST_GLIBC}"
        )
    python = request.python or "{}.{}".format(*sys.version_info[:2])
    if python not in PYTHONS:
        raise UsageError(f"`python={python!r}` isn't supported; trtopt runs on {', '.join(PYTHONS)}")
    for item in request.wheel:
        if not re.fullmatch(r"[^-]+(-[^-]+){4,5}\.whl", existing_file(item, "`wheel=`").name):
            raise UsageError(f"`wheel=` {os.fspath(item)} hasn't a wheel's name, such as name-1.0-py3-none-any.whl")
        _said(Path(item), "Name")
    source = _source(request)
    if request.constraint is not None:
        existing_file(request.constraint, "`constraint=`")
    for text in request.requirement:
        _requirement(text)
    for module in ("uv", "pip"):
        require(module, "bundle", "resolving and fetching wheels")
    content, manifest = _content(path, request)
    for place in content:  # SHA256SUMS and the script have lines
        if not place.isprintable():
            raise UsageError(
                f"{place!r} can't be bundled: its name has a line break, or other characters that don't print"
            )
    extras, required, next_command = _needed(path, manifest, request)
    reporter, name = request.reporter, re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem) or "bundle"
    with scratch() as folder:
        wheels = folder / "wheels"
        wheels.mkdir()
        (folder / MADE).mkdir()
        with reporter.phase("making trtopt's wheel"):
            own = _own_wheel(source, folder, platform[2])
        requirements = [*_of_extras(own, extras, python), *required]
        with reporter.phase("resolving versions"):
            try:
                pinned = _resolved(own, extras, required, python, request, folder)
            except BundleFailed:
                if not any(map(_metapackage, requirements)):
                    raise
                try:
                    _make_metapackages(requirements, folder / MADE)
                    pinned = _resolved(own, extras, required, python, request, folder)
                except BundleFailed as error:
                    hint = f"; {_IN_NVIDIAS}" if "libs" in str(error) else ""
                    raise BundleFailed(f"{error}{hint}") from None
        with reporter.phase("fetching wheels"):
            lines = folder / REQUIREMENTS
            lines.write_text("\n".join(pinned) + "\n", encoding="utf-8")
            words = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
            words += [*_platforms(int(platform[1]), platform[2]), "--find-links", str(folder / MADE)]
            _run("pip", "download", *words, "--dest", str(wheels), "--requirement", str(lines))
        os.replace(own, wheels / own.name)
        content |= {f"wheels/{item.name}": item for item in sorted(wheels.iterdir())}
        packages = dict(_name_and_version(item) for item in sorted(wheels.iterdir()))
        filled = {"@PYTHON@": python, "@MACHINE@": platform[2], "@GLIBC@": platform[1], "@NEXT@": next_command}
        script = _SCRIPT.read_text(encoding="utf-8")
        for place, value in filled.items():
            script = script.replace(place, value)
        installed = "".join(f"{package}=={version}\n" for package, version in packages.items())
        about = {
            "format": FORMAT,
            "trtopt": __version__,
            "python": python,
            "platform": request.platform,
            "packages": packages,
            "next": next_command,
        }
        scripts: dict[str, bytes] = {
            SCRIPT: script.encode(),
            REQUIREMENTS: installed.encode(),
            ABOUT: json_bytes(about),
        }
        files = [BundledFile(place, item.stat().st_size, sha256_file(item)) for place, item in content.items()]
        files += [BundledFile(place, len(data), hashlib.sha256(data).hexdigest()) for place, data in scripts.items()]
        files.sort(key=lambda item: item.path)
        scripts[SUMS] = "".join(f"{item.sha256}  {item.path}\n" for item in files).encode()
        with reporter.phase("writing the archive"), writing(request.output) as partial:
            _write(partial, name, {**content, **scripts})
    output = Path(request.output)
    return Bundle(
        output,
        name,
        sha256_file(output),
        output.stat().st_size,
        python,
        request.platform,
        packages,
        tuple(files),
        next_command,
        ()
        if manifest is None or not manifest.generation["gpu"]
        else (f"the plan runs on {manifest.generation['gpu']}",),
    )


def _requirement(text: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"`requirement=` {text!r} can't be read ({why}); write such as tritonclient>=2") from None


# What goes in ------------------------------------------------------------------------------------------------------------


def _content(path: Path, request: BundleRequest) -> tuple[dict[str, Path], Manifest | None]:
    """Place in the bundle → file; and the manifest, of an engine."""
    if path.suffix == ".onnx":
        files = {f"model/{path.name}": path, **_weights(path, "model")}
        if request.calib is not None:
            table = existing_file(request.calib, "`calib=`")
            Table.load(table)
            files[f"model/{table.name}"] = table
        return files, None
    if request.calib is not None:
        raise UsageError("`calib=` is for an ONNX file, which is still to be built; an engine has its scales")
    manifest = load_manifest(path)
    if manifest is None:
        raise EngineError(
            f"{path} has no manifest ({manifest_path(path).name}), so what it needs there isn't known: build it by trtopt, or "
            "bundle the ONNX file"
        )
    manifest.check_plan(path)
    files = {f"model/{path.name}": path, f"model/{manifest_path(path).name}": manifest_path(path)}
    graph = kept_graph(path)
    if graph is not None and graph.is_relative_to(path.parent):
        fingerprint = load_model(graph, lazy=True).fingerprint
        manifest.check_graph(graph, fingerprint)  # else that host is the first to find it out
        place = Path("model", graph.relative_to(path.parent))
        files |= {place.as_posix(): graph, **_weights(graph, place.parent.as_posix())}
    return files, manifest


def _weights(model: Path, folder: str) -> dict[str, Path]:
    """Place in the bundle → file, of the weights that lie beside an ONNX file."""
    load_model(model, lazy=True)  # says what is wrong with it
    return {(Path(folder) / place).as_posix(): file for place, file in named_weights(model).items()}


def _needed(path: Path, manifest: Manifest | None, request: BundleRequest) -> tuple[tuple[str, ...], list[str], str]:
    """Extras of trtopt, further requirements, and the command that comes next on that host."""
    required = list(request.requirement)
    if manifest is None:
        if not request.extras:
            raise UsageError("`extras=` says what builds the model there: `extras=['trt8', 'gpu']`, or ['rtx', 'gpu']")
        words = ["trtopt", "build", path.name]
        words += [] if request.calib is None else ["--int8", "--calib", Path(request.calib).name]
        return tuple(request.extras), required, shlex.join([*words, "-o", f"{path.stem}.engine"])
    run = shlex.join(["trtopt", "run", path.name, "--input", "INPUTS.npz"])
    compatible = bool(manifest.spec.get("version_compatible"))
    if any(name.startswith("lean") for name in request.extras) and not compatible:
        raise UsageError(
            f"the lean runtime runs plans that are built with `version_compatible=True`, and {path.name} isn't: build it "
            "so, or leave `extras=` to the engine"
        )
    run += " --trust-host-code" if compatible and not manifest.spec.get("exclude_lean_runtime") else ""
    if request.extras:
        return tuple(request.extras), required, run + (" --backend onnxruntime" if "ort" in request.extras else "")
    maker = manifest.generation
    package, extra = _TENSORRT[maker["family"]]
    return (extra,), [*required, f"{package}=={maker['version']}"], run


def _source(request: BundleRequest) -> Path:
    """trtopt's wheel that was given, or the checkout that it is made of.

    Raises:
        UsageError: there is neither, or it has no such extra as is asked for; uv would pass that over.
    """
    wheels = [Path(item) for item in request.wheel if Path(item).name.startswith("trtopt-")]
    source = wheels[0] if wheels else _checkout()
    if source is None:
        raise UsageError(
            "trtopt wasn't installed from a checkout, so there is nothing to make its wheel of: give the file that it was "
            "installed from, `wheel=['trtopt-….whl']`"
        )
    if wheels:
        available = _said(source, "Provides-Extra")
    else:
        available = list(read_toml(source / "pyproject.toml")["project"]["optional-dependencies"])
    for name in request.extras:
        choice(name, available, "`extras=`")
    return source


def _own_wheel(source: Path, folder: Path, machine: str) -> Path:
    """trtopt's wheel, in `folder`.

    Raises:
        UsageError: it is for another machine: C code is in it.
    """
    if source.is_file():
        own = Path(shutil.copy(source, folder))
    else:
        _run("pip", "wheel", "--no-deps", "--wheel-dir", str(folder / "own"), str(source))
        (own,) = (folder / "own").glob("trtopt-*.whl")
    if not own.stem.endswith(("any", machine)):
        raise UsageError(
            f"{own.name} isn't for {machine}: make trtopt's wheel on such a machine (pip wheel --no-deps CHECKOUT), and give "
            "it as `wheel=`"
        )
    return own


def _of_extras(own: Path, extras: Iterable[str], python: str) -> list[str]:
    """What trtopt's extras ask for, as its wheel says."""
    requirements = map(Requirement, _said(own, "Requires-Dist"))
    values = [{"extra": name, "python_version": python} for name in extras]
    return [
        f"{item.name}{item.specifier}"
        for item in requirements
        if item.marker is not None and any(item.marker.evaluate(value) for value in values)
    ]


def _metapackage(requirement: str) -> Requirement | None:
    """A requirement of a package of NVIDIA's that only names those that have the libraries."""
    parsed = Requirement(requirement)
    return parsed if re.fullmatch(r"tensorrt([-_](rtx|lean|dispatch))?([-_]cu\d+)?", parsed.name) else None


def _make_metapackages(required: Iterable[str], folder: Path) -> None:
    """Make wheels, in `folder`, of such packages, which no index has as wheels; they hold a few lines of Python."""
    waiting = [item for text in required if (item := _metapackage(text))]
    for number, item in enumerate(waiting):  # which grows: one names the next
        place = folder / str(number)
        words = ["--no-deps", "--no-binary", item.name, "--wheel-dir", str(place), f"{item.name}{item.specifier}"]
        _run("pip", "wheel", *words)
        (wheel,) = place.glob("*.whl")
        waiting += [needed for text in _said(wheel, "Requires-Dist") if (needed := _metapackage(text))]
        os.replace(wheel, folder / wheel.name)


def _said(wheel: Path, field: str) -> list[str]:
    """What a wheel's metadata say in the lines of this name.

    Raises:
        UsageError: it is no wheel.
    """
    try:
        with ZipFile(wheel) as file:
            (place,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
            content = file.read(place)
    except (BadZipFile, ValueError, OSError, zlib.error) as error:
        raise UsageError(
            f"`wheel=` {wheel.name} can't be read as a wheel ({error}): make it again, by pip wheel"
        ) from None
    return [str(value) for value in email.message_from_bytes(content).get_all(field) or ()]


def _checkout() -> Path | None:
    """The folder that this trtopt was installed from, or runs in."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root
    try:
        origin = importlib.metadata.distribution("trtopt").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    place = urlsplit(json.loads(origin)["url"]) if origin else None
    folder = Path(unquote(place.path)) if place is not None and place.scheme == "file" else None
    return folder if folder is not None and folder.is_dir() else None


def _resolved(
    own: Path, extras: Iterable[str], required: Iterable[str], python: str, request: BundleRequest, folder: Path
) -> list[str]:
    """Requirements with exact versions, of all that trtopt needs there; without trtopt itself."""
    wheels = [Path(item) for item in request.wheel if Path(item).name != own.name]
    source = folder / "asked.txt"
    lines = [f"trtopt[{','.join(extras)}] @ {own.resolve().as_uri()}", *required, "pip"]
    lines += [f"{_name_and_version(item)[0]} @ {item.resolve().as_uri()}" for item in wheels]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _, _, minor, machine = request.platform.split("_", 3)
    words = ["compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:", str(source)]
    words += ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_{minor}", *_indexes()]
    words += ["--find-links", str(folder / MADE)]
    if request.constraint is not None:
        words += ["--constraint", str(request.constraint)]
    pins = [line.split("#")[0].split(";")[0].strip() for line in _run("uv", "pip", *words).splitlines()]
    return [line for line in pins if line and not line.startswith(("trtopt ", "trtopt[", "trtopt@", "-"))]


def _indexes() -> list[str]:
    """uv's options for the indexes that pip is set up for (PIP_*, pip.conf): pip fetches what uv has resolved."""
    entries = re.findall(r"^([^=]*)\.([a-z-]+)='(.*)'$", _run("pip", "config", "list"), re.MULTILINE)
    settings = {
        name: value for _, name, value in sorted(entries, key=lambda item: item[0] == ":env:")
    }  # which goes first
    words = ["--index-strategy", "unsafe-best-match"]  # as pip takes the best of all
    words += ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    for name in ("index-url", "extra-index-url", "find-links"):
        words += [word for place in settings.get(name, "").split() for word in (f"--{name}", place)]
    for host in settings.get("trusted-host", "").split():
        words += ["--allow-insecure-host", host]
    return words


def _platforms(glibc: int, machine: str) -> list[str]:
    """pip's options for a host: tags of every glibc up to its own."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    tags += [f"{old}_{machine}" for minor, old in _OLD_TAGS.items() if minor <= glibc]
    return [word for tag in (*tags, f"linux_{machine}") for word in ("--platform", tag)]


def _name_and_version(wheel: Path) -> tuple[str, str]:
    name, version, *_ = wheel.name.split("-")
    return name.replace("_", "-").lower(), version


def _run(tool: str, *words: str) -> str:
    """What uv or pip printed."""
    environment = dict(os.environ)
    environment["NVIDIA_TENSORRT_DISABLE_INTERNAL_PIP"] = "1"  # else making its metapackage installs what that names
    if cert := environment.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", cert)  # what uv takes for it
    quiet = ["--disable-pip-version-check"] if tool == "pip" else []
    with scratch() as folder:  # what they unpack is gigabytes, which they leave where they are stopped
        process = subprocess.Popen(
            [sys.executable, "-m", tool, *words, *quiet],
            env=environment | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # pip starts others, which go on without it
        )
        with process:
            try:
                output, errors = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    if process.returncode:
        reason = " ".join((errors or output).split())[-600:]
        raise BundleFailed(f"{tool} can't get what is needed: {reason}")
    return output


# The archive -------------------------------------------------------------------------------------------------------------


def _write(path: Path, name: str, content: Mapping[str, Path | bytes]) -> None:
    """One folder, in a fixed order, with nothing of this host in it."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for place in sorted(content):
            item = content[place]
            about = tarfile.TarInfo(f"{name}/{place}")
            about.mode = 0o755 if place == SCRIPT else 0o644
            about.size = len(item) if isinstance(item, bytes) else item.stat().st_size
            source: BinaryIO = io.BytesIO(item) if isinstance(item, bytes) else item.open("rb")
            with source:
                archive.addfile(about, source)
