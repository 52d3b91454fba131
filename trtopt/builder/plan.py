"""The plan of a build: all that can be refused before TensorRT is asked, and the scales."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtopt.builder.asked import check_outputs, spec_of, with_profiles
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples
from trtopt.calibration.pruning import Pruned, prune
from trtopt.calibration.scales import Scales
from trtopt.calibration.table import Table
from trtopt.core.documents import plain
from trtopt.core.errors import UsageError
from trtopt.core.files import sha256_file, sha256_json
from trtopt.core.operators import digest, plugins
from trtopt.core.values import BuildSpec, Profile, TensorInfo, x
from trtopt.core.version import MAKER
from trtopt.data import Batches
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import Kind, resolve, stated
from trtopt.graph.passes.int4 import Coded
from trtopt.graph.prepare import holds_scales, prepare, taken, without_scales
from trtopt.graph.proto import custom_nodes, operators_in
from trtopt.linting.refusals import refuse
from trtopt.ort.folding import proven
from trtopt.recipes.loader import check_classes, load_classes
from trtopt.trt import select
from trtopt.trt.generation import Generation


@dataclass(frozen=True)
class BuildPlan:
    """A build that nothing known beforehand speaks against; `with_scales` adds `table` to `embedded`.

    Attributes:
        scales: where they come from; quantized: the model holds its own.
        stated: output → the kind that the user says.
        samples: that say what has to stay in FP32, where the build isn't quantized; which weights go, where it prunes.
        table: the scales; native, cache: for TensorRT's own calibrator, instead.
        beside: the table as such a cache, where the scales are to stand beside the graph (`Scales.beside_graph`).
        preprocessing: as the manifest describes it; embedded: what of it the engine does itself.
        coded: node → INT4 codes that the samples have chosen (`execute`).
        pruned: prunes the model, once, when it is first asked for; None: that isn't wanted.
    """

    request: BuildRequest
    spec: BuildSpec
    model: Model
    generation: Generation
    classes: Sequence[str] | None
    stated: Mapping[str, Kind]
    scales: Scales
    quantized: bool
    samples: Batches | None
    table: Table | None = None
    native: Batches | None = None
    cache: bytes | None = None
    beside: bytes | None = None
    preprocessing: Mapping[str, Any] | None = None
    embedded: Embedded | None = None
    coded: Mapping[str, Coded] = field(default_factory=dict)
    pruned: Callable[[], Pruned] | None = None

    @property
    def in_graph(self) -> Table | None:
        """The table whose scales go into the graph; None: there is none, or they stand beside it."""
        return None if self.spec.calibrator == "native" else self.table

    @property
    def built(self) -> Model:
        """The model that is built: as given, or with its weights pruned."""
        return self.model if self.pruned is None else self.pruned().model

    @property
    def output(self) -> Path:
        return Path(self.request.output)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return str(self.model.path or "the model")

    def engine_interface(self) -> tuple[tuple[TensorInfo, ...], tuple[Profile, ...]]:
        """Return the engine's inputs and profiles, which are the model's unless preprocessing is embedded."""
        inputs, profiles = self.model.inputs, self.spec.profiles
        if self.embedded is None:
            return inputs, profiles
        return self.embedded.inputs(inputs), self.embedded.profiles(profiles)

    def kinds(self, classes: Sequence[str] | None) -> dict[str, str]:
        """Return output name → what it holds."""
        kinds = resolve(self.model.proto, self.model.outputs, self.stated, classes)
        return {name: str(kind) for name, kind in kinds.items()}

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """The parts that a plan depends on, as JSON has it; equal parts mean that a rebuild would give the same engine.

        Not how TensorRT was named, and which file kept its timings.
        """
        device = self.generation.device(self.spec)
        needs_gpu = not self.generation.capabilities.builds_without_gpu
        spec = self.spec.describe()
        for name in ("backend", "timing_cache", "targets"):
            del spec[name]
        parts: dict[str, Any] = {
            "model": self.model.fingerprint,
            "spec": spec,
            "generation": [self.generation.family, self.generation.version],
            "targets": list(self.generation.targets(self.spec)),
            "gpu": str(device) if device and needs_gpu else None,
            "scales": self.table.digest if self.table else None,
            "native": self.native.describe() if self.native else None,
            "cache": hashlib.sha256(self.cache).hexdigest() if self.cache else None,
            "preprocess": self.preprocessing if self.embedded is None else self.embedded.describe(),
            "trtopt": MAKER,
        }
        if custom_nodes(self.model.proto):
            libraries = [sha256_file(path) for path in plugins()]
            parts |= {"operators": digest(operators_in(self.model.proto)), "plugins": libraries}
        if self.samples is not None:
            parts |= {"samples": self.samples.describe(), "limit": self.request.min_snr}
        return dict(plain(parts))

    @property
    def key(self) -> str:
        return sha256_json(self.parts)

    @property
    def store_parts(self) -> dict[str, Any]:
        return {**self.parts, "graph": self.request.save_onnx is not None}


def plan_build(request: BuildRequest, spec: BuildSpec | None = None) -> BuildPlan:
    """Refuse what can't be built, before any long work, as `trtopt.build` does; of `spec`, where that is known already."""
    reporter, spec = request.reporter, spec or spec_of(request)
    check_outputs(request)
    model = load_model(request.model)
    classes = None if request.classes is None else load_classes(request.classes)
    if classes is not None:
        check_classes(classes, model.outputs)
    kinds_stated = stated(request.output_kind, model.outputs)
    sampled, reduced = request.images is not None or request.data is not None, spec.precision.quantized
    anew, generation = reduced and (sampled or request.calib is not None), select(request.backend)
    quantized = without_scales(model) if anew else holds_scales(model)
    generation.refuse(spec)
    if spec.int4 and spec.optimization_level is None and (level := generation.capabilities.int4_level) is not None:
        reporter.note(
            f"at optimization level {level}: at others {generation} ends the process at many products in INT4"
        )
        spec = replace(spec, optimization_level=level)
    generation.compile_operators(model.proto, spec, reporter)
    long_work = (sampled or reduced) and request.calib is None
    # Before it the parser is asked, which passes over what a plugin doesn't read.
    asked = long_work or custom_nodes(model.proto)
    refuse(generation, model, prepare(model, reporter=reporter).proto if asked else None)
    if (given := taken(model)).changes:
        (reporter.note if given.exact else reporter.warn)(str(given))
    scales = Scales(request, request.preprocess)
    scales.check(spec, quantized)
    pruning = spec.sparsity == "prune"
    if not ((reduced and not pruning) or sampled or request.min_snr is None or request.best):
        raise UsageError("`min_snr=` is judged on real samples: add `images=DIR` or `data='F.npz'`")
    if not spec.targets and (targets := generation.targets(spec)):
        reporter.note(f"for {', '.join(f'sm{target}' for target in targets)} (`target=` chooses)")
    preprocess = None if request.preprocess is None else Preprocess.load(request.preprocess)
    spec = with_profiles(spec, model, preprocess, request)
    if preprocess is not None:
        sized_preprocess = preprocess.at_opt(model.inputs, spec.profiles)
        if sized_preprocess.size is not None and preprocess.size is None:
            size = x(sized_preprocess.size)
            reporter.note(f"images are prepared in {size}, the opt size of `shapes=` (`size=` gives another)")
        scales = replace(scales, preprocess=sized_preprocess)
    if spec.embed_preprocess and (preprocess is not None or request.calib is None):  # else the table knows
        Embedded.of(preprocess, model.inputs)
    samples = real_samples(model, request) if sampled and (pruning or not reduced) else None
    plan = BuildPlan(request, spec, model, generation, classes, kinds_stated, scales, quantized, samples)
    return replace(plan, pruned=functools.cache(functools.partial(_pruned, plan))) if pruning else plan


def _pruned(plan: BuildPlan) -> Pruned:
    """Prune the folded model."""
    spec, samples, reporter = plan.spec, plan.samples, plan.request.reporter
    folded = proven(plan.model, samples=samples or (), profiles=spec.profiles, reporter=reporter).proto
    return prune(plan.model, folded, samples, overrides=spec.overrides, reporter=reporter)


def with_scales(plan: BuildPlan) -> BuildPlan:
    """Return the plan with its scales, which are measured where they aren't given, and with how images are prepared."""
    request, spec, scales = plan.request, plan.spec, plan.scales
    model = plan.built if spec.precision.quantized else plan.model
    if spec.embed_preprocess and request.data is not None:  # which is used as it is
        scales = replace(scales, preprocess=None)
    table = scales.table(model, spec, plan.quantized)
    (native, cache), can = scales.native(model, spec), plan.generation.capabilities
    preprocessing, embedded = scales.preprocessing(table, native), None
    if spec.embed_preprocess:
        prepared = request.preprocess if preprocessing is None else preprocessing
        embedded = Embedded.of(None if prepared is None else Preprocess.load(prepared), model.inputs)
        request.reporter.note(
            f"the engine takes {embedded.input!r} as uint8 pixels, samples x height x width x {embedded.preprocess.count}, and "
            f"makes the model's input of them: {embedded}"
        )
    return replace(
        plan,
        table=table,
        native=native,
        cache=cache,
        beside=None if table is None else scales.beside_graph(model, spec, can, table),
        preprocessing=preprocessing,
        embedded=embedded,
    )
