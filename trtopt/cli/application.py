"""The application that commands are added to, what makes a command of a request, and tables in the terminal."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from inspect import Parameter, Signature, getdoc
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

import trtopt
from trtopt.core.errors import UsageError
from trtopt.core.options import About, flag_of, option, options, typed_as
from trtopt.core.progress import QuietReporter, Reporter, StreamReporter
from trtopt.core.version import __version__
from trtopt.core.words import spoken, visible

_READ = ("factory_arg", "inputs", "output_names")  # options of which each text is read
_EVERYWHERE = ("-v", "--verbose", "-q", "--quiet")
SHORT, ROOM = 12, 20  # characters of what isn't broken in tables; what another column needs, its gap too

# Commands by what they are for, in the order of a pipeline.
GROUPS = {
    "Prepare a model": ("export", "init", "check"),
    "Build an engine": ("calibrate", "sensitivity", "build", "tune", "tiers", "refit", "pipeline", "jobs"),
    "Measure and compare": ("inspect", "verify", "certify", "upgrade", "bench", "profile", "report"),
    "Run and deploy": ("run", "serve", "deploy", "store"),
    "This host": ("doctor", "version"),
}


class Command(TyperCommand):
    """Its options stand under the headings that their request gives them, and none is another's value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        items: list[Any] = [item for item in self.get_params(ctx) if item.param_type_name == "option"]
        flags = {flag: item for item in items for flag in (*item.opts, *item.secondary_opts)}
        for text, behind in zip(args, [*args[1:], None]) if {"-h", "--help"}.isdisjoint(args) else ():
            if text in flags and not flags[text].is_flag and behind in (None, *flags):
                value, other = flags[text].metavar or flags[text].name.upper(), f", not {behind}" if behind else ""
                raise UsageError(f"{text} requires an argument{other}: type {text} {value}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        last = "Options"
        for item in self.get_params(ctx):
            last = getattr(item, "rich_help_panel", None) or last
            if (record := item.get_help_record(ctx)) is not None:
                groups.setdefault("Arguments" if item.param_type_name == "argument" else last, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class ValuesInARow(Command):
    """`--images a.jpg b.jpg`, as a shell's `*.jpg` gives them: typer takes one value after each option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        option = ""
        for number, text in enumerate(args):
            if text.startswith("-"):
                option = text if text in ("--images", "--data", "--input") and number else ""
            elif option and words[-1] != option:
                words.append(option)
            words.append(text)
        return super().parse_args(ctx, words)


class RayAlone(Command):
    """`--ray` without an address means auto; typer has no options whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place in reversed([number for number, text in enumerate(args) if text == "--ray"]):
            if place + 1 == len(args) or args[place + 1].startswith("-"):
                args.insert(place + 1, "auto")
        return super().parse_args(ctx, args)


class _Anywhere(TyperGroup):
    """`-v` and `-q` may stand after the command, too, where people type them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, names in GROUPS.items():
            with formatter.section(group):
                width = formatter.width - 17
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        flags = [text for text in args[:end] if text in _EVERYWHERE]
        words = [text for text in args[:end] if text not in flags]
        return super().parse_args(ctx, [*dict.fromkeys(flags), *words, *args[end:]])


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
        None, help="Height and width of the images; default: the model's.", metavar="HxW", group="Input"
    )
    resize: str | None = option(None, help="stretch, crop or letterbox.")
    channels: str | None = option(None, help="rgb, bgr or gray.")
    layout: str | None = option(None, help="nchw or nhwc; default: the input's own.")
    scale: str | None = option(None, help="Factor on pixels (0 to 255), such as 1/255.")
    mean: str | None = option(None, help="After the scale: a number, or one per channel, in the order of --channels.")
    std: str | None = option(None, help="After the mean: a number, or one per channel, in the order of --channels.")


Options = Mapping[str, Any]
_Shown = dict[str, tuple[Field[Any], About]]
FLAGS: dict[str, str] = {}  # of every option of every command; the one that runs puts its own there
_STATE = SimpleNamespace(quiet=False)  # of the command that runs
_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr.")]


def command_group(name: str, help_text: str) -> typer.Typer:
    """A command that has commands of its own; `help_text` is its help."""
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    group.callback()(lambda: None)  # keeps the only command's name, which typer would leave out
    app.add_typer(group, name=name)
    return group


def command_of(
    request: type[Any],
    epilog: str,
    *,
    call: Callable[..., Any] | None = None,
    group: typer.Typer | None = None,
    name: str | None = None,
    cls: type[TyperCommand] | None = None,
    judged: bool = True,
    measures: bool = False,
) -> Callable[[Callable[[Any, Options], Iterator[str]]], None]:
    """Make a command of what says a result in lines: its docstring is the help, the options are a request's and --json.

    Args:
        call: gives the result; default: the public function of the same name, with the options as keywords.
        judged: exit status 1, or the result's `exit_status`, where it has an `ok` that is False.
        measures: the result is kept beside the engine that it is of, for `report`.
    """
    shown = _shown(request)
    grouped = any(about.group for _, about in options(request).values())
    parameters = [_parameter(item, about, grouped=grouped) for item, about in shown.values()]
    parameters.append(Parameter("json_output", Parameter.KEYWORD_ONLY, default=False, annotation=_JSON))
    own = {
        name: about.metavar or name.upper() if _is_argument(item, about) else "/".join(_flags(item, about))
        for name, (item, about) in shown.items()
    }  # what messages call an option: its flags, or what stands for an argument
    FLAGS.update((name, form) for name, form in own.items() if form.startswith("-"))

    def made(text: Callable[[Any, Options], Iterator[str]]) -> None:
        @functools.wraps(text)
        def typed(*, json_output: bool, **values: Any) -> None:
            FLAGS.update(own)
            values = _values(shown, values)
            # What a module or a metric of the user's own prints isn't part of the object.
            with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
                reporter = {"reporter": _reporter()} if "reporter" in options(request) else {}
                function = call or getattr(trtopt, text.__name__)
                if not gc.isenabled():  # from here on it is looked for, but not among what is there
                    gc.freeze()
                    gc.enable()
                result = function(**values, **reporter)
            as_json = getattr(result, "to_json", None) or result.describe
            document = told(as_json()) if json_output or measures else {}
            if measures:
                from trtopt.diagnosis.results import keep

                document |= keep(result, text.__name__, document, values, _reporter())
            for line in [json.dumps(document, default=str)] if json_output else text(result, values):
                print(line if json_output else visible(told(line)))
            if judged and not getattr(result, "ok", True):
                raise typer.Exit(getattr(result, "exit_status", 1))

        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {item.name: item.annotation for item in parameters}  # typer reads both
        help_text = f"{getdoc(text)}\n\nExample: {epilog}"
        (group or app).command(name, cls=cls or Command, help=help_text)(typed)

    return made


def _shown(request: type[Any]) -> _Shown:
    """Return the options of a request that its command has: name → field and description."""
    shown: _Shown = {}
    for name, entry in options(request).items():
        if entry[1].help:
            shown |= {name: entry} | (options(_Pixels) if name == "preprocess" else {})
    return shown


def _values(shown: _Shown, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Make the function's keywords of what was typed."""
    values = dict(typed)
    for name, (item, about) in shown.items():
        if item.default == ():
            if values[name] in (None, []):
                values[name] = ()
            elif about.typed is str:
                values[name] = _parted(flag_of(item), values[name], numbers="int" in str(item.type))
    if "preprocess" in values:
        values["preprocess"] = _prepared(values)
    return values | {name: _read(name, values[name]) for name in _READ if name in values}


def _parted(flag: str, text: str, *, numbers: bool = False) -> tuple[Any, ...]:
    """Read a list that is typed as one text, A,B."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(part.isdecimal() if numbers else part for part in parts):
        example = "numbers such as 1,8,32" if numbers else "one, or A,B"
        raise UsageError(f"{flag} {text!r} can't be read; write {example}")
    return tuple(map(int, parts)) if numbers else parts


def _read(name: str, texts: Sequence[str] | None) -> Any:
    """Make the argument of one of `_READ` of what was typed."""
    if not texts:
        return None
    if name == "output_names":
        return _parted("--output-names", ",".join(texts))
    if name == "inputs":
        from trtopt.frontend.inputs import parse_input

        return list(map(parse_input, texts))
    from trtopt.frontend.factories import parse_argument

    return dict(map(parse_argument, texts))


def _is_argument(item: Field[Any], about: About) -> bool:
    return about.positional or ((about.needed or item.default is MISSING) and not about.short)


def _flags(item: Field[Any], about: About) -> list[str]:
    return [*([about.short] if about.short else []), flag_of(item)]


def _parameter(item: Field[Any], about: About, *, grouped: bool) -> Parameter:
    """Return what typer makes a command's option or argument of."""
    required = about.needed or item.default is MISSING
    kind = typed_as(item, about)
    absent = item.default is None or item.default == ()  # None, for typer
    annotation: Any = kind | None if absent and not required else kind
    # "" stays the text that was typed, for the request to refuse: as a Path it would be this folder.
    as_typed: dict[str, Any] = {"path_type": str} if Path in (kind, *get_args(kind)) else {}
    if _is_argument(item, about):
        declaration = typer.Argument(metavar=about.metavar, help=about.help, **as_typed)
    else:
        panel = about.group if grouped else None
        declaration = typer.Option(
            *_flags(item, about), metavar=about.metavar, help=about.help, rich_help_panel=panel, **as_typed
        )
    default = Parameter.empty if required else None if absent else item.default
    return Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, declaration])


def _prepared(values: dict[str, Any]) -> Any:
    """`preprocess` with the options that change single keys of it, which are taken out of `values`."""
    preset = values["preprocess"]
    changes = {name: _image_option(name, text) for name in options(_Pixels) if (text := values.pop(name)) is not None}
    return {**({} if preset is None else {"preset": preset}), **changes} if changes else preset


def _image_option(name: str, text: str) -> Any:
    try:
        if name == "size":
            sides = [int(side) for side in text.lower().split("x")]
            return sides if len(sides) > 1 else sides * 2
        if name in ("mean", "std"):
            return [float(number) for number in text.split(",")]
    except ValueError:
        channels = "0.5, or one number per channel such as 0.485,0.456,0.406"
        example = "480x640, height first" if name == "size" else channels
        raise UsageError(f"--{name} {text!r} can't be read; write {example}") from None
    return text


def _reporter() -> Reporter:
    return (QuietReporter if _STATE.quiet else StreamReporter)(sys.stderr, FLAGS)


def told(value: Any) -> Any:
    """A result's texts, at whatever depth, with flags for the options that they name."""
    if isinstance(value, Mapping):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    return spoken(value, FLAGS) if isinstance(value, str) else value


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 200) -> None:
    """Print a table, wider than a terminal that has no room for its figures.

    Args:
        width: in columns, where the output is no terminal; what is longer is continued on the next line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    names = [visible(name) for name in columns]
    cells = [[visible(told(cell)) for cell in row] for row in rows]
    table = Table(title=visible(title), title_justify="left", show_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    least = 0
    for name, column in zip(names, zip(*cells)):
        short = all(len(cell) <= SHORT and " " not in cell for cell in column)
        high = short and console.is_terminal
        table.add_column(name.replace(" ", "\n") if high else name, overflow="fold", no_wrap=short)
        least += max(map(len, (*column, *name.split()))) + 2 if short else ROOM
    # A log has no width of its own: don't cut names short.
    console.width = max(console.width, least) if console.is_terminal else width
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _print_version(asked: bool) -> None:
    if asked:
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
