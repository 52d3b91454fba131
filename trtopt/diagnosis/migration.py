"""Commands of trtexec and Polygraphy as trtopt's. Nothing of them is run.

Options of trtexec are as 8.6 to 11 list them, Polygraphy's as 0.49; what 10 and 11 dropped is from NVIDIA's migration pages.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.core.files import whole
from trtopt.core.shapes import parse_profile
from trtopt.core.values import x

_VALUES = {"ampere+": "ampere_plus", "sameComputeCapability": "same_compute_capability"}
_PLANS = (".engine", ".plan", ".trt")
IMAGES = ("--images", "DIR", "--preprocess", "PRESET")
_PROGRAMS = {"trtexec": "trtexec", "tensorrt_rtx": "trtexec", "polygraphy": "polygraphy"}


@dataclass(frozen=True)
class _Row:
    """A row of old_options.md; `values` of Polygraphy's option: 1, 2 for several, less for none."""

    gone: str
    action: str
    words: str
    said: str
    values: int


def _rows() -> dict[tuple[str, str], _Row]:
    """The table by program and option."""
    rows = {}
    table = whole(Path(__file__).with_name("old_options.md")).decode().partition("|---|\n")[2]
    for line in table.splitlines():
        program, names, gone, action, words, said = (part.strip() for part in line.strip("|").split("|"))
        for name in names.split():
            row = _Row(gone and f"TensorRT {gone}", action, words, said, " =+".find(name[-1]))
            for one in ("trtexec", "polygraphy") if program == "both" else (program,):
                rows[one, name.rstrip("=+")] = row
    return rows


_ROWS = _rows()
OPTIONS = tuple(name for program, name in _ROWS if program == "trtexec" and "-" not in name)


def wrapped(text: str, indent: int = 4, start: int = 0) -> list[str]:
    """Return lines of 80 columns; all but the first are indented."""
    return textwrap.wrap(
        text,
        80,
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


@dataclass(frozen=True)
class Replacement:
    """An option of the old way, such as "--fp16"; the first TensorRT without it, such as "TensorRT 11" ("": all have it);
    trtopt's way, or why there is none, and whether trtopt has nothing for it."""

    what: str
    gone: str
    instead: str
    lacking: bool


@dataclass(frozen=True)
class Migration:
    """The counterpart of a command: trtopt's, in the order to type them, and options that are replaced."""

    source: str
    commands: tuple[str, ...]
    replaced: tuple[Replacement, ...]

    @property
    def ok(self) -> bool:
        """Everything in it works on TensorRT 11, too, and has its counterpart."""
        return not any(item.gone or item.lacking for item in self.replaced)

    @property
    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        if self.commands:
            yield "with trtopt:"
        for command in self.commands:
            yield f"    $ {command}"
        if self.commands and self.replaced:
            yield ""
        for item in self.replaced:
            yield from wrapped(f"{item.what}{f' (gone in {item.gone})' if item.gone else ''}")
            yield from wrapped(f"{'no equivalent: ' * item.lacking}{item.instead}", start=4)


def migrated(source: str) -> Migration:
    """Translate a command; UsageError where it is another program's, can't be read, or is a file."""
    text = source.strip()
    # pathlib's is_file raises for a long command, which is no name of a file
    if "\n" not in text and (os.path.isfile(text) or re.fullmatch(r"\S+\.(py|sh|bash)", text)):  # noqa: PTH113
        raise UsageError(
            f"`migrate=` {text} is a script; give one command of it in quotes: grep -E 'trtexec|polygraphy' "
            f"{shlex.quote(text)} lists them. docs/manual/from-calibrators.md has what went from TensorRT's Python"
        )
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"`migrate=` {text!r} can't be read as a command: {error}") from None
    program, *arguments = itertools.dropwhile(
        lambda word: re.fullmatch(r"\w+=.*|sudo|time|env|exec|(.*/)?python[\d.]*|-m", word), [*words, ""]
    )
    name = _PROGRAMS.get(Path(program).name.removesuffix(".exe"), "")
    if not name:
        raise UsageError(
            f"`migrate=` {text!r} is no command of trtexec or polygraphy: give the whole command in quotes, such as "
            "'trtexec --onnx=model.onnx --fp16'"
        )
    draft = _Draft(name)
    (_polygraphy if name == "polygraphy" else _trtexec)(draft, arguments[:-1])
    return Migration(text, tuple(draft.commands), tuple(draft.replaced))


def _trtexec(draft: _Draft, arguments: Sequence[str]) -> None:
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument.startswith("-"):
            draft.take(name.lstrip("-"), f"--{name.lstrip('-')}", value)
        else:
            draft.say(argument, "it is no option of trtexec: values follow a '='", lacking=True)
    if draft.model or draft.engine:
        draft.commands = draft.built()
    else:
        draft.say("trtexec", "it names neither --onnx nor --loadEngine", lacking=True)


def _polygraphy(draft: _Draft, arguments: Sequence[str]) -> None:
    tool, *rest = arguments or [""]
    files, options = _parsed(rest)
    names = {name for name, _, _ in options}
    if tool not in ("convert", "run"):
        raise UsageError(
            f"`migrate=` translates convert and run, not polygraphy {tool or 'alone'}: docs/manual/from-polygraphy.md has what "
            "does the work of surgeon, inspect, check and debug"
        )
    draft.running = "yes" if tool == "run" and "onnxrt" not in names else ""
    models = [file for file in files if Path(file).suffix in (".onnx", *_PLANS)]
    draft.model = next(iter(models or files), "MODEL.onnx")
    if Path(draft.model).suffix in _PLANS:
        draft.model, draft.engine = "", draft.model
    elif Path(draft.model).suffix != ".onnx":
        draft.say(
            draft.model, "trtopt builds from ONNX; from PyTorch: trtopt export NET.py:Net -o M.onnx", lacking=True
        )
    for option in options:
        draft.take(*option)
    if "tf32" not in names and draft.model:
        draft.build.append("--no-tf32")
        draft.say("polygraphy", "it leaves TF32 off unless told, so --no-tf32; trtopt by itself uses it, and is faster")
    draft.commands = draft.built()
    if "onnxrt" in names and "trt" not in names:
        draft.commands = [shlex.join(["trtopt", "check", draft.model])]
    elif "onnxrt" in names:
        samples = ("--data", draft.data) if draft.data else IMAGES
        words = ["trtopt", "verify", draft.model or "MODEL.onnx", draft.engine, *samples, "--min-snr", "20"]
        draft.commands.append(shlex.join(words))
        draft.say(
            "polygraphy", "it fails where outputs differ; verify does with a limit alone, such as --min-snr 20 (dB)"
        )


def _parsed(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Positional arguments, and options with their values, as Polygraphy takes them: after a space or a '='."""
    positional, options, free = list[str](), list[tuple[str, str, list[str]]](), 0
    for word in words:
        if re.match(r"-{1,2}[a-zA-Z]", word):
            what, equals, value = word.partition("=")
            row = _ROWS.get(("polygraphy", what.lstrip("-")))
            options.append((what.lstrip("-"), what, [value] if equals else []))
            free = 0 if row is None or (equals and row.values == 1) else {1: 1, 2: len(words)}.get(row.values, 0)
        elif free:
            shape = r":\[([\d, ]*)\]"
            options[-1][2].append(
                re.sub(shape, lambda dims: f":{'x'.join(re.findall(r'[0-9]+', dims[1])) or 'scalar'}", word)
            )
            free -= 1
        else:
            positional.append(word)
    return positional, [(name, what, ",".join(values)) for name, what, values in options]


@dataclass
class _Draft:
    """Commands of trtopt that are being written."""

    program: str
    model: str = ""
    engine: str = ""
    build: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    precisions: set[str] = field(default_factory=set)
    cache: str = ""
    data: str = ""
    profiles: list[dict[str, str]] = field(default_factory=lambda: [{}])  # "min", "opt", "max" → spec
    fed: str = ""  # the only profile, too, where no range is given
    running: str = "yes"
    commands: list[str] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)

    def take(self, name: str, what: str, value: str) -> None:
        row = _ROWS.get((self.program, name))
        if row is None:
            self.say(what, "trtopt has nothing for it", lacking=True)
        if row is None or value == "disable":  # of --sparsity, as it is by itself
            return
        value = _VALUES.get(value, value.replace("'", ""))
        words = [word.replace("{}", value) for word in row.words.split()]
        for place in (self.build,) * ("build" in row.action) + (self.bench,) * ("bench" in row.action):
            place += [] if words[:1] and words[0] in place else words  # two options may have one counterpart
        match row.action:
            case "set":
                for name, _, text in (word.partition("=") for word in words):
                    setattr(self, name, text)
            case "precision":
                self.precisions.add(row.words)
            case "min" | "opt" | "max":
                if self.program == "polygraphy" and row.action == "min" and "min" in self.profiles[-1]:
                    self.profiles.append({})  # again: another profile
                places = self.profiles if self.program == "polygraphy" else self.profiles[-1:]
                next((place for place in places if row.action not in place), places[-1])[row.action] = value
            case "profile":
                self.profiles += [{}] if self.profiles[-1] else []
            case "fed":
                self.fed = value
                for ranges in parse_profile(value).values() if self.program == "trtexec" else ():
                    self.bench += ["--batch", str(ranges.opt[0])] if ranges.opt and "--batch" not in self.bench else []
            case "layers" | "pools":
                self._parts(what, value, row.action == "layers")
        if row.said:
            self.say(what, row.said.replace("{}", value), row.gone, row.action == "none")

    def say(self, what: str, instead: str, gone: str = "", lacking: bool = False) -> None:
        self.replaced.append(Replacement(what, gone, instead, lacking))

    def built(self) -> list[str]:
        if self.engine.endswith(".onnx"):  # of Polygraphy's --fp-to-fp16
            self.build, self.engine = [*self.build, "--save-onnx", self.engine], ""
        if self.engine and not self.model:
            self.say(self.engine, "a plan of another tool has no manifest: add --trust, if you know where it is from")
        self.engine = self.engine or str(Path(self.model or "MODEL").with_suffix(".engine"))
        lines = []
        if self.model:
            words = [*self._precision(), *self._shapes(), *self.build]
            lines.append(["trtopt", "build", self.model, *words, "-o", self.engine])
        if self.running:
            lines.append(["trtopt", "bench", self.engine, *self.bench])
        return list(map(shlex.join, lines))

    def _precision(self) -> list[str]:
        name = next((name for name in ("best", "int8", "fp8", "fp16", "bf16") if name in self.precisions), "")
        words = [f"--{name}"] if name else []
        if name in ("best", "int8", "fp8"):
            words += ["--bf16"] if name != "best" and {"bf16", "fp16"} & self.precisions == {"bf16"} else []
            cache = self.cache if name != "best" else ""  # it is read in place of data
            words += ["--calib", cache] if cache else ["--data", self.data] if self.data else IMAGES
        return words

    def _shapes(self) -> Iterator[str]:
        for specs in [profile for profile in self.profiles if profile] or [{"opt": self.fed}] * bool(self.fed):
            one = specs.get("opt") or next(iter(specs.values()))
            ranges = [parse_profile(specs.get(which, one)) for which in ("min", "opt", "max")]
            texts = []
            for name in ranges[1]:
                dims = [x(range_.get(name, ranges[1][name]).opt) for range_ in ranges]
                texts.append(f"{name}:{dims[0] if len(set(dims)) == 1 else ','.join(dims)}")
            yield from ("--shapes", ";".join(texts))

    def _parts(self, what: str, value: str, layers: bool) -> None:
        """Translate a list of NODE:PRECISION or of POOL:SIZE."""
        for part in filter(None, value.split(",")):
            name, _, text = part.rpartition(":")
            precision = {"float32": "fp32", "float16": "fp16"}.get(text, text)
            size = re.fullmatch(r"([\d.]+)([BKMG]?)(?:iB)?", text)
            if layers and precision in ("fp32", "fp16", "bf16", "int8", "fp8"):
                self.build += ["--precision-override", f"{name}={precision}"]
            elif not layers and name == "workspace" and size:
                unit = size[2] or ("B" if self.program == "polygraphy" else "M")
                self.build += ["--workspace", size[1] + {"B": "", "K": "KiB", "G": "GiB"}.get(unit, "MiB")]
            else:
                pools = "trtopt sets no memory pool but the workspace; it has no DLA"
                self.say(f"{what}={part}", f"trtopt builds no layer in {precision}" if layers else pools, lacking=True)
