"""pipeline(): every stage of a model recipe, chained; a stage whose inputs haven't changed isn't run again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trtopt.builder.construction import BuildResult, construct
from trtopt.builder.request import BuildRequest
from trtopt.certification.certificate import certify
from trtopt.core.documents import Damaged, checked, converted, plain, read_json
from trtopt.core.errors import BackendError, EngineError, InvalidModel, TrtoptError, UsageError
from trtopt.core.files import check_writable, existing_file, made_folder, sha256_file, sha256_json, write_json
from trtopt.core.options import preprocess_words, taking
from trtopt.core.progress import recorded
from trtopt.core.values import COMPUTED, Precision, choice
from trtopt.core.version import MAKER, package_version
from trtopt.core.words import first_of
from trtopt.cuda.device import probe
from trtopt.data import open_data
from trtopt.data.preprocess import Preprocess
from trtopt.data.samples import write_crops
from trtopt.diagnosis import report as reports
from trtopt.diagnosis.results import Compared
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.evaluation.limits import MIN_SNR, Limits, not_finite
from trtopt.evaluation.verify import verify
from trtopt.frontend.exporter import export
from trtopt.graph.io import load_model
from trtopt.graph.prepare import holds_scales
from trtopt.linting.checker import check
from trtopt.recipes.loader import load_recipe
from trtopt.recipes.request import PipelineRequest
from trtopt.runtime.session import Session

COMPARED = 64  # samples
_PRECISION = re.compile(r"`(fp16|bf16|int8|fp8)=True`")  # as build takes it
CALIBRATION = "calibration"  # folder for a recipe's images, in the output folder


@dataclass(frozen=True)
class PipelineResult:
    """Result of the stages.

    Attributes:
        agreement: the quantized graph against the model (`Agreement.figures()`) on the recipe's labelled images, or, where
            the recipe has limits, on what it was calibrated on (`compared_on`); None: on neither.
        timing: the engine's times on this machine's GPU (`Timing.describe()`), or None with the reason in `not_run`.
        limits: the recipe's own; None: it has none, and what is outside the usual ones is only told.
        samples: what was calibrated on, as options of `build`.
        reference: what the agreement is with, the "FP32 model" or, where it has scales of its own, the "quantized model".
    """

    name: str
    files: Mapping[str, Path]
    sizes: Mapping[str, int]
    build: BuildResult
    agreement: Mapping[str, Any] | None
    timing: Mapping[str, Any] | None
    not_run: str
    skipped: tuple[str, ...]
    limits: Limits | None = None
    compared_on: str = ""
    samples: Mapping[str, Any] = field(default_factory=dict)
    reference: str = "FP32 model"

    @property
    def missed(self) -> list[str]:
        """List what of the agreement is outside the limits."""
        return [] if self.agreement is None else (self.limits or Limits()).missed(self.agreement)

    @property
    def ok(self) -> bool:
        """Nothing is outside the recipe's own limits, all values are finite, and the engine is right, where that was asked."""
        return self.build.ok and not (
            self.missed if self.limits is not None else self.agreement and not_finite(self.agreement)
        )

    def to_json(self) -> dict[str, Any]:
        names = ("name", "files", "sizes", "agreement", "timing", "not_run", "compared_on", "reference")
        found = {name: plain(getattr(self, name)) for name in names}
        return {**found, "build": self.build.to_json(), "missed": self.missed, "up_to_date": list(self.skipped)}

    def __str__(self) -> str:
        lines = [
            f"{self.name} for {', '.join(self.build.targets) or 'this GPU'}: {self.build.precision_summary}",
            f"size: {self.reference} {self.sizes['ONNX'] / 1e6:.1f} MB, engine {self.sizes['engine'] / 1e6:.1f} MB",
        ]
        if (agreement := self.agreement) is not None:
            limits = self.limits or Limits()
            line = f"agreement with the {self.reference} on {agreement['samples']} {self.compared_on}: "
            if agreement["top1_agreement"] is None:
                least = MIN_SNR if limits.min_snr is None else limits.min_snr
                line += f"{float(agreement['snr_db']):.1f} dB (limit {least:g})"
            else:  # dB don't judge classes
                line += f"same class for {agreement['top1_agreement']:.0%} (limit {limits.min_agreement:.0%}), "
                line += f"{float(agreement['snr_db']):.1f} dB"
            old, new = agreement["reference_accuracy"], agreement["candidate_accuracy"]
            if old and new:
                line += f"; top-1 {old['top1']:.0%} → {new['top1']:.0%}"
            lines.append(line)
            lines += [f"outside the limit: {text}" for text in self.missed]
        if (certificate := self.build.certificate) is not None:
            failed = [f"{item['name']} ({item['output']})" for item in certificate["failed"]]
            lines.append(
                f"certify: {f'NOT RIGHT: {first_of(failed)}' if failed else 'all holds'}; {certificate['ran']}"
            )
        not_run = f"the engine was not run here: {self.not_run}"
        lines.append(not_run if self.timing is None else f"on this GPU: {json.dumps(self.timing)}")
        lines += [f"  {what:<12}{path}" for what, path in self.files.items()]
        if self.skipped:
            lines.append(f"already up to date: {', '.join(self.skipped)}")
        return "\n".join([*lines, f"next: {self._next()}"])

    def _next(self) -> str:
        """Return the line to type next: an engine within the limits, else what is known of this one."""
        engine, model = self.files["engine"], str(self.files["ONNX"])
        half = next((f"--{name}" for name in ("bf16", "fp16") if self.build.precision.get(name)), None)
        words = list[str]()
        if self.missed and self.limits is not None and "calibration" in self.files:
            limits = {"--min-snr": self.limits.min_snr, "--min-agreement": self.limits.min_agreement}
            flags = [word for name, value in limits.items() if value is not None for word in (name, f"{value:g}")]
            words = ["tune", model, "--calib", str(self.files["calibration"]), *self._data(), *flags]
        elif self.missed and self.limits is not None and self.samples and half:  # which show what it loses
            words = ["build", model, half, *self._data()]
        if words:
            targets = [word for target in self.build.targets for word in ("--target", target)]
            words += ["-o", str(engine.with_suffix(f".{words[0]}{engine.suffix}")), *targets]
        elif "calibration" in self.files:
            without_gpu = ["--backend", "onnxruntime"] if self.timing is None else []
            words = ["run", str(engine), *self._data()[:2], *without_gpu]
        else:  # it doesn't know how its images are prepared
            words = ["inspect", str(engine)]
        return shlex.join(["trtopt", *words])

    def _data(self) -> list[str]:
        """The samples as flags of `tune`."""
        if "data" in self.samples:
            return ["--data", str(self.samples["data"])]
        return ["--images", str(self.samples["images"]), *preprocess_words(self.samples["preprocess"])]


class _Ledger:
    """A record of the stages, with what each made from what: `pipeline.json` in the output folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.skipped = folder / "pipeline.json", list[str]()
        self.entries = dict[str, Any]()
        with suppress(Damaged):  # absent or damaged: everything is done again
            self.entries = converted(read_json(self.path), dict[str, Any])

    def run(
        self, stage: str, key: Mapping[str, Any], files: Sequence[Path], work: Callable[[], Any], kind: Any = Any
    ) -> Any:
        """Do `work` unless it was done for the same key and its files are still what it wrote; return its JSON result.

        Args:
            kind: of the result: another, in an entry that was changed, isn't taken.
        """
        digest = sha256_json({"key": key, "trtopt": MAKER})
        with suppress(Damaged, LookupError, TypeError, OSError):
            entry = self.entries[stage]
            if entry["key"] == digest and entry["files"] == _digests(files):
                result = checked(entry["result"], kind)
                self.skipped.append(stage)
                return result
        result = work()
        self.entries[stage] = {"key": digest, "files": _digests(files), "result": result}
        write_json(self.path, self.entries)
        return result


def _digests(files: Sequence[Path]) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in files}


@taking(PipelineRequest)
def pipeline(request: PipelineRequest) -> PipelineResult:
    """Run a recipe's stages into the folder `output`: export, check, calibrate, build, verify, and time where there is a GPU.

    `PipelineRequest` describes the arguments: the recipe is a name or a file, `images` or `data` replace its own samples, and
    `report` writes a page of all that this call knows (see `trtopt.report`). A stage whose inputs haven't changed isn't run
    again.

    Raises:
        TrtoptError: whatever a stage raises; what earlier stages made stays and isn't made again.
    """
    if request.report is not None:
        reports.ready()
    with recorded(request.reporter, request.log) as reporter:
        result = _Stages(replace(request, reporter=reporter)).run()
    if request.report is None:
        return result
    reports.report(result.files["engine"], request.report, results=[result], reporter=request.reporter)
    return replace(result, files={**result.files, "report": Path(request.report)})


class _Stages:
    """The stages of a recipe, one after another, each on what those before it made."""

    def __init__(self, request: PipelineRequest) -> None:
        """Resolve what a request names; what can't be right is refused before any stage runs."""
        self.request, self.reporter = request, request.reporter
        self.recipe = recipe = load_recipe(request.recipe)
        asked = request.precision or recipe.precision or "int8"
        place = "`precision=`" if request.precision else f"the recipe {recipe.path}: precision"
        self.precision = Precision(choice(asked, COMPUTED, place))
        recipe.labelled_files()  # the last stage's: what they lack is said before the first
        if request.images is not None and request.data is not None:
            raise UsageError("`images=` and `data=`: give one of the two")
        if recipe.preprocess is not None:
            Preprocess.load(recipe.preprocess)  # with arrays, too, beside which it has no effect
        has_scales = recipe.onnx is not None and holds_scales(
            load_model(existing_file(recipe.onnx, "the recipe's model"), lazy=True)
        )
        self.calibrates = self.precision.quantized and not has_scales
        if request.method != "auto" and not self.calibrates:
            why = "holds its scales already" if has_scales else f"is built in {self.precision.upper()}"
            raise UsageError(f"`method=` is how scales are chosen, and {recipe.name} {why}: drop it")
        named = request.images or request.data or recipe.images or recipe.data or recipe.calibration
        if self.calibrates and not named:
            raise UsageError(
                f"the recipe {recipe.name} names nothing to calibrate on: give `images=DIR` or `data=F.npz`, or a precision "
                "that needs none, `precision='fp16'`"
            )
        self.reference = "quantized model" if has_scales else "FP32 model"
        self.limits = Limits.of(recipe.min_agreement, recipe.min_snr)
        self.folder = made_folder(request.output)
        self.ledger = _Ledger(self.folder)

    def run(self) -> PipelineResult:
        request, recipe, ledger, folder = self.request, self.recipe, self.ledger, self.folder
        exported, clean, table_file = (
            folder / f"{recipe.name}.{ending}" for ending in ("exported.onnx", "onnx", "calib.json")
        )
        engine, graph = (folder / f"{recipe.name}.{self.precision}.{ending}" for ending in ("engine", "onnx"))
        made = (exported, clean, table_file, engine, manifest_path(engine), graph)
        for path in (*made, ledger.path, request.report):
            if path is not None:
                check_writable(path)
        if not ledger.path.exists() and (others := [path.name for path in made if path.exists()]):
            raise UsageError(
                f"{folder} has {first_of(others)}, which no pipeline wrote there and this one would replace: give another "
                "folder as `output=`, or move it away"
            )
        write_json(ledger.path, ledger.entries)  # from here on the folder is the pipeline's own
        files = {"ONNX": clean, "engine": engine, "graph": graph}
        original = self._exported(exported)
        ledger.run("check", {"model": sha256_file(original)}, [clean], lambda: self._checked(original, clean))
        samples = self._samples()
        result = self._built(files, samples)
        files["manifest"] = result.manifest
        if (table := result.table) is not None:
            files["calibration"] = table_file
            ledger.run("table", {"digest": table.digest}, [table_file], lambda: table.save(table_file))
        photos = recipe.labelled_files()
        real_samples = {"images": list(photos), "preprocess": recipe.preprocess} if photos else samples
        judged_on = "samples of those it was calibrated on" if self.calibrates else "samples"
        compared_on, agreement = "labelled photos" if photos else judged_on if self.limits else "", None
        if compared_on and real_samples:
            agreement = self._agreement(original, real_samples, bool(photos), files)
        if request.certify:
            found = certify(original, engine, **real_samples, reporter=self.reporter)
            result = replace(result, certificate=found.describe())
        timing, not_run = _timed(real_samples, clean, engine, request.backend)
        return PipelineResult(
            name=recipe.name,
            files=files,
            sizes={what: path.stat().st_size for what, path in files.items()},
            build=result,
            agreement=agreement,
            timing=timing,
            not_run=not_run,
            skipped=tuple(ledger.skipped),
            limits=self.limits,
            compared_on=compared_on if agreement is not None else "",
            samples=samples,
            reference=self.reference,
        )

    def _exported(self, path: Path) -> Path:
        recipe = self.recipe
        if recipe.onnx is not None:
            return existing_file(recipe.onnx, "the recipe's model")
        key = {
            "recipe": sha256_file(recipe.path),
            "weights": sha256_file(recipe.weights) if recipe.weights else None,
            "torch": package_version("torch"),  # where it isn't, export itself says what to install
        }
        code = recipe.path.parent / recipe.source.rpartition(":")[0]
        if code.suffix == ".py":  # the user's own file
            key["code"] = sha256_file(existing_file(code, "the recipe's Python file"))
        reporter = self.reporter
        self.ledger.run("export", key, [path], lambda: export(str(recipe.path), path, reporter=reporter).to_json())
        return path

    def _checked(self, original: Path, clean: Path) -> Any:
        report = check(original, fix=clean, backend=self.request.backend, reporter=self.reporter)
        if not report.ok:
            errors = [item for item in report.findings if item.level == "error"]
            raise InvalidModel(
                f"{original} has {len(errors)} errors: {'; '.join(item.message for item in errors[:3])}; "
                f"trtopt check {original} lists them"
            )
        return report.to_json()

    def _samples(self) -> dict[str, Any]:
        """Return what to calibrate on, as options of `build`; empty: nothing is known."""
        request, recipe = self.request, self.recipe
        data = request.data or (recipe.data if request.images is None else None)
        if data is not None:
            return {"data": Path(data)}
        images = request.images or recipe.images
        if images is None and recipe.calibration is not None:
            images = self.folder / CALIBRATION
            write_crops(recipe.calibration, images)
        return {} if images is None else {"images": Path(images), "preprocess": recipe.preprocess}

    def _built(self, files: Mapping[str, Path], samples: Mapping[str, Any]) -> BuildResult:
        request, recipe = self.request, self.recipe
        more: dict[str, Any] = {} if self.precision is Precision.FP32 else {str(self.precision): True}
        more |= {**samples, "method": request.method} if self.calibrates else {}
        asked = BuildRequest(
            files["ONNX"],
            files["engine"],
            shapes=[dict(recipe.ranges)] if recipe.ranges else (),
            target=request.target,
            backend=request.backend,
            save_onnx=files["graph"],
            classes=recipe.classes,
            reporter=self.reporter,
            **more,
        )
        try:
            result = construct(asked)
        except TrtoptError as error:
            error.args = (_PRECISION.sub(r"`precision='\1'`", str(error)), *error.args[1:])  # pipeline's own option
            raise
        if result.cached:
            self.ledger.skipped.append("build")
        return result

    def _agreement(
        self, original: Path, samples: Mapping[str, Any], labelled: bool, files: Mapping[str, Path]
    ) -> Mapping[str, Any]:
        """Measure how the graph that the engine was built of agrees with the model as it came."""
        graph, manifest = files["graph"], load_manifest(files["engine"])
        kinds = (manifest.output_kinds if manifest else None) or {}
        most = None if labelled else COMPARED
        batches = open_data(load_model(original, lazy=True).inputs, **samples, batch=4, limit=most)
        labels = [int(path.stem.rpartition("_")[2]) for path in samples["images"]] if labelled else None

        def work() -> Any:
            with self.reporter.phase(f"compare with the {self.reference}"):
                return verify(original, graph, batches, labels=labels, output_kind=kinds).figures()

        key = {
            "model": sha256_file(original),
            "graph": sha256_file(graph),
            "samples": [batches.digests, batches.preparation, labels],
            "kinds": dict(kinds),
        }
        return dict(msgspec.to_builtins(self.ledger.run("verify", key, [], work, Compared)))


def _timed(samples: Mapping[str, Any], clean: Path, engine: Path, backend: str) -> tuple[Mapping[str, Any] | None, str]:
    """The engine's times on this machine's GPU with real samples, or why there are none."""
    gpu = probe()
    if not gpu:
        return None, gpu.reason
    if not samples:
        return None, "the recipe names nothing to run it on"
    try:
        batches = open_data(load_model(clean).inputs, **samples, batch=8)
        with Session(engine, backend=backend) as session:
            return session.time(next(iter(batches))).describe(), ""
    except (BackendError, EngineError) as error:  # TensorRT-RTX refuses some GPUs that TensorRT takes
        return None, str(error)
