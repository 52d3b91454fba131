"""Cures of an engine that isn't right: what `build(heal=True)` tries at the place where `certify` says that it fails.

A cure is nothing but options of `build`, so that what healed can be typed, put into a recipe, and stands in the manifest. Where
none of them makes the engine right, the one that brings it nearest stays, and the next place is looked for.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtopt.builder.construction import BuildResult, construct, writing_engine
from trtopt.builder.request import BuildRequest
from trtopt.certification.certificate import Certificate, certify, samples_for
from trtopt.certification.placing import NO_LAYERS, Place
from trtopt.certification.request import SAMPLES, CertifyRequest
from trtopt.core.documents import Damaged, Described, converted, read_json
from trtopt.core.errors import AccuracyLost, OutputError, TrtoptError
from trtopt.core.files import cache_folder, folder_beside, sha256_json, write_json
from trtopt.core.options import without
from trtopt.core.values import BuildSpec, Precision, Profile, ShapeRange
from trtopt.core.words import named
from trtopt.cuda.device import probe
from trtopt.engine.manifest import Manifest, described_spec, load_manifest, manifest_path
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.timing import time_in_turns
from trtopt.graph.io import load_model
from trtopt.graph.passes.expand import expandable
from trtopt.runtime.session import Session
from trtopt.trt.capabilities import precisions

ROUNDS = 3  # of cures, each at the place where the nearest engine so far fails
_LEVELS = (2, 0)
Cure = Mapping[str, Any]  # options of build


@dataclass(frozen=True)
class Trial(Described):
    """One build.

    Attributes:
        cure: the options that it had besides those asked for, as `build` takes them; empty: none.
        right: whether it is; None: it couldn't be built. said: what fails worst and where, or why it wasn't built.
        gpu_ms: GPU time at the profiles' opt shapes, in turns with the first; None: not right, or no GPU.
        seconds: of building and certifying.
    """

    cure: str
    right: bool | None
    said: str
    seconds: float
    gpu_ms: float | None = None

    def __str__(self) -> str:
        time_said = f", {self.gpu_ms:.3f} ms" if self.gpu_ms is not None else ""
        verdict = {
            True: f"right{time_said}",
            False: f"not right: {self.said}{time_said}",
            None: f"not built: {self.said}",
        }
        return f"{self.cure or 'as asked'}: {verdict[self.right]} ({self.seconds:.0f} s)"


@dataclass(frozen=True)
class _Attempt:
    """A build with its certificate."""

    cure: Cure
    result: BuildResult
    certificate: Certificate
    seconds: float

    @property
    def manifest(self) -> Manifest:
        manifest = load_manifest(self.result.engine)
        assert manifest is not None  # the builder has just written it
        return manifest

    def trial(self) -> Trial:
        failed, place = self.certificate.failed, self.certificate.place
        said = f"{failed[0].name}, {decibels(failed[0].worst_db)} at {failed[0].output}" if failed else ""
        said += f", {place}" if place is not None else ""
        return Trial(_text(self.cure), self.certificate.ok, said, round(self.seconds, 1))


def _text(cure: Cure) -> str:
    return " ".join(named(name, value) for name, value in cure.items())


def certifying(request: BuildRequest) -> dict[str, Any]:
    """Return what `certify` is given of a build's request."""
    names = ("images", "data", "preprocess", "plugins", "operators", "reporter")
    few = min(request.limit or SAMPLES, SAMPLES)
    return {name: getattr(request, name) for name in names} | {"limit": few}


def healed(request: BuildRequest, build: Callable[[BuildRequest], BuildResult]) -> BuildResult:
    """Build and certify; where the engine isn't right, build it with cures and keep the fastest that is.

    Args:
        build: makes the first engine, as asked.

    Raises:
        AccuracyLost: no engine is right; nothing was written.
    """
    with folder_beside(Path(request.output)) as folder:
        ward = _Ward(request, folder)
        first = ward.attempt({}, build)
        right = [first] if first.certificate.ok else ward.cured(first)
        if not right:
            tried = "; ".join(map(str, ward.trials))
            raise AccuracyLost(
                f"no engine of {request.output} is right. Nothing was written; tried: {tried}. Build it without `heal=True`, "
                "and trtopt certify --bundle writes what a report of it needs"
            )
        times = ward.times([first, *(item for item in right if item is not first)])
        best = min(right, key=lambda item: times.get(_text(item.cure), 0.0))  # without times the first one
        for at, trial in enumerate(ward.trials):
            ward.trials[at] = replace(trial, gpu_ms=times.get(trial.cure))
        if best is not first:
            request.reporter.note(f"healed by {_text(best.cure)}, as tried with {best.certificate.ran}")
        return ward.installed(best)


class _Ward:
    """Builds of one request, each in a folder of its own."""

    def __init__(self, request: BuildRequest, folder: Path) -> None:
        self.request, self.folder, self.trials = request, folder, list[Trial]()
        self.model, self.given = load_model(request.model).proto, certifying(request)

    def attempt(self, cure: Cure, build: Callable[[BuildRequest], BuildResult]) -> _Attempt:
        own, start = self.folder / str(len(list(self.folder.iterdir()))), time.monotonic()
        own.mkdir()
        place: dict[str, Any] = {"output": own / Path(self.request.output).name, "save_onnx": own / "graph.onnx"}
        result = build(replace(self.request, **cure, **place, heal=False, store="none"))
        certificate = certify(self.model, result.engine, locate=not cure, **self.given)
        found = _Attempt(cure, result, certificate, time.monotonic() - start)
        self.trials.append(found.trial())
        return found

    def cured(self, first: _Attempt) -> list[_Attempt]:
        """Return the engines that are right."""
        nearest, self.request = first, _as_built(self.request, first)
        for _ in range(ROUNDS):
            place, graph = nearest.certificate.place, load_model(str(nearest.result.onnx), lazy=True).proto
            pattern, attempts = _pattern(place, graph, nearest.manifest), list[_Attempt]()
            known = _known(pattern)
            for cure in sorted(cures(self.request, nearest, place, graph), key=lambda cure: [*cure] != known):
                try:
                    attempts.append(self.attempt({**nearest.cure, **cure}, construct))
                except TrtoptError as error:
                    self.trials.append(Trial(_text(cure), None, " ".join(str(error).split())[:200], 0.0))
                    continue
                if attempts[-1].certificate.ok:
                    with contextlib.suppress(OutputError):
                        write_json(_kept(pattern), [*cure])
                    if known == [*cure] or not probe():  # which of several is the fastest can't be told
                        break
            if right := [item for item in attempts if item.certificate.ok]:
                return right
            if not attempts:
                return []
            # Of equal ones the one that changed most: values that aren't finite are as far off whatever else is mended.
            nearest = max(
                reversed(attempts),
                key=lambda item: (item.certificate.failed[0].slack, len(item.cure.get("precision_override", ()))),
            )
            located = certify(self.model, nearest.result.engine, locate=True, **self.given)
            nearest = replace(nearest, certificate=located)
        return []

    def times(self, attempts: list[_Attempt]) -> dict[str, float]:
        """Return GPU milliseconds by cure, measured in turns; nothing without a GPU, or of one engine."""
        if not probe() or len(attempts) < 2:
            return {}
        asked = CertifyRequest(self.model, attempts[0].result.engine, **self.given)
        few, _ = samples_for(asked, load_model(self.model), attempts[0].manifest)
        with contextlib.ExitStack() as stack:
            sessions = {
                _text(item.cure): stack.enter_context(Session(item.result.engine, contexts=1)) for item in attempts
            }
            measured = time_in_turns(sessions, few)[0]
        return {cure: sum(item.gpu_ms for item in times) for cure, times in measured.items()}

    def installed(self, best: _Attempt) -> BuildResult:
        """Move an engine, its manifest and, if it is to be kept, its graph to the output."""
        output, keep = Path(self.request.output), self.request.save_onnx
        graph = load_model(str(best.result.onnx)).proto if keep else None
        with writing_engine(self.request, best.manifest, graph) as plan:
            os.replace(best.result.engine, plan)
        return replace(
            best.result,
            engine=output,
            manifest=manifest_path(output),
            onnx=Path(keep) if keep else None,
            certificate=best.certificate.describe(),
            healing=tuple(self.trials),
        )


def _as_built(request: BuildRequest, attempt: _Attempt) -> BuildRequest:
    """Return the request of an engine's precision and scales, without what has chosen them."""
    spec, table = described_spec(attempt.manifest.spec), attempt.result.table
    kinds: dict[str, Any] = {str(item): item in precisions(spec) for item in Precision if item is not Precision.FP32}
    kinds["fp16"] &= not spec.precision.quantized  # which has FP16 beside it
    request = replace(without(request, "best", "certify", "min_agreement", "labels", "metric", "min"), **kinds)
    if table is None:
        return request
    return replace(without(request, "images", "data", "min_snr", "method", "save_calib"), calib=table)


def cures(request: BuildRequest, attempt: _Attempt, place: Place | None, graph: Any) -> Iterator[Cure]:
    """Yield what to try on an engine that fails at a place, the cheapest for the engine first."""
    spec, names = described_spec(attempt.manifest.spec), ("mark_output", "write_out", "precision_override")
    marked, parts, overrides = (attempt.cure.get(name, getattr(request, name)) for name in names)
    engine_itself, outputs = bool(probe()), {value.name for value in graph.graph.output}
    for level in _LEVELS if engine_itself else ():  # in ONNX Runtime its graph is the same
        if level != spec.optimization_level:
            yield {"optimization_level": level}
    if engine_itself and place is not None and place.tensor not in outputs:
        yield {"mark_output": [*marked, place.tensor]}
    if place is not None and expandable(graph, [place.op]):
        yield {"write_out": [*parts, place.op]}
    if place is not None and spec.precision is not Precision.FP32:
        for nodes in _near(place, graph):
            texts = [f"{glob.escape(name)}={Precision.FP32}" for name in nodes]
            yield {"precision_override": [*overrides, *texts]}
    if engine_itself and spec.precision is Precision.FP32 and spec.tf32:
        yield {"tf32": False}
    if engine_itself and any(item.min != item.max for profile in spec.profiles for item in profile.values()):
        yield {"shapes": [";".join(f"{name}:{item}" for name, item in part.items()) for part in _split(spec)]}


def _near(place: Place, graph: Any) -> Iterator[list[str]]:
    """Yield the node of a place; it with its neighbours; and with theirs."""
    weights, names = {item.name for item in graph.graph.initializer}, {place.node}
    tensors = {node.name: {*node.input, *node.output} - weights for node in graph.graph.node}
    layers = [node.name for node in graph.graph.node if node.op_type not in NO_LAYERS]
    before = list[str]()
    for _ in range(3):
        if (found := [name for name in layers if name in names]) != before:
            yield (before := found)
        near = set[str]().union(*(tensors[name] for name in names))
        names |= {name for name, own in tensors.items() if own & near}


def _split(spec: BuildSpec) -> Iterator[Profile]:
    """Yield three profiles in place of each: its least shapes, up to what it is tuned for, and beyond."""
    for profile in spec.profiles:
        yield {name: ShapeRange(item.min, item.min, item.min) for name, item in profile.items()}
        yield {name: ShapeRange(item.min, item.opt, item.opt) for name, item in profile.items()}
        yield {name: ShapeRange(item.opt, item.max, item.max) for name, item in profile.items()}


# What has healed ------------------------------------------------------------------------------------------------------------


def _pattern(place: Place | None, graph: Any, manifest: Manifest) -> list[Any]:
    """Return what other networks have in common with a place: relation, operators around it, precision, TensorRT."""
    nodes = {name: node for node in graph.graph.node for name in node.output}
    made = nodes.get(place.tensor) if place is not None else None
    before = [nodes[name].op_type for name in made.input if name in nodes] if made is not None else []
    behind = sorted(node.op_type for node in graph.graph.node if place is not None and place.tensor in node.input)
    version = re.match(r"\d+\.\d+", manifest.generation["version"])
    whose = [manifest.generation["family"], version and version[0], manifest.spec["precision"]]
    return [*whose, place and [place.relation, place.op, place.vanishes], before, behind]


def _kept(pattern: list[Any]) -> Path:
    return cache_folder("cures") / f"{sha256_json(pattern)}.json"


def _known(pattern: list[Any]) -> list[str] | None:
    """Return the names of the options that healed this pattern before."""
    with contextlib.suppress(Damaged, OutputError):  # damaged or not there
        return converted(read_json(_kept(pattern)), list[str])
    return None
