"""The command line: one command per public function, with its names and defaults. Parse, call, print."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import typer
from typer.core import TyperCommand, TyperGroup

from trtopt.core import stopping
from trtopt.core.errors import BuildCancelled, TrtoptError
from trtopt.core.library_output import TELEMETRY_OFF
from trtopt.core.native_output import keep_apart, lines
from trtopt.core.terminal import escaped, own_lines, styled, visible

if TYPE_CHECKING:
    from trtopt.core.progress import Reporter


class _Anywhere(TyperGroup):
    """`-v` may stand after the command, too, where people type it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        moved = [text for text in args[:end] if text in ("-v", "--verbose")]
        return super().parse_args(ctx, moved[:1] + [text for text in args[:end] if text not in moved] + args[end:])


app = typer.Typer(
    name="trtopt",
    cls=_Anywhere,
    help="PyTorch or ONNX to a verified INT8/FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.",
    epilog="Start with: trtopt build model.onnx --int8 --images photos/ --preprocess imagenet -o model.engine",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rendering it with rich takes longer than starting Python
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX model.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]
Images = Annotated[Path | None, typer.Option("--images", metavar="DIR", help="Folder of real images.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="F.npz|DIR", help="Arrays: one per input name, first axis = samples."),
]
Preprocess = Annotated[
    str | None,
    typer.Option("--preprocess", metavar="PRESET|FILE.toml", help="imagenet, efficientnet-lite, yolo, or a file."),
]
Method = Annotated[str, typer.Option("--method", help="auto, entropy, mse, minmax or percentile.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Use at most so many samples.")]
Batch = Annotated[int, typer.Option("--batch", help="Samples at a time; the result doesn't depend on it.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; default: one per core.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--precision-override", metavar="PATTERN=PRECISION", help="By node name or operator; repeatable."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        metavar="NAME:MIN,OPT,MAX[;…]",
        help="Range of an input's shape, e.g. x:1x3x224x224,8x3x224x224,32x3x224x224; of several inputs 'a:…;b:…', or "
        "--shapes again. The same input again begins another profile.",
    ),
]
Target = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="smNN[,smNN]", help="Compute capabilities to build for (TensorRT-RTX)."),
]
Backend = Annotated[str, typer.Option("--backend", help="auto, tensorrt or rtx.")]
OutputKind = Annotated[
    list[str] | None,
    typer.Option(
        "--output-kind",
        metavar="NAME=KIND",
        help="What an output is: classes, embedding, boxes, mask, tokens or other; default: a guess. Repeatable.",
    ),
]


_IMAGE_OPTIONS: dict[str, Any] = {
    "size": Annotated[
        str | None, typer.Option("--size", metavar="HxW", help="Height and width of the images; default: the model's.")
    ],
    "resize": Annotated[str | None, typer.Option("--resize", help="stretch, crop or letterbox.")],
    "channels": Annotated[str | None, typer.Option("--channels", help="rgb, bgr or gray.")],
    "scale": Annotated[str | None, typer.Option("--scale", help="Factor on pixels (0 to 255), such as 1/255.")],
    "mean": Annotated[
        str | None,
        typer.Option("--mean", help="After the scale: a number, or one per channel, in the order of --channels."),
    ],
    "std": Annotated[
        str | None,
        typer.Option("--std", help="After the mean: a number, or one per channel, in the order of --channels."),
    ],
}


def _prepares_images(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `preprocess` the options that change single keys of it; it gets all of them as one."""

    @functools.wraps(command)
    def prepared(*, preprocess: str | None, **given: Any) -> None:
        changes = {name: _image_option(name, text) for name in _IMAGE_OPTIONS if (text := given.pop(name)) is not None}
        start = {} if preprocess is None else {"preset": preprocess}
        command(preprocess={**start, **changes} if changes else preprocess, **given)

    plain = signature(command, eval_str=True)
    parameters = list(plain.parameters.values())
    place = 1 + list(plain.parameters).index("preprocess")
    parameters[place:place] = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=option)
        for name, option in _IMAGE_OPTIONS.items()
    ]
    prepared.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
    prepared.__annotations__ = {item.name: item.annotation for item in parameters}  # typer reads both
    return prepared


def _image_option(name: str, text: str) -> Any:
    from trtopt.core.errors import UsageError

    try:
        if name == "size":
            sides = [int(side) for side in text.lower().split("x")]
            return sides if len(sides) > 1 else sides * 2
        if name in ("mean", "std"):
            return [float(number) for number in text.split(",")]
    except ValueError:
        example = (
            "480x640, height first" if name == "size" else "0.5, or one number per channel such as 0.485,0.456,0.406"
        )
        raise UsageError(f"--{name} {text!r} can't be read; write {example}") from None
    return text


class _Result(Protocol):
    def to_json(self) -> dict[str, Any]: ...


def _reporter(json_output: bool) -> Reporter:
    from trtopt.core.progress import reporter

    return reporter(sys.stderr)


def _show(result: _Result, as_json: bool, text: Callable[[], None]) -> None:
    if as_json:
        print(json.dumps(result.to_json(), default=str))
    else:
        with own_lines(sys.stdout):
            text()


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*map(visible, columns), title=visible(title), title_justify="left", show_edge=False)
    for row in rows:
        table.add_row(*map(visible, row))
    console = Console(file=styled(sys.stdout), highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a log has no width of its own: don't cut names short
    console.print(table)


def _print_version(asked: bool) -> None:
    if asked:
        from trtopt.core.version import __version__

        print(f"trtopt {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print trtopt's version (more: version)."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("-v", "--verbose", help="Show the libraries' own messages, and tracebacks; after a command, too."),
    ] = False,
) -> None:
    if verbose:
        os.environ["TRTOPT_DEBUG"] = "1"  # processes that this one starts see it, too


@app.command(epilog="Example: trtopt export torchvision:resnet50 -o resnet50.onnx")
@_prepares_images
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="torchvision:NAME, FILE.py:CLASS or module:factory (in this folder or installed), or a recipe."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.")],
    opset: Annotated[
        int | None, typer.Option("--opset", help="ONNX opset; default: what every generation reads.")
    ] = None,
    for_generation: Annotated[
        str | None, typer.Option("--for-generation", help="tensorrt8, tensorrt10, tensorrt11 or rtx: its newest opset.")
    ] = None,
    weights: Annotated[Path | None, typer.Option("--weights", help="A state dict (weights only).")] = None,
    factory_arg: Annotated[
        list[str] | None,
        typer.Option("--factory-arg", metavar="NAME=VALUE", help="An argument of the class or factory; repeatable."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs",
            metavar="NAME:batchx3x224x224",
            help="Shape of an input, names where dynamic, :int64 after it if so; repeatable.",
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None, typer.Option("--dynamic", metavar="NAME:AXIS=DIM[,…]", help="More dynamic axes; repeatable.")
    ] = None,
    input_names: Annotated[
        list[str] | None, typer.Option("--input-names", metavar="NAME[,NAME]", help="In forward's order; repeatable.")
    ] = None,
    output_names: Annotated[
        list[str] | None, typer.Option("--output-names", metavar="NAME[,NAME]", help="In order; repeatable.")
    ] = None,
    sample: Annotated[
        Path | None, typer.Option("--sample", help="Real inputs to compare on: .npz, .npy, images.")
    ] = None,
    preprocess: Preprocess = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Largest relative difference.")] = 1e-3,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with PyTorch.")] = True,
    json_output: Json = False,
) -> None:
    """Export a PyTorch model to ONNX and compare both on the same inputs."""
    import trtopt
    from trtopt.frontend.exporter import parse_input
    from trtopt.frontend.factories import parse_argument

    result = trtopt.export(
        source,
        output,
        opset=opset,
        for_generation=for_generation,
        weights=weights,
        factory_arg=dict(map(parse_argument, factory_arg)) if factory_arg else None,
        inputs=[parse_input(item) for item in inputs] if inputs else None,
        dynamic=dict(map(_dynamic_axes, dynamic)) if dynamic else None,
        input_names=_listed(",".join(input_names)) if input_names else None,
        output_names=_listed(",".join(output_names)) if output_names else None,
        sample=sample,
        preprocess=preprocess,
        tolerance=tolerance,
        verify=verify,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        print(f"{result.path}: opset {result.opset}, weights {result.weights}")
        for item in result.comparisons:
            print(
                f"  {', '.join([f'batch {item.batch}', *(f'{name} {size}' for name, size in item.sizes.items())])}: "
                f"largest difference {item.absolute:.3g} ({item.relative:.2g} of the largest output)"
            )
        if not result.verified:
            print("  not compared with PyTorch")

    _show(result, json_output, text)


def _dynamic_axes(text: str) -> tuple[str, dict[int, str]]:
    from trtopt.core.errors import UsageError

    name, colon, axes = text.rpartition(":")
    pairs = [pair.partition("=") for pair in axes.split(",")]
    if not colon or not name or not all(axis.strip().isdigit() and dim for axis, _, dim in pairs):
        raise UsageError(f"--dynamic {text!r} can't be read; write NAME:0=batch,2=height,3=width")
    return name, {int(axis): dim for axis, _, dim in pairs}


@app.command(epilog="Example: trtopt check model.onnx --fix clean.onnx")
def check(
    model: Model,
    fix: Annotated[Path | None, typer.Option("--fix", metavar="OUT", help="Write the folded, cleaned model.")] = None,
    backend: Backend = "auto",
    target: Target = None,
    shapes: Shapes = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="List the nodes and what --int8 makes of each, by the names of overrides.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Check an ONNX model: validity, operators the installed parser refuses, precision hazards."""
    import trtopt

    report = trtopt.check(
        model,
        fix=fix,
        backend=backend,
        target=target or (),
        shapes=shapes or (),
        nodes=nodes,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        if nodes:
            listing = [(item.name, item.op, item.shape, item.precision, item.reason) for item in report.nodes]
            _table(f"{model}, folded", ("node", "operator", "shape", "--int8", "why"), listing)
        rows = [(item.level, item.code, item.node or "", item.op or "", _sentence(item)) for item in report.findings]
        if rows:
            _table(str(model), ("level", "code", "node", "operator", "finding"), rows)
        for line in report.summary_lines:
            print(line)

    _show(report, json_output, text)
    if not report.ok:
        raise typer.Exit(1)


def _sentence(finding: Any) -> str:
    return f"{finding.message}{f' → {finding.hint}' if finding.hint else ''}"


@app.command(epilog="Example: trtopt calibrate model.onnx --images photos/ --preprocess imagenet -o model.calib.json")
@_prepares_images
def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="The table to write (*.calib.json).")],
    images: Images = None,
    data: Data = None,
    calib: Annotated[
        Path | None,
        typer.Option("--calib", metavar="T.calib.json", help="Choose again from an earlier table; no data."),
    ] = None,
    preprocess: Preprocess = None,
    method: Method = "auto",
    limit: Limit = None,
    batch: Batch = 8,
    threads: Threads = None,
    precision_override: Overrides = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Reuse an earlier pass over the same data.")] = True,
    import_cache: Annotated[
        Path | None,
        typer.Option(
            "--import-cache", metavar="OLD.cache", help="Take the scales of a TensorRT 7 to 10 cache; no data."
        ),
    ] = None,
    export_cache: Annotated[
        Path | None,
        typer.Option("--export-cache", metavar="OUT.cache", help="Write a cache for TensorRT 8.6 and 10 too."),
    ] = None,
    missing: Annotated[
        str, typer.Option("--missing", help="What an imported cache lacks: error, or float (stays out of INT8).")
    ] = "error",
    device: Annotated[
        str, typer.Option("--device", help="cpu, or cuda: run and count on the GPU, through PyTorch.")
    ] = "cpu",
    allow_unusual_data: Annotated[
        bool, typer.Option("--allow-unusual-data", help="Take noise, plain or repeated samples, refused otherwise.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Measure INT8 scales on real inputs: one pass, any batch size, the same table."""
    import trtopt

    result = trtopt.calibrate(
        model,
        output,
        images=images,
        data=data,
        preprocess=preprocess,
        calib=calib,
        method=method,
        limit=limit,
        batch=batch,
        threads=threads,
        precision_override=precision_override or (),
        cache=cache,
        import_cache=import_cache,
        export_cache=export_cache,
        missing=missing,
        device=device,
        allow_unusual_data=allow_unusual_data,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        taken: dict[str, int] = {}
        for entry in result.table.tensors.values():
            taken[entry.method] = taken.get(entry.method, 0) + 1
        methods = ", ".join(f"{count} {name}" for name, count in sorted(taken.items()))
        origin = f"{result.samples} samples"
        if result.coverage is not None:
            _table(str(import_cache), (result.coverage.header, "count", "names"), result.coverage.rows())
            origin = str(import_cache)
        print(f"{output}: {len(result.table.tensors)} tensors ({methods}) from {origin}")
        if result.convergence and not any(result.convergence in note for note in result.notes):
            print(f"  {result.convergence}")
        if result.exported is not None:
            print(f"{result.exported.path}: {result.exported.tensors} tensors, {result.exported.others} further names")
        if result.skipped:
            print(f"  {len(result.skipped)} files skipped, with the reasons above")

    _show(result, json_output, text)


@app.command(
    epilog="Example: trtopt build model.onnx --int8 --images photos/ --preprocess imagenet -o model.engine; on a GPU, "
    "--best instead of --int8 keeps the faster of INT8 and FP16"
)
@_prepares_images
def build(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="The engine to write; its manifest lies beside it.")],
    fp16: Annotated[bool, typer.Option("--fp16", help="FP16.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="BF16 (with --int8: the rest in BF16).")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="INT8, the rest in FP16.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="FP8, the rest in FP16.")] = False,
    best: Annotated[
        bool,
        typer.Option("--best", help="Time INT8 (or --fp8) and FP16 on this GPU; keep the fastest within the limits."),
    ] = False,
    min_agreement: Annotated[
        float, typer.Option("--min-agreement", help="Limit of --best: share of FP32's classes, tokens, pixels.")
    ] = 0.95,
    min_snr: Annotated[
        float | None,
        typer.Option("--min-snr", metavar="DB", help="Limit of --best; default: 20 for embeddings, boxes, others."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="On a GPU, build for FP16 too and say how INT8 compares.")
    ] = True,
    images: Images = None,
    data: Data = None,
    calib: Annotated[
        Path | None,
        typer.Option("--calib", metavar="T.calib.json", help="A table from trtopt calibrate, or a TensorRT cache."),
    ] = None,
    preprocess: Preprocess = None,
    method: Method = "auto",
    limit: Limit = None,
    batch: Batch = 8,
    calibrator: Annotated[
        str, typer.Option("--calibrator", help="trtopt, or native (TensorRT 8.6 and 10).")
    ] = "trtopt",
    precision_override: Overrides = None,
    fp32_io: Annotated[bool, typer.Option("--fp32-io/--no-fp32-io", help="Keep inputs and outputs FP32.")] = True,
    shapes: Shapes = None,
    target: Target = None,
    backend: Backend = "auto",
    workspace: Annotated[str | None, typer.Option("--workspace", metavar="2GiB", help="Most scratch memory.")] = None,
    optimization_level: Annotated[int | None, typer.Option("--optimization-level", help="0 (fast build) to 5.")] = None,
    timing_cache: Annotated[Path | None, typer.Option("--timing-cache", help="Read and update this file.")] = None,
    hardware_compatibility: Annotated[
        str, typer.Option("--hardware-compatibility", help="none, ampere_plus or same_compute_capability.")
    ] = "none",
    version_compatible: Annotated[bool, typer.Option("--version-compatible", help="Runs on later versions.")] = False,
    exclude_lean_runtime: Annotated[bool, typer.Option("--exclude-lean-runtime", help="Leave it out.")] = False,
    strip: Annotated[bool, typer.Option("--strip", help="Leave the weights out of the plan.")] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Let weights be replaced later.")] = False,
    sparsity: Annotated[bool, typer.Option("--sparsity", help="Use 2:4 sparse kernels where weights allow.")] = False,
    tf32: Annotated[bool, typer.Option("--tf32/--no-tf32", help="Let FP32 layers use TF32.")] = True,
    allow_precision_fallback: Annotated[
        bool, typer.Option("--allow-precision-fallback", help="Accept an engine that lost the precision asked for.")
    ] = False,
    save_onnx: Annotated[
        Path | None, typer.Option("--save-onnx", metavar="OUT", help="Keep the graph TensorRT got.")
    ] = None,
    save_cache: Annotated[
        Path | None, typer.Option("--save-cache", metavar="OUT", help="Keep the native calibrator's cache.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option("--classes", metavar="FILE", help="Class names for the manifest, one a line; or imagenet."),
    ] = None,
    output_kind: OutputKind = None,
    force: Annotated[bool, typer.Option("--force", help="Build even if the engine is up to date.")] = False,
    json_output: Json = False,
) -> None:
    """Build a TensorRT engine and say what it really runs."""
    import trtopt

    result = trtopt.build(
        model,
        output,
        fp16=fp16,
        bf16=bf16,
        int8=int8,
        fp8=fp8,
        best=best,
        min_agreement=min_agreement,
        min_snr=min_snr,
        compare=compare,
        images=images,
        data=data,
        calib=calib,
        preprocess=preprocess,
        method=method,
        limit=limit,
        batch=batch,
        calibrator=calibrator,
        precision_override=precision_override or (),
        fp32_io=fp32_io,
        shapes=shapes or (),
        target=target or (),
        backend=backend,
        workspace=workspace,
        optimization_level=optimization_level,
        timing_cache=timing_cache,
        hardware_compatibility=hardware_compatibility,
        version_compatible=version_compatible,
        exclude_lean_runtime=exclude_lean_runtime,
        strip=strip,
        refit=refit,
        sparsity=sparsity,
        tf32=tf32,
        allow_precision_fallback=allow_precision_fallback,
        save_onnx=save_onnx,
        save_cache=save_cache,
        classes=classes,
        output_kind=output_kind or (),
        force=force,
        reporter=_reporter(json_output),
    )

    from trtopt.engine.manifest import arithmetic

    def text() -> None:
        print(f"{result.engine}: {result.truth}")
        if line := arithmetic(result.coverage):
            print(f"  {line}")
        print(f"  {'up to date' if result.cached else f'{result.seconds:.1f} s'}; manifest {result.manifest}")
        if result.onnx and (int8 or fp8):
            print(
                f"  graph {result.onnx}; ONNX Runtime by itself takes it with GraphOptimizationLevel.ORT_ENABLE_BASIC"
            )
        if result.comparison:
            print(f"  {result.comparison['why']}")
        if result.not_measured:
            print(f"  not measured against {'BF16' if bf16 else 'FP16'}: {result.not_measured}")

    _show(result, json_output, text)


@app.command(epilog="Example: trtopt inspect model.engine")
def inspect(
    engine: Annotated[Path, typer.Argument(metavar="MODEL.engine", help="A TensorRT plan, or an ONNX file.")],
    json_output: Json = False,
) -> None:
    """Say what an engine file is and what it runs, or what an ONNX file holds."""
    import trtopt
    from trtopt.engine.manifest import arithmetic

    report = trtopt.inspect(engine)

    def model() -> None:
        assert isinstance(report, trtopt.ModelReport)
        quantized = ", quantized (Q/DQ)" if report.quantized else ""
        print(f"{report.model}: ONNX, opset {report.opset}, {report.nbytes:,} bytes{quantized}")
        print(f"  {report.parameters:,} parameters, {report.weights:,} bytes")
        for item in report.inputs:
            print(f"  input {item.name}: {item.dtype} {item.dims}")
        for item in report.outputs:
            print(f"  output {item.name}: {item.dtype} {item.dims}, {report.output_kinds[item.name]}")
        counts = ", ".join(f"{count} {name}" for name, count in report.operators.items())
        print(f"  {sum(report.operators.values())} nodes: {counts}")
        print(f"  trtopt check {report.model} says what TensorRT makes of it")

    def text() -> None:
        assert isinstance(report, trtopt.EngineReport)
        print(f"{report.engine}: {report.maker}, {report.nbytes / 2**20:.1f} MiB")
        print(f"  {report.truth}")
        if (manifest := report.manifest) is not None:
            if line := arithmetic(manifest.coverage):
                print(f"  {line}")
            targets = ", ".join(manifest.targets) or manifest.generation["gpu"] or "?"
            print(f"  for {targets}; asked for {manifest.spec['precision']}; built in {manifest.seconds:.1f} s")
            for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
                for tensor in tensors:
                    shape = "x".join(map(str, tensor["shape"]))
                    holds = (manifest.output_kinds or {}).get(tensor["name"]) if kind == "output" else None
                    print(f"  {kind} {tensor['name']}: {tensor['dtype']} {shape}{f', {holds}' if holds else ''}")
            for number, profile in enumerate(manifest.profiles):
                print(f"  profile {number}: {'; '.join(f'{name}:{shape}' for name, shape in profile.items())}")
            if manifest.calibration:
                samples = manifest.calibration["samples"]
                print(f"  calibrated: {manifest.calibration['method']}{f', {samples} samples' if samples else ''}")
            if manifest.comparison:
                print(f"  {manifest.comparison['why']} on {manifest.comparison['gpu']}")
        for note in report.notes:
            print(f"  note: {note}")

    _show(report, json_output, model if isinstance(report, trtopt.ModelReport) else text)


@app.command(epilog="Example: trtopt verify model.onnx model.int8.onnx --images photos/ --preprocess imagenet")
@_prepares_images
def verify(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE.onnx", help="Usually the FP32 model.")],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE.onnx", help="Usually what build --save-onnx wrote.")],
    images: Images = None,
    data: Data = None,
    preprocess: Preprocess = None,
    limit: Limit = None,
    batch: Batch = 8,
    threads: Threads = None,
    output_kind: OutputKind = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            "--min-agreement", metavar="SHARE", help="Least share of classes, tokens, pixels; default: not judged."
        ),
    ] = None,
    min_snr: Annotated[
        float | None, typer.Option("--min-snr", metavar="DB", help="Least dB of each output; default: not judged.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Compare two ONNX models on the same real inputs, each output by its kind, in ONNX Runtime.

    With --min-agreement or --min-snr it judges as build --best does (0.95 and 20 dB unless given); exit status 1 if a limit
    is missed.
    """
    import trtopt
    from trtopt.data import open_data
    from trtopt.evaluation.verify import check_graphs
    from trtopt.graph.io import load_model

    check_graphs(reference, candidate)
    batches = open_data(
        load_model(reference, lazy=True).inputs,
        images=images,
        data=data,
        preprocess=preprocess,
        limit=limit,
        batch=batch,
    )
    agreement = trtopt.verify(
        reference,
        candidate,
        batches,
        threads=threads,
        output_kind=output_kind or (),
        min_agreement=min_agreement,
        min_snr=min_snr,
    )
    print(json.dumps(agreement.describe()) if json_output else agreement)
    if not agreement.ok:
        raise typer.Exit(1)


@app.command(epilog="Example: trtopt pipeline efficientnet-lite0 --output out --target sm89")
def pipeline(
    recipe: Annotated[str, typer.Argument(help="A model recipe: its name, or a file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for everything it makes.")],
    precision: Annotated[str, typer.Option("--precision", help="int8, fp8, fp16, bf16 or fp32.")] = "int8",
    method: Method = "auto",
    target: Target = None,
    backend: Backend = "auto",
    json_output: Json = False,
) -> None:
    """Run every stage of a recipe: export, check, calibrate, build, verify. What is up to date isn't done again."""
    import trtopt

    result = trtopt.pipeline(
        recipe,
        output,
        precision=precision,
        method=method,
        target=target or (),
        backend=backend,
        reporter=_reporter(json_output),
    )

    _show(result, json_output, lambda: print(*str(result).split("\n"), sep="\n"))


@app.command(epilog="Example: trtopt bench model.engine --batch 1,8,32 --against onnxruntime")
@_prepares_images
def bench(
    engine: Annotated[Path, typer.Argument(metavar="M.engine", help="A TensorRT plan.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="NAME[,NAME]", help="torch, onnxruntime, polygraphy.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N[,N]", help="Samples at a time; default: what it is tuned for.")
    ] = None,
    streams: Annotated[int, typer.Option("--streams", help="Threads calling at once, for the throughput.")] = 1,
    iterations: Annotated[int, typer.Option("--iterations", help="Calls of each kind.")] = 200,
    warmup: Annotated[int, typer.Option("--warmup", help="Calls before, not counted.")] = 20,
    data: Data = None,
    images: Images = None,
    preprocess: Preprocess = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="M.onnx", help="For ONNX Runtime; default: the engine's source.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="For PyTorch: torchvision:NAME, module:factory, or a recipe.")
    ] = None,
    backend: Backend = "auto",
    device: Annotated[int, typer.Option("--device", help="The GPU's number.")] = 0,
    json_output: Json = False,
) -> None:
    """Measure an engine: GPU and host time, end to end, throughput, memory; beside other ways of running the model."""
    import trtopt

    result = trtopt.bench(
        engine,
        against=_listed(against),
        batch=_numbers(batch, "--batch"),
        streams=streams,
        iterations=iterations,
        warmup=warmup,
        data=data,
        images=images,
        preprocess=preprocess,
        model=model,
        source=source,
        backend=backend,
        device=device,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        columns, rows = result.table()
        _table(str(engine), columns, rows)
        print(*result.remarks(), sep="\n")

    _show(result, json_output, text)


class _ValuesInARow(TyperCommand):
    """`--images a.jpg b.jpg`, as a shell's `*.jpg` gives them: typer takes one value after each option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for number, text in enumerate(args):
            if text.startswith("-"):
                option = text if text in ("--images", "--input") and number else ""
            elif option and spread[-1] != option:
                spread.append(option)
            spread.append(text)
        return super().parse_args(ctx, spread)


@app.command(cls=_ValuesInARow, epilog="Example: trtopt run model.engine --images photos/")
@_prepares_images
def run(
    engine: Annotated[Path, typer.Argument(metavar="M.engine", help="A TensorRT plan, or (onnxruntime) an ONNX file.")],
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[NAME=]x.npy|x.npz", help="Arrays, in an .npz by input name; repeatable."),
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--images", metavar="DIR|FILE…", help="Images, prepared as at calibration.")
    ] = None,
    preprocess: Preprocess = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write NAME.npy, or predictions.json.")
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many of the best classes to show.")] = 5,
    backend: Annotated[
        str, typer.Option("--backend", help="auto, tensorrt, rtx; onnxruntime: the kept graph, on the CPU.")
    ] = "auto",
    device: Annotated[int, typer.Option("--device", help="The GPU's number.")] = 0,
    json_output: Json = False,
) -> None:
    """Run an engine on arrays or images. Exit status 1 if an image couldn't be used."""
    import trtopt

    result = trtopt.run(
        engine,
        input=input,
        images=images,
        preprocess=preprocess,
        output=output,
        top=top,
        backend=backend,
        device=device,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        for item in result.outputs:
            bounds = "empty" if item.minimum is None else f"{item.minimum:.6g} to {item.maximum:.6g}"
            odd = f", {item.not_finite} values not finite" if item.not_finite else ""
            print(f"{item.name}: {item.dtype} {'x'.join(map(str, item.shape)) or 'scalar'}, {bounds}{odd}")
        if result.ranked:
            rows = [(item.sample, ", ".join(f"{best}" for best in item.predictions)) for item in result.ranked]
            _table(str(engine), ("image" if result.images else "sample", f"best {top}"), rows)
        print(f"{result.backend}, {result.timing}")
        for path in result.files:
            print(f"  {path}")
        for skipped in result.skipped:
            print(f"not run: {skipped.name}: {skipped.reason}")

    _show(result, json_output, text)
    if not result.ok:
        raise typer.Exit(1)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    from trtopt.core.errors import UsageError

    parts = _listed(text)
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{option} {text!r} can't be read; write numbers such as 1,8,32")
    return tuple(map(int, parts))


jobs = typer.Typer(
    help="Calibrate many models on many data sets, in shards, on all cores or a Ray cluster; resumable.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(jobs, name="jobs")


class _RayAlone(TyperCommand):
    """`--ray` without an address means auto; typer has no options whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in reversed([number for number, text in enumerate(args) if text == "--ray"]):
            if place + 1 == len(args) or args[place + 1].startswith("-"):
                args.insert(place + 1, "auto")
        return super().parse_args(ctx, args)


@jobs.command("run", cls=_RayAlone, epilog="Example: trtopt jobs run jobs.toml")
def run_jobs(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.toml", help="The job list.")],
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="Holds what is done; default: JOBS.state.")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes; default: one per core.")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Samples that a worker runs at a time; default: cores / workers.")
    ] = None,
    shard: Annotated[
        int | None, typer.Option("--shard", help="Samples in one piece of work; the result doesn't depend on it.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="[ADDRESS|auto|local]", help="Run the shards on a Ray cluster; alone: auto."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Run a job list; run it again to go on where it was stopped. Exit status 1 if a job failed."""
    import trtopt

    result = trtopt.run_jobs(
        jobs,
        state=state,
        workers=workers,
        threads=threads,
        shard=shard,
        ray=ray,
        reporter=_reporter(json_output),
    )

    def text() -> None:
        rows = [(job.name, job.state + (" before" if job.cached else ""), job.outcome) for job in result.jobs]
        _table(str(jobs), ("job", "state", "result"), rows)
        print(f"{result.summary}; state in {result.state}")

    _show(result, json_output, text)
    if not result.ok:
        raise typer.Exit(1)


@jobs.command("show", epilog="Example: trtopt jobs show jobs.state")
def show_jobs(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The state folder of a job list.")],
    json_output: Json = False,
) -> None:
    """Say what a state folder holds: each job's state and result. A run may be at work on it."""
    import trtopt

    result = trtopt.show_jobs(state)

    def text() -> None:
        _table(str(state), ("job", "state", "result"), [(job.name, job.state, job.outcome) for job in result.jobs])
        print(result.summary)

    _show(result, json_output, text)


@app.command(epilog="Example: trtopt version --json")
def version(json_output: Json = False) -> None:
    """Versions of trtopt, Python, the TensorRT generations, the GPU and the libraries."""
    import trtopt
    from trtopt.core.version import to_install

    report = trtopt.version()

    def text() -> None:
        print(f"trtopt {report.trtopt}, Python {report.python}, {report.platform}")
        print(f"GPU: {report.gpu}")
        if not report.generations:
            print(f"TensorRT: none installed (TensorRT-RTX builds without a GPU: {to_install('rtx')})")
        for item in report.generations:
            print(f"{item['product']} {item['version']}: {'builds here' if item['can_build'] else item['why_not']}")
        for name, number in report.libraries.items():
            print(f"{name}: {number or 'not installed'}")
        print(
            f"C extension: {'built' if report.extension else 'not built: install trtopt where there is a C compiler'}"
        )

    _show(report, json_output, text)


def main() -> NoReturn:
    """Run a command; an error is one clear message on stderr and a non-zero exit status, never a traceback."""
    keep_apart()
    os.environ.setdefault(TELEMETRY_OFF, "1")  # for the user's own modules, too
    with escaped():
        try:
            status = app(prog_name="trtopt", standalone_mode=False)
            sys.stdout.flush()
        except Exception as error:
            status = _failure(error)
        except KeyboardInterrupt:
            status = 130
        status = stopping.status() or status
        if status == 130 or stopping.status():
            print("stopped", file=sys.stderr)
        _tell_of_native_lines(bool(status))
    try:
        sys.stdout.flush()
    except (TrtoptError, OSError):  # said before; and not to be tried once more at the exit
        sys.stdout, status = io.StringIO(), status or 1
    sys.exit(status if isinstance(status, int) else 0)


def _tell_of_native_lines(failed: bool) -> None:
    """What native libraries printed: their internals, which may still explain a failure."""
    debug = bool(os.environ.get("TRTOPT_DEBUG"))
    if not failed and not debug:
        return
    found = lines()
    if debug:
        print(*(f"native: {line}" for line in found), sep="\n", end="\n" if found else "", file=sys.stderr)
    elif found:
        print(f"native libraries printed {len(found)} lines of their own: trtopt -v shows them", file=sys.stderr)


def _failure(error: Exception) -> int:
    if os.environ.get("TRTOPT_DEBUG"):
        import traceback

        traceback.print_exc()
    if stopping.status() and not isinstance(error, BuildCancelled):
        return 1  # what became of the interruption
    if isinstance(error, TrtoptError):
        kind, message, status = type(error).__name__, str(error), error.exit_code
    elif type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]  # `trtopt` alone: the help
        return 2
    elif hasattr(error, "format_message"):  # click's own, which typer carries under another name from 0.20 on
        context = getattr(error, "ctx", None)
        kind, status = "UsageError", 2
        message = f"{error.format_message().rstrip('.')}; try '{context.command_path if context else 'trtopt'} -h'"
    else:
        kind, status = "InternalError", 70
        message = f"internal error, please report it: {type(error).__name__}: {error} (trtopt -v shows where)"
    said = error.lines if isinstance(error, TrtoptError) else [message]
    print("error:", "\n".join(map(visible, said)), file=sys.stderr)
    if "--json" in sys.argv:
        with contextlib.suppress(TrtoptError, OSError):
            print(json.dumps({"error": {"type": kind, "message": message}}))
    return status


if __name__ == "__main__":
    main()
