"""What is wrong with a plan or an ONNX file, seen from this host: read from the plan's header and manifest, before anything is
deserialized, and from what `check` says of a model."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.core.errors import EngineMismatch, TrtoptError
from trtopt.core.files import existing_file, opened_regular, whole
from trtopt.diagnosis.findings import HostFinding
from trtopt.diagnosis.host import Host
from trtopt.diagnosis.packages import release
from trtopt.diagnosis.probes import ask

if TYPE_CHECKING:
    from trtopt.engine.manifest import Manifest
    from trtopt.trt.plans import PlanHeader

CHECKING = 600.0  # seconds for `check`, of a large model on a slow machine
_POINTER = b"version https://git-lfs.github.com/spec/"
_START = 4096
_OTHERS = {  # what files begin with that are taken for a plan
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image", b"RIFF": "a WebP, WAV or AVI file",
    b"%PDF": "a PDF document", b"\x1f\x8b": "a gzip archive", b"\x93NUMPY": "a NumPy array", b"\x7fELF": "a program or library",
    b"\x80": "a pickle, perhaps an old PyTorch checkpoint", b"<": "a web page", b"{": "JSON, perhaps a manifest",
}  # fmt: skip
_FIELDS = (b"\x12", b"\x1a", b"\x22", b"\x28", b"\x32", b"\x3a", b"\x42")  # of an ONNX model, behind its IR version
_BACKENDS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}  # module → backend


def examine_file(path: Path, host: Host) -> tuple[dict[str, str], list[HostFinding]]:
    """What a plan or a model is, in lines, and what is wrong with it on this host.

    Raises:
        UsageError: there is no such file.
    """
    existing_file(path, "the file")
    with opened_regular(path) as file:
        start = file.read(_START)
    if start.startswith(_POINTER):
        fact = f"{path} is a pointer of Git LFS, {path.stat().st_size} bytes"
        command = f"git lfs install && git lfs pull --include {shlex.quote(path.name)}"
        return {}, [HostFinding("lfs-pointer", "error", fact, "the file itself wasn't downloaded", command)]
    return _model(path, host) if path.suffix == ".onnx" else _plan(path, start, host)


# Plans -------------------------------------------------------------------------------------------------------------------


def _plan(path: Path, start: bytes, host: Host) -> tuple[dict[str, str], list[HostFinding]]:
    from trtopt.engine.manifest import load_manifest
    from trtopt.trt.plans import plan_header

    header = plan_header(start)
    if header is None:
        return {}, [_no_plan(path, start)]
    findings: list[HostFinding] = []
    manifest = None
    rebuild = f"trtopt build MODEL.onnx -o {shlex.quote(str(path))}"
    try:
        manifest = load_manifest(path)
        if manifest is not None:
            rebuild = _rebuild(path, manifest)
            manifest.check_plan(path)
        else:
            findings.append(
                HostFinding(
                    "plan-without-manifest",
                    "info",
                    f"{path} has no manifest, which says which plan it is",
                    "run loads it only if you know where it comes from, and say so",
                    shlex.join(["trtopt", "run", str(path), "--trust", "--input", "X.npy"]),
                )
            )
    except EngineMismatch as error:
        findings.append(HostFinding("plan-not-of-manifest", "error", str(error), "run and inspect refuse it", rebuild))
        manifest = None  # nothing in it is about this plan
    except TrtoptError as error:
        consequence = "how the engine was made isn't known, and run refuses it"
        findings.append(HostFinding("manifest-damaged", "error", str(error), consequence, rebuild))
    targets = manifest.built_for if manifest is not None and manifest.built_for else header.targets
    facts = {"plan": f"{header}, {path.stat().st_size / 2**20:.1f} MiB"}
    facts["built for"] = ", ".join(f"sm{target}" for target in targets) or "unknown: neither header nor manifest says"
    nbytes = path.stat().st_size
    if header.nbytes and header.nbytes != nbytes:
        fact = f"{path} has {nbytes} bytes, its header says {header.nbytes}"
        findings.append(HostFinding("plan-damaged", "error", fact, "it was cut off, or copied as text", rebuild))
    findings += _version(path, header, manifest, host, rebuild)
    findings += _gpus(path, header, manifest, targets, host, rebuild)
    return facts, findings


def _no_plan(path: Path, start: bytes) -> HostFinding:
    """NVIDIA/TensorRT#1384, #2915: "Magic tag does not match"."""
    name = shlex.quote(str(path))
    length = int.from_bytes(start[:4], "little")
    if start[4:5] == b"{" and 0 < length < 1 << 20:
        copy = shlex.quote(str(path.with_suffix(".plan.engine")))
        return HostFinding(
            "ultralytics-prefix",
            "error",
            f"{path} begins with {length} bytes of Ultralytics' JSON, and the plan comes after",
            "only Ultralytics opens it; TensorRT says 'Magic tag does not match'",
            f"tail -c +{length + 5} {name} > {copy}",
        )
    if start[:1] == b"\x08" and start[1:2] < b"\x20" and start[2:3] in _FIELDS:
        output = shlex.quote(str(path.with_suffix(".built.engine")))
        return HostFinding(
            "model-not-plan",
            "error",
            f"{path} is an ONNX model, not a plan",
            "TensorRT can't run it as it is",
            f"trtopt build {name} -o {output}",
        )
    if start.startswith(b"PK\x03\x04"):
        return HostFinding(
            "weights-not-plan",
            "error",
            f"{path} is an archive, as PyTorch saves weights and modules",
            "TensorRT builds from ONNX",
            f"trtopt export my_model.py:Net --weights {name} -o MODEL.onnx",
        )
    what = next((what for first, what in _OTHERS.items() if start.startswith(first)), "")
    if not start:
        fact, reason = f"{path} is empty (0 bytes), no TensorRT plan", "a build or a copy of it didn't end"
    elif what:
        fact, reason = f"{path} is {what}, no TensorRT plan", "give the engine's file"
    else:
        fact = f"{path} isn't a TensorRT plan: its header isn't one"
        reason = "it is damaged, of TensorRT before 8.6, or something else"
    consequence = f"nothing can run it; {reason}"
    return HostFinding("no-plan", "error", fact, consequence, "trtopt build MODEL.onnx -o MODEL.engine")


def _rebuild(path: Path, manifest: Manifest) -> str:
    """The command that builds the engine again, as far as its manifest says."""
    spec = manifest.spec
    words = ["trtopt", "build", str(manifest.source["path"] or "MODEL.onnx")]
    if spec["precision"] != "fp32":
        words.append(f"--{spec['precision']}")
    if manifest.calibration:
        words += ["--calib", "TABLE.calib.json"]
    for profile in manifest.profiles:
        words += ["--shapes", ";".join(f"{name}:{shape}" for name, shape in profile.items())]
    return shlex.join([*words, "-o", str(path)])


def _version(
    path: Path, header: PlanHeader, manifest: Manifest | None, host: Host, rebuild: str
) -> Iterator[HostFinding]:
    from trtopt.trt import LEAN
    from trtopt.trt.compatibility import PlanOrigin, runs_on, unread
    from trtopt.trt.plans import plan_origin

    product = "tensorrt_rtx" if header.product == "TensorRT-RTX" else "tensorrt"
    modules = [product, *LEAN] if product == "tensorrt" else [product]
    number = ".".join(map(str, release(header.version)[:3]))
    to_get = f"pip install '{product.replace('_', '-')}=={number}.*'"
    local_versions = {module: str(version) for module in modules if (version := host.answered(module).get("version"))}
    if not local_versions:
        yield HostFinding(
            "plan-without-runtime",
            "error",
            f"{path} was made by {header}; no {header.product} can be imported here",
            "it can't run here",
            to_get if host.answers.get(product) is None else rebuild,
        )
        return
    origin = plan_origin(whole(path, None)) or PlanOrigin(header.product, header.version)
    if manifest is not None:
        origin = replace(manifest.origin, version=header.version)
    candidates = [
        (module, version, unread(origin, version, lean=module in LEAN)) for module, version in local_versions.items()
    ]
    module, version, why = next((item for item in candidates if not item[2]), candidates[0])
    name = f"{header.product}{' lean' if module in LEAN else ''} {version}"
    if why:
        yield HostFinding(
            "plan-of-other-version",
            "error",
            f"{path} was made by {header}; {name} is here",
            f"it runs on {runs_on(origin)}"
            + (
                ""
                if manifest or origin.compatible or product == "tensorrt_rtx"
                else ", unless built to be version-compatible"
            ),
            to_get if manifest is None else rebuild,
        )
    elif release(version)[:3] != release(header.version)[:3]:
        yield HostFinding(
            "plan-of-older-version",
            "info",
            f"{path} was made by {header}; {name} is here",
            "it was built to run on later versions: it is opened only if you trust the library that it carries",
            shlex.join(["trtopt", "run", str(path), "--trust-host-code", "--input", "X.npy"]),
        )


def _gpus(
    path: Path, header: PlanHeader, manifest: Manifest | None, targets: tuple[int, ...], host: Host, rebuild: str
) -> Iterator[HostFinding]:
    if not targets or not host.gpus:
        return
    level = str(manifest.spec.get("hardware_compatibility", "none")) if manifest is not None else "none"
    capabilities = sorted({gpu.compute_capability for gpu in host.gpus})
    fitting_capabilities = [sm for sm in capabilities if sm in targets or (level == "ampere_plus" and sm >= 80)]
    if len(fitting_capabilities) == len(capabilities):
        return
    kinds = ", ".join(f"sm{sm}" for sm in targets)
    unfit_gpus = [gpu for gpu in host.gpus if gpu.compute_capability not in fitting_capabilities]
    if header.product == "TensorRT-RTX":
        rebuild = rebuild.replace("trtopt build", f"trtopt build --target sm{unfit_gpus[0].compute_capability}", 1)
    names = ", ".join(dict.fromkeys(f"{gpu.name} (sm{gpu.compute_capability})" for gpu in unfit_gpus))
    yield HostFinding(
        "plan-of-other-gpu",
        "warning" if fitting_capabilities else "error",
        f"{path} was built for {kinds}; here is {names}",
        "it doesn't load on that GPU; plans are for the GPU they were built for",
        rebuild,
    )


# Models ------------------------------------------------------------------------------------------------------------------


def _model(path: Path, host: Host) -> tuple[dict[str, str], list[HostFinding]]:
    """What `check` says, for each TensorRT here, in child processes: parsers are native."""
    backends = [backend for module, backend in _BACKENDS.items() if host.answered(module)] or ["auto"]
    answers = ask({backend: ("check", str(path), backend) for backend in backends}, CHECKING)
    facts: dict[str, str] = {"model": f"{path}, {path.stat().st_size / 2**20:.1f} MiB"}
    findings: list[HostFinding] = []
    for backend, answer in answers.items():
        command = shlex.join(["trtopt", "check", str(path), "--backend", backend])
        if answer.values is None:
            fact = f"checking {path} for {backend}: {answer.failure}"
            consequence = "a build may end like this, too"
            findings.append(HostFinding("check-failed", "error", fact, consequence, f"trtopt -v{command[6:]}"))
            continue
        report = answer.values
        if report["opset"]:
            inputs = ", ".join(f"{item['name']} ({', '.join(map(str, item['shape']))})" for item in report["inputs"])
            facts["opset"] = f"{report['opset']}; inputs {inputs}"
        counts = {level: sum(item["level"] == level for item in report["findings"]) for level in ("error", "warning")}
        summary = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
        facts[f"check ({backend})"] = f"{report['parser'] or 'no parser'}: {summary}"
        findings += _errors(report, command)
        if counts["warning"]:
            codes = ", ".join(sorted({item["code"] for item in report["findings"] if item["level"] == "warning"}))
            fact = f"check warns of {codes}"
            findings.append(HostFinding("model-warnings", "info", fact, "builds work; precision may suffer", command))
    findings = list(dict.fromkeys(findings))  # of several parsers the same
    findings += _room(path, host)
    return facts, findings


def _errors(report: Mapping[str, Any], command: str) -> Iterator[HostFinding]:
    for item in report["findings"]:
        if item["level"] == "error":
            where = " ".join(filter(None, (item["node"], item["op"] and f"({item['op']})")))
            fact = f"{item['code']}: {where}{where and ': '}{item['message']}"
            yield HostFinding("model-error", "error", fact, item["hint"] or "builds refuse it", command)


def _room(path: Path, host: Host) -> Iterator[HostFinding]:
    size = path.stat().st_size
    with contextlib.suppress(OSError):
        size += sum(item.stat().st_size for item in path.parent.glob(f"{path.name}*data"))
    if host.free_memory is not None and host.free_memory < 3 * size:
        fact = f"{host.free_memory / 2**30:.1f} GiB of memory are free, and the model has {size / 2**30:.1f} GiB"
        consequence = "its graph, a second one with Q/DQ and TensorRT's copy don't fit: the build may be killed"
        yield HostFinding("model-larger-than-memory", "warning", fact, consequence, "ps aux --sort=-rss | head")
