"""The commands, one per public function, with its names and defaults: each says the function's result in lines."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trtopt
from trtopt.autotune.request import SensitivityRequest, TiersRequest, TuneRequest
from trtopt.builder.request import BuildRequest, RefitRequest
from trtopt.calibration.request import CalibrateRequest
from trtopt.certification.request import CertifyRequest
from trtopt.cli.application import Options, RayAlone, ValuesInARow, command_group, command_of, print_table
from trtopt.cli.inspection import difference_lines, engine_lines, layer_lines, memory_size
from trtopt.core import stopping
from trtopt.core.library_output import wanted
from trtopt.core.progress import Reporter
from trtopt.core.values import x
from trtopt.core.version import to_install
from trtopt.core.words import counted, first_of
from trtopt.diagnosis.request import DoctorRequest, ProfileRequest, ReportRequest, UpgradeRequest
from trtopt.engine.request import InspectRequest, PruneStoreRequest, StoreRequest, VersionRequest
from trtopt.evaluation.request import BenchRequest, VerifyRequest
from trtopt.frontend.request import ExportRequest, InitRequest
from trtopt.jobs.request import JobsRequest, JobsStateRequest
from trtopt.linting.request import CheckRequest
from trtopt.recipes.request import PipelineRequest
from trtopt.runtime.request import RunRequest
from trtopt.serving.request import DeployRequest, ServeRequest

MOST_KEPT = 20  # nodes that are listed
ROWS = 10  # of tables of layers


@command_of(ExportRequest, "trtopt export torchvision:resnet50 -o resnet50.onnx")
def export(result: Any, values: Options) -> Iterator[str]:
    """Export a PyTorch model to ONNX, and compare the two."""
    yield f"{result.path}: opset {result.opset}, weights {result.weights}"
    for item in result.comparisons:
        sizes = ", ".join([f"batch {item.batch}", *(f"{name} {size}" for name, size in item.sizes.items())])
        yield f"  {sizes}: largest difference {item.absolute:.3g} ({item.relative:.2g} of the largest output)"
    if not result.verified:
        yield "  not compared with PyTorch"


@command_of(InitRequest, "trtopt init my_model.py:Net -o net.toml")
def init(result: Any, values: Options) -> Iterator[str]:
    """Write a recipe for a model of yours; pipeline runs it. What isn't known is "?" in it."""
    yield f"{result.recipe}: written"
    for note in result.notes:
        yield f"  - {note}"
    if result.unknown:
        yield f'  fill in the "?" of {", ".join(result.unknown)}'
    for command in result.commands:
        yield f"next: {command}"


@command_of(CheckRequest, "trtopt check model.onnx --fix clean.onnx")
def check(report: Any, values: Options) -> Iterator[str]:
    """Check an ONNX model: validity, operators, precision hazards."""
    if values["nodes"]:
        listing = [(item.name, item.op, item.shape, item.precision, item.reason) for item in report.nodes]
        print_table(f"{values['model']}, folded", ("node", "operator", "shape", "--int8", "why"), listing)
    folded = 0 if wanted() else sum(item.level == "info" for item in report.findings)
    for item in report.findings[: len(report.findings) - folded]:  # the last of them
        where = " ".join(filter(None, (item.level, item.code, item.node, f"({item.op})" if item.op else "")))
        yield f"{where}: {item.message}"
        if item.hint:
            yield f"  {'note' if item.level == 'info' else 'fix'}: {item.hint}"
    if folded:
        model = shlex.quote(str(values["model"]))
        yield f"{counted(folded, 'info')}: trtopt check {model} -v shows {'them' if folded > 1 else 'it'}"
    yield from report.summary_lines


@command_of(CalibrateRequest, "trtopt calibrate model.onnx --images photos/ --preprocess imagenet -o model.calib.json")
def calibrate(result: Any, values: Options) -> Iterator[str]:
    """Measure INT8 scales on real inputs. One pass; any batch size gives the same table."""
    counts = Counter(entry.method for entry in result.table.tensors.values())
    methods = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    origin = counted(result.samples, "sample")
    if result.coverage is not None:
        origin = str(values["import_cache"])
        print_table(origin, (result.coverage.header, "count", "names"), result.coverage.rows())
    yield f"{values['output']}: {counted(len(result.table.tensors), 'tensor')} ({methods}) from {origin}"
    if result.repairs is not None:
        yield f"  {result.repairs}"
        if count := len(result.table.smoothed):
            yield f"  channels of {counted(count, 'activation')} scaled alike before that, by the weights around"
    if result.exported is not None:
        tensors, others = counted(result.exported.tensors, "tensor"), counted(result.exported.others, "further name")
        yield f"{result.exported.path}: {tensors}, {others}"
    if result.skipped:
        yield f"  {counted(len(result.skipped), 'file')} skipped, with the reasons above"


@command_of(SensitivityRequest, "trtopt sensitivity model.onnx --images photos/ --preprocess imagenet", measures=True)
def sensitivity(result: Any, values: Options) -> Iterator[str]:
    """Say where INT8 loses accuracy. That is the noise of each tensor and each weight, at the outputs."""
    from trtopt.calibration.noise import snr_db

    macs_known = any(item.macs for item in result.sources)
    rows = []
    for item in result.sources[: values["top"] or None]:
        readers = first_of(item.nodes, 2) if item.kind == "activation" else ""
        noise, macs = f"{snr_db(item.noise[result.output]):.1f}", f"{item.macs:.1%}" if macs_known else "?"
        rows.append((item.what, readers, noise, f"{result.share(item):.1%}", macs))
    title = f"{result.model}: noise at {result.output}, {result.samples} samples"
    print_table(title, ("quantized alone", "read by", "dB", "of the noise", "of the arithmetic"), rows)
    if len(rows) < len(result.sources):
        yield f"{len(result.sources) - len(rows)} more: --top 0 prints all"
    yield result.summary[0].upper() + result.summary[1:]
    for name, noise in result.measured.items():
        whole, parts = snr_db(noise), snr_db(result.predicted[name])
        both = f"the whole in INT8 {whole:.1f} dB; the sum of the parts {parts:.1f} dB"
        yield f"{name}: {both if noise else 'INT8 changes nothing in it'}"
    for name, why in result.left_out.items():
        yield f"{name} isn't looked at: {why}"


@command_of(
    BuildRequest,
    "trtopt build model.onnx --int8 --images photos/ --preprocess imagenet -o model.engine; on a GPU, "
    "--best instead of --int8 keeps the faster of INT8 and FP16",
)
def build(result: Any, values: Options) -> Iterator[str]:
    """Build a TensorRT engine and say what it really runs."""
    yield from _built(result, values)


@command_of(
    TuneRequest,
    "trtopt tune model.onnx --images photos/ --preprocess imagenet --min-snr 25 -o model.engine",
    measures=True,
)
def tune(result: Any, values: Options) -> Iterator[str]:
    """Build the fastest INT8 engine within an accuracy limit.

    It repairs weights, and keeps the layers that lose most out of INT8.
    """
    yield from _built(result, {**values, "int8": True})


@command_of(
    TiersRequest, "trtopt tiers model.onnx --images photos/ --preprocess imagenet --limits 20,30 --target sm89 -o tiers"
)
def tiers(result: Any, values: Options) -> Iterator[str]:
    """Build every format, from one calibration. FP32, FP16, BF16, FP8, INT8 and INT4 side by side: speed, size, dB.

    ★: no other beats it in time (without a GPU, size) and dB. Exit status 1 if one of them couldn't be built.
    """
    print_table("", *result.table())
    yield from result.lines()
    if result.page is not None:
        yield f"page: {result.page}"


@command_of(RefitRequest, "trtopt refit model.engine tuned.onnx -o tuned.engine")
def refit(result: Any, values: Options) -> Iterator[str]:
    """Put the weights of a model into an engine.

    It was built with --refit, or with --strip.
    """
    yield f"{result.engine}: {counted(result.weights, 'weight')} put in, in {result.seconds:.1f} s"
    yield f"  the engine {values['engine']} was built in {result.built_seconds:.1f} s"


def _built(result: Any, values: Options) -> Iterator[str]:
    from trtopt.engine.manifest import REASONS, arithmetic

    if (tuning := result.tuning) is not None:
        rows, least = [], values["min_snr"]
        for item in tuning.front:  # of what misses a limit, why, where its dB alone would be within
            why = item.missed[0] if item.missed and least is not None and item.snr_db >= least else "no"
            within = why if item.missed else "yes"
            rows.append((f"{item.share:.1%}", str(item.left_out), f"{item.snr_db:.1f}", item.figure, within))
        headers = ("arithmetic in INT8", "layers out", "dB", "", "within the limits")
        print_table(f"What was tried, on {tuning.samples} samples; cost: {tuning.cost}", headers, rows)
    yield from (f"  {trial}" for trial in result.healing or ())
    counts, *reasons = REASONS.split(result.precision_summary)
    yield f"{result.engine}: {counts}"
    yield from (f"  {line}" for line in (arithmetic(result.coverage), *reasons) if line)
    yield f"  {'up to date' if result.cached else f'{result.seconds:.1f} s'}; manifest {result.manifest}"
    if (certificate := result.certificate) is not None:
        from trtopt.certification.certificate import verdict

        said = verdict(certificate["ok"], certificate["on_gpu"])
        yield f"  {said} in {counted(len(certificate['relations']), 'trial')}: {certificate['ran']}"
    if result.onnx and any(values[name] for name in ("int8", "fp8", "int4")):
        level = "GraphOptimizationLevel.ORT_DISABLE_ALL"
        yield f"  graph {result.onnx}; ONNX Runtime by itself gives its numbers with {level}, where it reads the model's opset"
    if (safety := result.safety) is not None:
        fp32_nodes = list(safety["in_fp32"].items())
        for node, reason in fp32_nodes[:MOST_KEPT]:
            yield f"  FP32: {node}: {reason}"
        if len(fp32_nodes) > MOST_KEPT:
            yield f"  FP32: {len(fp32_nodes) - MOST_KEPT} more nodes, in the manifest"
    if result.comparison:
        yield f"  {result.comparison['why']}"
    if result.not_measured:
        yield f"  not measured against {'BF16' if values['bf16'] else 'FP16'}: {result.not_measured}"


@command_of(InspectRequest, "trtopt inspect model.engine --diff other.engine")
def inspect(report: Any, values: Options) -> Iterator[str]:
    """Say what an engine holds. With --diff: what differs between two engines."""
    if report.difference is not None:
        yield from difference_lines(report.difference)
    else:
        yield from engine_lines(report)
        if values["layers"]:
            yield from layer_lines(report.layers)


@command_of(
    VerifyRequest, "trtopt verify model.onnx model.int8.onnx --images photos/ --preprocess imagenet", measures=True
)
def verify(agreement: Any, values: Options) -> Iterator[str]:
    """Compare two ONNX models, or a model and an engine. Both get the same inputs; each output is judged by its kind.

    With --min-agreement or --min-snr it judges as build --best does (0.95 and 20 dB unless given); exit status 1 if a limit
    is missed, and without limits, too, where the candidate gives NaN or infinity and the reference doesn't.
    """
    if agreement.layers:
        worst = sorted(agreement.layers, key=lambda item: item.felt_snr_db)[:ROWS]
        rows = [(item.what, f"{item.felt_snr_db:.1f}", f"{item.snr_db:.1f}") for item in worst]
        print_table("What loses most by itself", ("layer or scale", "dB of its own", "with all before it"), rows)
    yield from str(agreement).split("\n")


@command_of(CertifyRequest, "trtopt certify model.onnx model.engine --data samples.npz", measures=True)
def certify(certificate: Any, values: Options) -> Iterator[str]:
    """Hold an engine against itself and its model. Equal rows, other batches, orders and contexts, what ran before: a right
    engine gives the same results.

    What differences may be is measured on this very network. Exit status 1 if anything doesn't hold. On a GPU the verdict goes
    into the manifest, for Session(require="certified").
    """
    yield from str(certificate).split("\n")


@command_of(UpgradeRequest, "trtopt upgrade old.results new.results --fail-on wrong,slower=5%")
def upgrade(result: Any, values: Options) -> Iterator[str]:
    """Compare one model's engines of several TensorRTs. What certify --save kept of each: right or not, times, memory,
    precision, and what the new one hasn't. Exit status 1 for what --fail-on names.
    """
    print_table("", result.columns, result.rows)
    yield from result.lines()


@command_of(PipelineRequest, "trtopt pipeline efficientnet-lite0 --output out --target sm89")
def pipeline(result: Any, values: Options) -> Iterator[str]:
    """Run every stage of a recipe, from export to verify. What is up to date isn't done again."""
    yield from str(result).split("\n")


@command_of(BenchRequest, "trtopt bench model.engine --batch 1,8,32 --against onnxruntime", measures=True)
def bench(report: Any, values: Options) -> Iterator[str]:
    """Measure an engine's time, throughput and memory. --against: beside other ways of running the model."""
    print_table(str(values["engine"]), *report.table())
    yield from report.remarks()


@command_of(RunRequest, "trtopt run model.engine --images photos/", cls=ValuesInARow, measures=True)
def run(result: Any, values: Options) -> Iterator[str]:
    """Run an engine on arrays or images. Exit status 1 if an image couldn't be used."""
    for item in result.outputs:
        bounds = "empty" if item.minimum is None else f"{item.minimum:.6g} to {item.maximum:.6g}"
        nonfinite = f", {item.not_finite} values not finite" if item.not_finite else ""
        yield f"{item.name}: {item.dtype} {x(item.shape)}, {bounds}{nonfinite}"
    if result.ranked:
        rows = [(item.sample, ", ".join(map(str, item.predictions))) for item in result.ranked]
        print_table(str(values["engine"]), ("image" if result.images else "sample", f"best {values['top']}"), rows)
        more = max(item.shape[0] for item in result.outputs if item.shape) - len(rows) if result.arrays else 0
        if more > 0:
            yield f"{counted(more, 'more sample')}{'' if result.files else ': -o DIR writes the outputs of all'}"
    yield f"{result.backend}, {result.timing}"
    for path in result.files:
        yield f"  {path}"
    for image in result.skipped:
        yield f"not run: {image.name}: {image.reason}"


jobs = command_group("jobs", "Calibrate and build many models. On all cores and GPUs or a Ray cluster; resumable.")


@command_of(JobsRequest, "trtopt jobs run jobs.toml", group=jobs, name="run", cls=RayAlone)
def run_jobs(result: Any, values: Options) -> Iterator[str]:
    """Run a job list; run it again to go on where it was stopped. Exit status 1 if a job failed."""
    rows = [(job.name, job.status, job.outcome) for job in result.jobs]
    print_table(str(values["jobs"]), ("job", "state", "result"), rows)
    yield f"{result.summary}; state in {result.state}"


@command_of(JobsStateRequest, "trtopt jobs show jobs.state", group=jobs, name="show", judged=False)
def show_jobs(result: Any, values: Options) -> Iterator[str]:
    """Say what a state file holds: each job's state and result. A run may be at work on it."""
    rows = [(job.name, job.state, job.outcome) for job in result.jobs]
    print_table(str(result.state), ("job", "state", "result"), rows)
    yield result.summary


@command_of(ProfileRequest, "trtopt profile model.engine --batch 32", measures=True)
def profile(result: Any, values: Options) -> Iterator[str]:
    """Time each layer of an engine on the GPU, beside the whole."""
    print_table(str(values["engine"]), *result.table(values["top"]))
    yield from result.remarks(values["top"])


@command_of(ReportRequest, "trtopt report model.engine -o report.html")
def report(result: Any, values: Options) -> Iterator[str]:
    """Write one HTML page on an engine. It says what isn't known yet, too, and how to find out."""
    yield f"{result.page}: {result.nbytes / 1e6:.2f} MB; {result.contents['verdict']['line']}"
    engine = Path(values["engine"])
    for item in result.unknown:  # the page may be read anywhere, these lines where the engine was named
        command = item["command"].replace(shlex.quote(engine.name), shlex.quote(str(engine)))
        yield f"  not known: {item['what']}: {command}"


@command_of(DoctorRequest, 'trtopt doctor; trtopt doctor --migrate "trtexec --onnx=model.onnx --fp16"')
def doctor(report: Any, values: Options) -> Iterator[str]:
    """Look for what is wrong with this host. Exit status 1 if anything is."""
    return report.lines  # type: ignore[no-any-return]


deploy = command_group(
    "deploy",
    "Write what a server needs to serve engines. For NVIDIA's Triton Inference Server it is a model repository.",
)


@command_of(DeployRequest, "trtopt deploy triton model.engine --repo models", group=deploy, name="triton")
def deploy_triton(result: Any, values: Options) -> Iterator[str]:
    """Write a model repository for Triton Inference Server: plan, configuration, labels, warm-up."""
    for model in result.models:
        state = f"version {model.version}" if model.changed else f"version {model.version}, up to date"
        none = f"no batches: {model.no_batches}"
        batches = f"batches of up to {model.max_batch_size}" if model.max_batch_size else none
        yield f"{model.path}: {model.backend} backend, {state}; {batches}"
        for note in model.notes:
            yield f"  {note}"
    yield f"trtopt serve {result.repo} serves it here"


store = command_group("store", "List or prune an engine store (trtopt build --store).")


@command_of(StoreRequest, "trtopt store list", group=store, name="list")
def list_store(result: Any, values: Options) -> Iterator[str]:
    """List the engines in a store, the last used first."""
    rows = []
    for item in result.engines:
        size, used = memory_size(item.nbytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(item.used))
        model = Path(item.model).name
        rows.append((item.digest[:12], model, item.precision, item.made_for, item.generation, size, used))
    if rows:
        print_table(result.folder, ("engine", "model", "precision", "for", "TensorRT", "size", "last used"), rows)
    most = memory_size(result.max_size)
    yield f"{result.folder}: {counted(len(rows), 'engine')}, {memory_size(result.nbytes)}; a build leaves at most {most}"


@command_of(PruneStoreRequest, "trtopt store prune --max-size 20GB", group=store, name="prune")
def prune_store(result: Any, values: Options) -> Iterator[str]:
    """Remove the engines that were used longest ago."""
    count = len(result.removed)
    yield f"{result.folder}: {count} removed, {memory_size(result.nbytes)}; {memory_size(result.left)} left"


def _serve(reporter: Reporter, **values: Any) -> Any:
    with trtopt.serve(**values, reporter=reporter) as server, stopping.handed_to(server.send_signal):
        addresses = f"HTTP {server.http}, gRPC {server.grpc}, metrics {server.metrics}"
        reporter.note(f"ready: {addresses}; SIGTERM or Ctrl-C ends it")
        return server.wait()


@command_of(ServeRequest, "trtopt serve models", call=_serve)
def serve(result: Any, values: Options) -> Iterator[str]:
    """Serve a model repository by Triton on this host. SIGTERM or Ctrl-C ends it.

    Exit status: tritonserver's own; 3 if there is none here (the line for docker is printed), 1 if it wasn't ready before it
    ended.
    """
    yield f"tritonserver ended with exit status {result.exit_status}"


@command_of(VersionRequest, "trtopt version --json")
def version(report: Any, values: Options) -> Iterator[str]:
    """Say the versions of trtopt, TensorRT and the libraries."""
    yield f"trtopt {report.trtopt}, Python {report.python}, {report.platform}"
    yield f"GPU: {report.gpu}"
    if not report.generations:
        yield f"TensorRT: none installed (TensorRT-RTX builds without a GPU: {to_install('rtx')})"
    for item in report.generations:
        yield f"{item['product']} {item['version']}: {'builds here' if item['can_build'] else item['why_not']}"
        yield f"  runs {item['reads']}"
    for product, creators in (report.plugins or {}).items():
        yield f"{product} has {len(creators)} plugins"
        for item in creators:
            where = f" of {item.namespace}" * bool(item.namespace) + f", from {item.library}" * bool(item.library)
            yield f"  {item.name} {item.version}{where}: {', '.join(item.fields) or 'no fields'}"
    for name, number in report.libraries.items():
        yield f"{name}: {number or 'not installed'}"
    yield f"C extension: {'built' if report.extension else 'not built: install trtopt where there is a C compiler'}"
