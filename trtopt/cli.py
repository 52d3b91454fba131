"""The command line: one command per public function, with its names and defaults. Parse, call, print."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from inspect import Parameter, Signature
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from trtopt.autotune.request import SensitivityRequest, TuneRequest
from trtopt.builder.request import BuildRequest
from trtopt.calibration.request import CalibrateRequest
from trtopt.core import stopping
from trtopt.core.errors import BuildCancelled, TrtoptError, without_graphs
from trtopt.core.library_output import TELEMETRY_OFF, wanted
from trtopt.core.native_output import keep_apart, lines
from trtopt.core.options import About, about, flag_of, option, options, spoken
from trtopt.core.terminal import escaped, styled, visible
from trtopt.diagnosis.request import DoctorRequest, ProfileRequest, ReportRequest
from trtopt.engine.request import InspectRequest, PruneStoreRequest, SignRequest, StoreRequest
from trtopt.evaluation.request import BenchRequest, VerifyRequest
from trtopt.frontend.request import ExportRequest, InitRequest
from trtopt.jobs.request import JobsRequest
from trtopt.linting.request import CheckRequest
from trtopt.recipes.request import PipelineRequest
from trtopt.runtime.request import RunRequest
from trtopt.serving.request import BundleRequest, DeployRequest, ServeRequest

if TYPE_CHECKING:
    from trtopt.core.progress import Reporter


MOST_KEPT = 20  # nodes that are listed


_EVERYWHERE = ("-v", "--verbose", "-q", "--quiet")


class _Anywhere(TyperGroup):
    """`-v` and `-q` may stand after the command, too, where people type them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        moved = [text for text in args[:end] if text in _EVERYWHERE]
        rest = [text for text in args[:end] if text not in moved]
        return super().parse_args(ctx, [*dict.fromkeys(moved), *rest, *args[end:]])


EXIT_STATUSES = {
    "0": "done",
    "1": "it failed, or what was judged isn't good enough (check, verify, doctor, …)",
    "2": "the command line has to change",
    "3": "no tritonserver here can serve this (serve)",
    "70": "an error of trtopt's own, please report it",
    "130": "Ctrl-C; 129 and 143: SIGHUP and SIGTERM",
}

app = typer.Typer(
    name="trtopt",
    cls=_Anywhere,
    help="PyTorch or ONNX to a verified INT8/FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.",
    epilog="Start with: trtopt build model.onnx --int8 --images photos/ --preprocess imagenet -o model.engine\n\n"
    f"Exit status: {'; '.join(f'{status} {meaning}' for status, meaning in EXIT_STATUSES.items())}.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rendering it with rich takes longer than starting Python
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class _Pixels:
    """Options beside `preprocess`, of which each changes one key."""

    size: str | None = option(
        None, help="Height and width of the images; default: the model's.", metavar="HxW", typed=str
    )
    resize: str | None = option(None, help="stretch, crop or letterbox.", typed=str)
    channels: str | None = option(None, help="rgb, bgr or gray.", typed=str)
    scale: str | None = option(None, help="Factor on pixels (0 to 255), such as 1/255.", typed=str)
    mean: str | None = option(
        None, help="After the scale: a number, or one per channel, in the order of --channels.", typed=str
    )
    std: str | None = option(
        None, help="After the mean: a number, or one per channel, in the order of --channels.", typed=str
    )


ROWS = 10  # of tables of layers
NARROW = 60  # columns of a terminal below which a row of a table is written line by line
SHORT, ROOM = 12, 10  # characters of what isn't broken in tables; what another column needs, its gap too
_Options = Mapping[str, Any]
_FLAGS: dict[str, str] = {}  # of every option of every command
_STATE = SimpleNamespace(quiet=False)  # of the command that runs
_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]


def _command(
    request: type[Any],
    epilog: str,
    *,
    call: Callable[[_Options, Reporter], Any] | None = None,
    group: typer.Typer | None = None,
    name: str | None = None,
    cls: type[TyperCommand] | None = None,
    plain: Callable[[Any], Any] = methodcaller("to_json"),
    judged: bool = True,
) -> Callable[[Callable[[Any, _Options], Iterator[str]]], None]:
    """Make a command of what says a result in lines: its docstring is the help, the options are a request's and --json.

    Args:
        call: gives the result; default: the public function of the same name, with the options as keywords.
        plain: the result as JSON.
        judged: exit status 1 where the result has an `ok` that is False.
    """
    entries = options(request)
    shown: dict[str, tuple[Field[Any], About]] = {}
    for field_name, entry in entries.items():
        if entry[1].help:
            shown |= {field_name: entry} | (options(_Pixels) if field_name == "preprocess" else {})
    several = [field_name for field_name, entry in shown.items() if _repeats(*entry)]
    parameters = [_parameter(*entry) for entry in shown.values()]
    parameters.append(Parameter("json_output", Parameter.KEYWORD_ONLY, default=False, annotation=_JSON))

    def made(text: Callable[[Any, _Options], Iterator[str]]) -> None:
        @functools.wraps(text)
        def typed(*, json_output: bool, **values: Any) -> None:
            import trtopt

            values |= {field_name: () for field_name in several if not values[field_name]}
            if "preprocess" in values:
                values["preprocess"] = _prepared(values)
            if call is not None:
                result = call(values, _reporter())
            else:
                reporter = {"reporter": _reporter()} if "reporter" in entries else {}
                result = getattr(trtopt, text.__name__)(**values, **reporter)
            if json_output:
                print(json.dumps(_told(plain(result)), default=str))
            else:
                for line in text(result, values):
                    print(visible(_told(line)))
            if judged and not getattr(result, "ok", True):
                raise typer.Exit(1)

        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {item.name: item.annotation for item in parameters}  # typer reads both
        (group or app).command(name, cls=cls, epilog=f"Example: {epilog}")(typed)

    return made


def _repeats(item: Field[Any], about: About) -> bool:
    return item.default == () and about.typed is None


def _parameter(item: Field[Any], about: About) -> Parameter:
    """What typer makes a command's option or argument of."""
    required = about.needed or item.default is MISSING
    kind: Any = list[str] if _repeats(item, about) else about.typed or type(item.default)
    absent = item.default is None or item.default == ()  # None, for typer
    annotation: Any = kind | None if absent and not required else kind
    metavar = about.metavar or about.unit.upper() or None
    if about.positional or (required and not about.short):
        described = typer.Argument(metavar=metavar, help=about.help)
    else:
        flags = [about.short] if about.short else []
        flags.append(flag_of(item))
        _FLAGS[item.name] = "/".join(flags)
        described = typer.Option(*flags, metavar=metavar, help=about.help)
    default = Parameter.empty if required else None if absent else item.default
    return Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, described])


def _prepared(values: dict[str, Any]) -> Any:
    """`preprocess` with the options that change single keys of it, which are taken out of `values`."""
    preset = values["preprocess"]
    changes = {name: _image_option(name, text) for name in options(_Pixels) if (text := values.pop(name)) is not None}
    return {**({} if preset is None else {"preset": preset}), **changes} if changes else preset


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


def _reporter() -> Reporter:
    from trtopt.core.progress import reporter

    return reporter(sys.stderr, _FLAGS, quiet=_STATE.quiet)


def _told(value: Any) -> Any:
    """A result's texts, at whatever depth, with flags for the options that they name."""
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    return spoken(value, _FLAGS) if isinstance(value, str) else value


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 200) -> None:
    """Print a table.

    Args:
        width: in columns, where the output is no terminal; what is longer is continued on the next line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=styled(sys.stdout), highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = width  # a log has no width of its own: don't cut names short
    names = [visible(name) for name in columns]
    cells = [[visible(_told(cell)) for cell in row] for row in rows]
    if console.is_terminal and console.width < NARROW:  # columns of a few letters can't be read
        print(visible(title))
        for row in cells:
            print("\n".join(["", *(f"{name}: {cell}" if name else cell for name, cell in zip(names, row) if cell)]))
        return
    whole = _whole(names, cells, console.width)
    table = Table(title=visible(title), title_justify="left", show_edge=False)
    if whole.close:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for number, name in enumerate(names):
        kept = number in whole.columns
        table.add_column(name.replace(" ", "\n") if kept and whole.high else name, overflow="fold", no_wrap=kept)
    for row in cells:
        table.add_row(*row)
    console.print(table)


@dataclass(frozen=True)
class _Whole:
    """Columns of a table that aren't to be broken; for that, headings may have to be high, and columns close together."""

    columns: frozenset[int] = frozenset()
    high: bool = False
    close: bool = False


def _whole(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> _Whole:
    """Those of figures and other short words, where they leave the others enough room."""
    short = {
        number: max(map(len, cells))
        for number, cells in enumerate(zip(*rows))
        if all(len(cell) <= SHORT and " " not in cell for cell in cells)
    }
    others = ROOM * (len(names) - len(short))
    for gap, high, close in ((3, False, False), (3, True, False), (2, True, True)):
        headings = {
            number: max(map(len, names[number].split() if high else [names[number]]), default=0) for number in short
        }
        if others + sum(max(short[number], headings[number]) + gap for number in short) <= width:
            return _Whole(frozenset(short), high, close)
    return _Whole()


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
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Say results, warnings and errors alone; after a command, too.")
    ] = False,
) -> None:
    _STATE.quiet = quiet
    if verbose:
        os.environ["TRTOPT_DEBUG"] = "1"  # processes that this one starts see it, too


def _export(values: _Options, reporter: Reporter) -> Any:
    import trtopt
    from trtopt.frontend.exporter import parse_input
    from trtopt.frontend.factories import parse_argument

    read: dict[str, Callable[[list[str]], Any]] = {
        "factory_arg": lambda texts: dict(map(parse_argument, texts)),
        "inputs": lambda texts: list(map(parse_input, texts)),
        "dynamic": lambda texts: dict(map(_dynamic_axes, texts)),
        "input_names": lambda texts: _listed(",".join(texts)),
        "output_names": lambda texts: _listed(",".join(texts)),
    }
    parsed = {name: parse(values[name]) if values[name] else None for name, parse in read.items()}
    return trtopt.export(**{**values, **parsed}, reporter=reporter)


def _dynamic_axes(text: str) -> tuple[str, dict[int, str]]:
    from trtopt.core.errors import UsageError

    name, colon, axes = text.rpartition(":")
    pairs = [pair.partition("=") for pair in axes.split(",")]
    if not colon or not name or not all(axis.strip().isdigit() and dim for axis, _, dim in pairs):
        raise UsageError(f"--dynamic {text!r} can't be read; write NAME:0=batch,2=height,3=width")
    return name, {int(axis): dim for axis, _, dim in pairs}


@_command(ExportRequest, "trtopt export torchvision:resnet50 -o resnet50.onnx", call=_export)
def export(result: Any, values: _Options) -> Iterator[str]:
    """Export a PyTorch model to ONNX and compare both on the same inputs."""
    yield f"{result.path}: opset {result.opset}, weights {result.weights}"
    for item in result.comparisons:
        sizes = ", ".join([f"batch {item.batch}", *(f"{name} {size}" for name, size in item.sizes.items())])
        yield f"  {sizes}: largest difference {item.absolute:.3g} ({item.relative:.2g} of the largest output)"
    if not result.verified:
        yield "  not compared with PyTorch"


def _init(values: _Options, reporter: Reporter) -> Any:
    import trtopt
    from trtopt.frontend.exporter import parse_input
    from trtopt.frontend.factories import parse_argument

    arguments = dict(map(parse_argument, values["factory_arg"])) if values["factory_arg"] else None
    inputs = list(map(parse_input, values["inputs"])) if values["inputs"] else None
    return trtopt.init(**{**values, "factory_arg": arguments, "inputs": inputs}, reporter=reporter)


@_command(InitRequest, "trtopt init my_model.py:Net -o net.toml", call=_init)
def init(result: Any, values: _Options) -> Iterator[str]:
    """Write a recipe for a model of yours, with what was guessed and why; pipeline runs it."""
    yield f"{result.recipe}: the file says over each guess what it comes from:"
    for guess in result.guesses:
        yield f"  - {guess}"
    for number, command in enumerate(result.commands):
        yield f"{'or' if number else 'next'}: {command}"


@_command(CheckRequest, "trtopt check model.onnx --fix clean.onnx")
def check(report: Any, values: _Options) -> Iterator[str]:
    """Check an ONNX model: validity, operators the installed parser refuses, precision hazards."""
    if values["nodes"]:
        listing = [(item.name, item.op, item.shape, item.precision, item.reason) for item in report.nodes]
        _table(f"{values['model']}, folded", ("node", "operator", "shape", "--int8", "why"), listing)
    rows = [
        (item.level, item.code, item.node or "", item.op or "", " → ".join(filter(None, (item.message, item.hint))))
        for item in report.findings
    ]
    if rows:
        _table(str(values["model"]), ("level", "code", "node", "operator", "finding"), rows)
    yield from report.summary_lines


@_command(CalibrateRequest, "trtopt calibrate model.onnx --images photos/ --preprocess imagenet -o model.calib.json")
def calibrate(result: Any, values: _Options) -> Iterator[str]:
    """Measure INT8 scales on real inputs: one pass, any batch size, the same table."""
    counts = Counter(entry.method for entry in result.table.tensors.values())
    methods = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    origin = f"{result.samples} samples"
    if result.coverage is not None:
        origin = str(values["import_cache"])
        _table(origin, (result.coverage.header, "count", "names"), result.coverage.rows())
    yield f"{values['output']}: {len(result.table.tensors)} tensors ({methods}) from {origin}"
    if result.convergence and not any(result.convergence in note for note in result.notes):
        yield f"  {result.convergence}"
    if result.repairs is not None:
        yield f"  {result.repairs}"
        if count := len(result.table.smoothed):
            yield f"  channels of {count} activation{'s' * (count > 1)} scaled alike before that, by the weights around"
    if result.exported is not None:
        yield f"{result.exported.path}: {result.exported.tensors} tensors, {result.exported.others} further names"
    if result.skipped:
        yield f"  {len(result.skipped)} files skipped, with the reasons above"


@_command(SensitivityRequest, "trtopt sensitivity model.onnx --images photos/ --preprocess imagenet")
def sensitivity(result: Any, values: _Options) -> Iterator[str]:
    """Say where INT8 loses accuracy: the noise of each tensor and each weight, at the outputs."""
    from trtopt.calibration.noise import snr_db

    rows = [
        (
            item.what,
            ", ".join(item.nodes[:2]) + (", …" if len(item.nodes) > 2 else "") if item.kind == "activation" else "",
            f"{snr_db(item.noise[result.output]):.1f}",
            f"{result.share(item):.1%}",
            f"{item.macs:.1%}",
            *([] if item.ms is None else [f"{item.ms:.4f}"]),
        )
        for item in result.sources[: values["top"] or None]
    ]
    title = f"{result.model}: noise at {result.output}, {result.samples} samples"
    columns = (
        "quantized alone",
        "read by",
        "dB",
        "of the noise",
        "of the arithmetic",
        *(["ms"] if result.timed else []),
    )
    _table(title, columns, rows)
    if result.timed:
        yield f"ms: of the layers that read it, in {result.timed}"
    if len(rows) < len(result.sources):
        yield f"{len(result.sources) - len(rows)} more: --top 0 prints all"
    yield result.summary[0].upper() + result.summary[1:]
    for name, noise in result.measured.items():
        yield f"{name}: the whole in INT8 {snr_db(noise):.1f} dB; the sum of the parts {snr_db(result.predicted[name]):.1f} dB"
    for name, why in result.left_out.items():
        yield f"{name} isn't looked at: {why}"


@_command(
    BuildRequest,
    "trtopt build model.onnx --int8 --images photos/ --preprocess imagenet -o model.engine; on a GPU, "
    "--best instead of --int8 keeps the faster of INT8 and FP16",
)
def build(result: Any, values: _Options) -> Iterator[str]:
    """Build a TensorRT engine and say what it really runs."""
    yield from _built(result, values)


@_command(TuneRequest, "trtopt tune model.onnx --images photos/ --preprocess imagenet --min-snr 25 -o model.engine")
def tune(result: Any, values: _Options) -> Iterator[str]:
    """Build the fastest INT8 engine within an accuracy limit: repair weights, keep the layers that lose most out of INT8."""
    yield from _built(result, {**values, "int8": True})


def _built(result: Any, values: _Options) -> Iterator[str]:
    from trtopt.engine.manifest import arithmetic

    if (tuning := result.tuning) is not None:
        rows = [
            (
                f"{item.share:.1%}",
                _out(item),
                f"{item.snr_db:.1f}",
                item.figure,
                str(item.samples),
                "" if item.missed else "yes",
            )
            for item in tuning.front
        ]
        eighths = any(item.in_fp8 for item in tuning.front)
        bits = "8 bits" if eighths else "INT8"
        headers = (f"arithmetic in {bits}", "layers out", "dB", "", "samples", "within the limits")
        _table(f"What was tried, on up to {tuning.samples} samples; cost: {tuning.cost}", headers, rows)
    yield f"{result.engine}: {result.precision_summary}"
    if line := arithmetic(result.coverage):
        yield f"  {line}"
    yield f"  {'up to date' if result.cached else f'{result.seconds:.1f} s'}; manifest {result.manifest}"
    if result.onnx and (values["int8"] or values["fp8"]):
        yield f"  graph {result.onnx}; ONNX Runtime by itself takes it with GraphOptimizationLevel.ORT_ENABLE_BASIC"
    if (safety := result.safety) is not None:
        kept = list(safety["in_fp32"].items())
        for node, reason in kept[:MOST_KEPT]:
            yield f"  FP32: {node}: {reason}"
        if len(kept) > MOST_KEPT:
            yield f"  FP32: {len(kept) - MOST_KEPT} more nodes, in the manifest"
    if result.comparison:
        yield f"  {result.comparison['why']}"
    if result.not_measured:
        yield f"  not measured against {'BF16' if values['bf16'] else 'FP16'}: {result.not_measured}"


def _out(choice: Any) -> str:
    return f"{choice.left_out}, {choice.in_fp8} in FP8" if choice.in_fp8 else str(choice.left_out)


@_command(InspectRequest, "trtopt inspect model.engine --diff other.engine")
def inspect(report: Any, values: _Options) -> Iterator[str]:
    """Say what an engine file is and what it runs, or what an ONNX file holds; or what differs between two engines."""
    import trtopt

    if isinstance(report, trtopt.ModelReport):
        yield from _model_lines(report)
    elif report.difference is not None:
        yield from _difference_lines(report.difference)
    else:
        yield from _engine_lines(report)
        if values["layers"]:
            yield from _layer_lines(report.layers)


def _difference_lines(found: Any) -> Iterator[str]:
    names = [found.this.name, found.other.name]
    if names[0] == names[1]:
        names = [str(found.this), str(found.other)]
    both = [item for item in found.precision if None not in (item.this, item.other)]
    parts = (
        ("What differs", "", found.facts),
        ("Runs in", "node", both),
        ("Reads and writes", "node", found.formats),
        ("Run by", "node", found.tactics),
    )
    for title, first, rows in parts:
        if rows:
            shown = rows[:MOST_KEPT] if first else rows
            cells = [(item.what, _cell(item.this), _cell(item.other)) for item in shown]
            _table(f"{title} ({len(rows)})", (first, *names), cells, width=80)
            if len(rows) > len(shown):
                print(f"{len(rows) - len(shown)} more: --json has all")
    for name, nodes in zip(
        names,
        (
            [item.what for item in found.precision if item.other is None],
            [item.what for item in found.precision if item.this is None],
        ),
    ):
        if nodes:
            some = f"{', '.join(nodes[:3])}{', …' * (len(nodes) > 3)}"
            yield f"only in {name} in a layer with products: {len(nodes)} node{'s' * (len(nodes) > 1)} ({some})"
    if found.same:
        yield "nothing differs of what is compared"
    for note in found.notes:
        yield f"note: {note}"


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _layer_lines(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from textwrap import wrap

    from trtopt.engine.difference import formats

    for number, layer in enumerate(layers, 1):
        yield f"{number} {layer['name']}: {layer['kind']}, {layer['precision'].upper()}"
        more = {"formats": formats(layer), "tactic": layer.get("tactic"), "nodes": ", ".join(layer["nodes"])}
        more["beside"] = ", ".join(layer.get("follows", ()))
        for what, text in more.items():
            yield from wrap(f"{what} {text}", 80, initial_indent="    ", subsequent_indent="      ") if text else ()


def _model_lines(report: Any) -> Iterator[str]:
    quantized = ", quantized (Q/DQ)" if report.quantized else ""
    yield f"{report.model}: ONNX, opset {report.opset}, {report.nbytes:,} bytes{quantized}"
    yield f"  {report.parameters:,} parameters, {report.weights:,} bytes"
    for item in report.inputs:
        yield f"  input {item.name}: {item.dtype} {item.dims}"
    for item in report.outputs:
        yield f"  output {item.name}: {item.dtype} {item.dims}, {report.output_kinds[item.name]}"
    counts = ", ".join(f"{count} {name}" for name, count in report.operators.items())
    yield f"  {sum(report.operators.values())} nodes: {counts}"
    yield f"  trtopt check {report.model} says what TensorRT makes of it"


def _engine_lines(report: Any) -> Iterator[str]:
    from trtopt.engine.manifest import arithmetic, embedded_by

    yield f"{report.engine}: {report.maker}, {report.nbytes / 2**20:.1f} MiB"
    yield f"runs on {report.runs_on}"
    yield f"  {report.precision_summary}"
    if (manifest := report.manifest) is not None:
        if line := arithmetic(manifest.coverage):
            yield f"  {line}"
        targets = ", ".join(manifest.targets) or manifest.generation["gpu"] or "?"
        yield f"  for {targets}; asked for {manifest.spec['precision']}; built in {manifest.seconds:.1f} s"
        for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
            for tensor in tensors:
                shape = "x".join(map(str, tensor["shape"]))
                holds = (manifest.output_kinds or {}).get(tensor["name"]) if kind == "output" else None
                yield f"  {kind} {tensor['name']}: {tensor['dtype']} {shape}{f', {holds}' if holds else ''}"
        if (embedded := embedded_by(manifest)) is not None:
            yield f"  preprocessing embedded: {embedded.input} takes pixels (0 to 255), of which the engine makes {embedded}"
        for number, profile in enumerate(manifest.profiles):
            yield f"  profile {number}: {'; '.join(f'{name}:{shape}' for name, shape in profile.items())}"
        if manifest.calibration:
            samples = manifest.calibration["samples"]
            yield f"  calibrated: {manifest.calibration['method']}{f', {samples} samples' if samples else ''}"
        if manifest.comparison:
            yield f"  {manifest.comparison['why']} on {manifest.comparison['gpu']}"
    if line := ", ".join(
        f"{what} {_binary(report.memory[key])}" for key, what in _HELD.items() if report.memory.get(key)
    ):
        yield f"  memory: {line}"
    for note in report.notes:
        yield f"  note: {note}"


_HELD = {
    "plan": "plan",
    "workspace_limit": "workspace at most",
    "scratch": "scratch of a context",
    "inputs": "inputs at their largest",
    "outputs": "outputs at their largest",
}


@_command(
    VerifyRequest,
    "trtopt verify model.onnx model.int8.onnx --images photos/ --preprocess imagenet",
    plain=methodcaller("describe"),
)
def verify(agreement: Any, values: _Options) -> Iterator[str]:
    """Compare two ONNX models, or a model and an engine, on the same real inputs, each output by its kind.

    With --min-agreement or --min-snr it judges as build --best does (0.95 and 20 dB unless given); exit status 1 if a limit
    is missed.
    """
    if agreement.layers:
        worst = sorted(agreement.layers, key=lambda item: item.own_snr_db)[:ROWS]
        rows = [(item.what, f"{item.own_snr_db:.1f}", f"{item.snr_db:.1f}") for item in worst]
        _table("What loses most by itself", ("layer or scale", "dB of its own", "with all before it"), rows)
    yield from str(agreement).split("\n")


@_command(PipelineRequest, "trtopt pipeline efficientnet-lite0 --output out --target sm89")
def pipeline(result: Any, values: _Options) -> Iterator[str]:
    """Run every stage of a recipe: export, check, calibrate, build, verify. What is up to date isn't done again."""
    yield from str(result).split("\n")


def _bench(values: _Options, reporter: Reporter) -> Any:
    import trtopt

    lists = {"against": _listed(values["against"]), "batch": _sizes(values["batch"])}
    return trtopt.bench(**{**values, **lists}, reporter=reporter)


@_command(BenchRequest, "trtopt bench model.engine --batch 1,8,32 --against onnxruntime", call=_bench)
def bench(report: Any, values: _Options) -> Iterator[str]:
    """Measure an engine: GPU and host time, end to end, throughput, memory; beside other ways of running the model."""
    _table(str(values["engine"]), *report.table())
    yield from report.remarks()


def _sizes(text: str | None) -> tuple[int, ...]:
    from trtopt.core.errors import UsageError

    sizes = _listed(text)
    if not all(size.isdigit() for size in sizes):
        raise UsageError(f"--batch {text!r} can't be read; write numbers such as 1,8,32")
    return tuple(map(int, sizes))


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


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


@_command(RunRequest, "trtopt run model.engine --images photos/", cls=_ValuesInARow)
def run(result: Any, values: _Options) -> Iterator[str]:
    """Run an engine on arrays or images. Exit status 1 if an image couldn't be used."""
    for item in result.outputs:
        bounds = "empty" if item.minimum is None else f"{item.minimum:.6g} to {item.maximum:.6g}"
        odd = f", {item.not_finite} values not finite" if item.not_finite else ""
        yield f"{item.name}: {item.dtype} {'x'.join(map(str, item.shape)) or 'scalar'}, {bounds}{odd}"
    if result.ranked:
        rows = [(item.sample, ", ".join(map(str, item.predictions))) for item in result.ranked]
        _table(str(values["engine"]), ("image" if result.images else "sample", f"best {values['top']}"), rows)
    yield f"{result.backend}, {result.timing}"
    for path in result.files:
        yield f"  {path}"
    for skipped in result.skipped:
        yield f"not run: {skipped.name}: {skipped.reason}"


jobs = typer.Typer(
    help="Calibrate and build many models, on all cores and GPUs or a Ray cluster; resumable.",
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


@_command(JobsRequest, "trtopt jobs run jobs.toml", group=jobs, name="run", cls=_RayAlone)
def run_jobs(result: Any, values: _Options) -> Iterator[str]:
    """Run a job list; run it again to go on where it was stopped. Exit status 1 if a job failed."""
    rows = [(job.name, job.status, job.outcome) for job in result.jobs]
    _table(str(values["jobs"]), ("job", "state", "result"), rows)
    yield f"{result.summary}; state in {result.state}"


@dataclass(frozen=True)
class _StateRequest:
    state: Path = field(metadata=about(help="The state folder of a job list.", metavar="STATE", typed=Path))


@_command(_StateRequest, "trtopt jobs show jobs.state", group=jobs, name="show", judged=False)
def show_jobs(result: Any, values: _Options) -> Iterator[str]:
    """Say what a state folder holds: each job's state and result. A run may be at work on it."""
    _table(
        str(values["state"]), ("job", "state", "result"), [(job.name, job.state, job.outcome) for job in result.jobs]
    )
    yield result.summary


def _profile(values: _Options, reporter: Reporter) -> Any:
    import trtopt

    return trtopt.profile(**{**values, "batch": _sizes(values["batch"])}, reporter=reporter)


@_command(ProfileRequest, "trtopt profile model.engine --batch 32 --trace layers.json", call=_profile)
def profile(result: Any, values: _Options) -> Iterator[str]:
    """Time each layer of an engine on the GPU, beside the whole: what runs in which precision, and how long."""
    _table(str(values["engine"]), *result.table(values["top"]))
    yield from result.remarks(values["top"])
    for path in result.files:
        yield f"  {path}"


@_command(ReportRequest, "trtopt report model.engine --results profile.json -o report.html")
def report(result: Any, values: _Options) -> Iterator[str]:
    """Write one HTML page on an engine: precision, layers, times, accuracy, calibration, and what isn't known yet."""
    yield f"{result.page}: {result.nbytes / 1e6:.2f} MB; {result.contents['verdict']['summary']}"
    if result.json_twin is not None:
        yield f"  {result.json_twin}"
    for item in result.unknown:
        yield f"  not known: {item['what']}: {item['command']}"


@_command(DoctorRequest, 'trtopt doctor model.engine; trtopt doctor --migrate "trtexec --onnx=model.onnx --fp16"')
def doctor(report: Any, values: _Options) -> Iterator[str]:
    """Look for what is wrong with this host, and with a plan or a model on it. Exit status 1 if anything is."""
    return report.lines  # type: ignore[no-any-return]


deploy = typer.Typer(
    help="Write what a server needs to serve engines: for NVIDIA's Triton Inference Server, a model repository.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(deploy, name="deploy")


@deploy.callback()
def _deploy() -> None:
    """Keeps `triton` a command of its own, where typer would leave out the only one's name."""


@_command(DeployRequest, "trtopt deploy triton model.engine --repo models", group=deploy, name="triton")
def deploy_triton(result: Any, values: _Options) -> Iterator[str]:
    """Write a model repository for Triton Inference Server: plan, configuration, labels, warm-up."""
    for model in result.models:
        state = f"version {model.version}" if model.changed else f"version {model.version}, up to date"
        batches = (
            f"batches of up to {model.max_batch_size}" if model.max_batch_size else f"no batches: {model.no_batches}"
        )
        yield f"{model.path}: {model.backend} backend, {state}; {batches}"
        for note in model.notes:
            yield f"  {note}"
    yield f"trtopt serve {result.repo} serves it here"


@_command(SignRequest, "trtopt sign model.engine --key key.pem")
def sign(result: Any, values: _Options) -> Iterator[str]:
    """Sign an engine and its manifest (Ed25519), for those who run it with --trusted-keys."""
    yield f"{result.path}: signed by {result.key}"


@_command(BundleRequest, "trtopt bundle model.engine -o model.tar --python 3.10")
def bundle(result: Any, values: _Options) -> Iterator[str]:
    """Write an archive that installs and runs an engine on a host without a network: wheels, checksums, install.sh."""
    what = f"{len(result.packages)} packages for Python {result.python}, {result.platform}"
    yield f"{result.path}: {_binary(result.nbytes)}, {what}"
    yield f"  sha256 {result.sha256}"
    for note in result.notes:
        yield f"  {note}"
    yield f"there: tar xf {result.path.name} && sh {result.name}/install.sh"


store = typer.Typer(
    help="Look after an engine store (trtopt build --store): list it, verify it, prune it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(store, name="store")


@_command(StoreRequest, "trtopt store list", group=store, name="list")
def list_store(result: Any, values: _Options) -> Iterator[str]:
    """List the engines in a store, the last used first."""
    import time

    rows = [
        (
            item.digest[:12],
            Path(item.model).name,
            item.precision,
            item.made_for,
            item.generation,
            _binary(item.nbytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(item.used)) + (", in use" if item.in_use else ""),
        )
        for item in result.engines
    ]
    if rows:
        _table(result.folder, ("engine", "model", "precision", "for", "TensorRT", "size", "last used"), rows)
    most = _binary(result.max_size)
    yield f"{result.folder}: {_engines(len(rows))}, {_binary(result.nbytes)}; a build leaves at most {most}"
    if result.damaged:
        yield f"  {len(result.damaged)} damaged, put aside: the next prune removes them first"


@_command(StoreRequest, "trtopt store verify", group=store, name="verify")
def verify_store(result: Any, values: _Options) -> Iterator[str]:
    """Compare every engine in a store with what was stored; what differs is put aside. Exit status 1 if any does."""
    for digest, problem in result.damaged.items():
        yield f"{digest[:12]}: put aside: {problem}"
    yield f"{result.folder}: {_engines(len(result.whole))} as stored, {len(result.damaged)} damaged"


@_command(PruneStoreRequest, "trtopt store prune --max-size 20GB", group=store, name="prune")
def prune_store(result: Any, values: _Options) -> Iterator[str]:
    """Remove what was put aside, then what was used longest ago. What a process reads stays."""
    kept = f", {result.in_use} of them in use" if result.in_use else ""
    count = len(result.removed)
    yield f"{result.folder}: {count} removed, {_binary(result.nbytes)}; {_binary(result.left)} left{kept}"


def _engines(count: int) -> str:
    return f"{count} engine{'s' * (count != 1)}"


def _binary(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / 2**30:.1f} GiB"


def _serve(values: _Options, reporter: Reporter) -> Any:
    import trtopt

    with trtopt.serve(**values, reporter=reporter) as server, stopping.handed_to(lambda number: server.stop()):
        reporter.note(
            f"ready: HTTP {server.http}, gRPC {server.grpc}, metrics {server.metrics}; SIGTERM or Ctrl-C ends it"
        )
        return server.wait()


@_command(ServeRequest, "trtopt serve model.engine --runtime onnxruntime", call=_serve)
def serve(result: Any, values: _Options) -> Iterator[str]:
    """Serve engines, or a model repository, by the tritonserver on this machine, until SIGTERM or Ctrl-C.

    Exit status: 0 if it was stopped and has answered all that it had accepted, 3 if no tritonserver here can serve this (the
    line for docker is printed), 1 if it didn't start, ended by itself, or had to be killed.
    """
    yield str(result)


@dataclass(frozen=True)
class _VersionRequest:
    pass


@_command(_VersionRequest, "trtopt version --json")
def version(report: Any, values: _Options) -> Iterator[str]:
    """Versions of trtopt, Python, the TensorRT generations, the GPU and the libraries."""
    from trtopt.core.version import to_install

    yield f"trtopt {report.trtopt}, Python {report.python}, {report.platform}"
    yield f"GPU: {report.gpu}"
    if not report.generations:
        yield f"TensorRT: none installed (TensorRT-RTX builds without a GPU: {to_install('rtx')})"
    for item in report.generations:
        yield f"{item['product']} {item['version']}: {'builds here' if item['can_build'] else item['why_not']}"
        yield f"  runs {item['reads']}"
    for name, number in report.libraries.items():
        yield f"{name}: {number or 'not installed'}"
    yield f"C extension: {'built' if report.extension else 'not built: install trtopt where there is a C compiler'}"


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
    native = lines() if failed or wanted() else []
    if wanted():
        for line in native:
            print(f"native: {line}", file=sys.stderr)
    elif native:
        print(f"native libraries printed {len(native)} lines of their own: trtopt -v shows them", file=sys.stderr)


def _failure(error: Exception) -> int:
    if wanted():
        import traceback

        traceback.print_exc()
    if stopping.status() and not isinstance(error, BuildCancelled):
        return 1  # what became of the interruption
    error = without_graphs(error) or error
    if isinstance(error, TrtoptError):
        kind, status, said = type(error).__name__, error.exit_code, error.for_cli(_FLAGS)
    elif type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]  # `trtopt` alone: the help
        return 2
    elif hasattr(error, "format_message"):  # click's own, which typer carries under another name from 0.20 on
        command = getattr(getattr(error, "ctx", None), "command_path", "trtopt")
        kind, status = "UsageError", 2
        said = [f"{error.format_message().rstrip('.?')}; try '{command} -h'"]
    else:
        kind, status = "InternalError", 70
        said = [f"internal error, please report it: {type(error).__name__}: {error} (trtopt -v shows where)"]
    print("error:", "\n".join(map(visible, said)), file=sys.stderr)
    if "--json" in sys.argv:
        with contextlib.suppress(TrtoptError, OSError):
            print(json.dumps({"error": {"type": kind, "message": "\n".join(said)}}))
    return status


if __name__ == "__main__":
    main()
