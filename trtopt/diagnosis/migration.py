"""Commands of trtexec and Polygraphy, and shell scripts that hold them, as trtopt's. Nothing of them is run.

Options of trtexec are as 8.6 to 11 list them, Polygraphy's as 0.49; what TensorRT 10 and 11 dropped is from NVIDIA's migration
pages.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.shapes import parse_profile
from trtopt.core.values import x
from trtopt.diagnosis.lines import command_lines, wrapped

_VALUES = {"ampere+": "ampere_plus", "sameComputeCapability": "same_compute_capability"}
LARGEST = 16 << 20  # bytes of a script
IMAGES = ("--images", "DIR", "--preprocess", "PRESET")
_PROGRAMS = {"trtexec": "trtexec", "tensorrt_rtx": "trtexec", "polygraphy": "polygraphy"}

_TOOLS = {  # of Polygraphy, with one counterpart each
    "surgeon sanitize": ("check", "{model}", "--fix", "{output}"),
    "inspect model": ("inspect", "{model}"),
    "inspect capability": ("check", "{model}"),
    "check lint": ("check", "{model}"),
    "debug precision": ("tune", "{model}", *IMAGES, "--min-snr", "20", "-o", "MODEL.engine"),
}


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


@dataclass(frozen=True)
class Replacement:
    """An option of the old way.

    Attributes:
        what: as it stands there, such as "--fp16".
        line: of the script; 0: there is no script.
        gone: the first TensorRT without it, such as "TensorRT 11"; empty: all have it.
        instead: trtopt's way, or why there is none.
        lacking: trtopt has nothing for it.
    """

    what: str
    line: int
    gone: str
    instead: str
    lacking: bool


@dataclass(frozen=True)
class Migration:
    """What became of a script or a command.

    Attributes:
        source: the script's path, or the command.
        commands: trtopt's, in the order to type them.
        replaced: options that are to be replaced, in their order.
    """

    source: str
    commands: tuple[str, ...]
    replaced: tuple[Replacement, ...]

    @property
    def ok(self) -> bool:
        """Everything in it works on TensorRT 11, too, and has its counterpart."""
        return not any(item.gone or item.lacking for item in self.replaced)

    @property
    def lines(self) -> Iterator[str]:
        """For a terminal."""
        if self.commands:
            yield "with trtopt:"
        for command in self.commands:
            yield from command_lines(command)
        if self.commands and self.replaced:
            yield ""
        for item in self.replaced:
            since = f" (gone in {item.gone})" if item.gone else ""
            yield from wrapped(f"{f'line {item.line}: ' if item.line else ''}{item.what}{since}")
            yield from wrapped(f"{'no equivalent: ' * item.lacking}{item.instead}", start=4)
        if not self.replaced and not self.commands:
            yield "nothing in it is of TensorRT's old ways"


def migrated(source: str) -> Migration:
    """Translate a command, or the commands in a shell script.

    Raises:
        UsageError: no such file, or no command that is known here.
    """
    text = source.strip()
    is_file = os.path.isfile(text)  # noqa: PTH113 (pathlib's raises for a long command, which is no name of a file)
    if "\n" not in text and (is_file or re.fullmatch(r"\S+\.(py|sh|bash)", text)):
        return _script(existing_file(text, "the script"))
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"`migrate=` {text!r} can't be read as a command: {error}") from None
    draft = _translated(words)
    return Migration(text, tuple(draft.commands), tuple(draft.replaced))


def _script(path: Path) -> Migration:
    content = whole(path, LARGEST)
    if path.suffix == ".py" or content.startswith(b"#!/usr/bin/env python"):
        raise UsageError(
            f"`migrate=` {path} is Python, and commands and shell scripts are read: docs/manual/from-calibrators.md has every "
            "name that TensorRT's Python module has no more, with trtopt's way"
        )
    commands, replaced = list[str](), list[Replacement]()
    for words, line in _shell_commands(content.decode("utf-8", "replace")):
        try:
            draft = _translated(words, line)
        except UsageError as error:
            replaced.append(Replacement(shlex.join(words), line, "", str(error), True))
            continue
        commands, replaced = commands + draft.commands, replaced + draft.replaced
    return Migration(str(path), tuple(dict.fromkeys(commands)), tuple(dict.fromkeys(replaced)))


def _shell_commands(text: str) -> Iterator[tuple[list[str], int]]:
    """Commands of the known programs in a shell's text, and their lines."""
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        for part in re.split(r"&&|\|\||;(?=\s|$)|\|", pending):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue
            words = list(itertools.takewhile(lambda word: not re.match(r"(\d|&)?>", word), words))
            if len(words) > 1 and _program(words)[0]:
                yield words, first
        pending = ""


def _program(words: Sequence[str]) -> tuple[str, list[str]]:
    """The known program, or "", and its arguments; variables, sudo and `python -m` before it are left out."""
    rest = list(itertools.dropwhile(lambda word: re.fullmatch(r"\w+=.*|sudo|time|env|exec", word), words))
    if len(rest) > 2 and re.fullmatch(r"python[\d.]*", Path(rest[0]).name) and rest[1] == "-m":
        rest = rest[2:]
    return (_PROGRAMS.get(Path(rest[0]).name.removesuffix(".exe"), ""), rest[1:]) if rest else ("", [])


def _translated(words: Sequence[str], line: int = 0) -> _Draft:
    """Translate one command.

    Raises:
        UsageError: it is another program's, or can't be read.
    """
    program, arguments = _program(words)
    if not program:
        raise UsageError(
            f"`migrate=` {shlex.join(words)!r} is no command of trtexec or polygraphy, and no file: give a script's path, or "
            "the whole command in quotes, such as 'trtexec --onnx=model.onnx --fp16'"
        )
    draft = _Draft(line, program == "polygraphy")
    (_polygraphy if draft.polygraphy else _trtexec)(draft, arguments)
    return draft


def _trtexec(draft: _Draft, arguments: Sequence[str]) -> None:
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument.startswith("-"):
            draft.take(name.lstrip("-"), f"--{name.lstrip('-')}", value)
        else:
            draft.lack(argument, "it is no option of trtexec: values follow a '='")
    if draft.model or draft.engine:
        draft.commands = draft.built()
    else:
        draft.lack("trtexec", "it names neither --onnx nor --loadEngine")


def _polygraphy(draft: _Draft, arguments: Sequence[str]) -> None:
    tool, *rest = arguments or [""]
    files, options = _parsed(rest)
    names = {name for name, _, _ in options}
    if tool in ("surgeon", "inspect", "debug", "check", "data"):
        part, model, *_ = [*files, "", ""]
        output = next((value for name, _, value in options if name in ("o", "output")), "OUT.onnx")
        if command := _TOOLS.get(f"{tool} {part}"):
            words = [word.format(model=model or "MODEL.onnx", output=output) for word in command]
            draft.commands = [shlex.join(["trtopt", *words])]
        else:
            draft.lack(f"polygraphy {tool} {part}".rstrip(), "trtopt has nothing for it")
        return
    if tool not in ("convert", "run"):
        raise UsageError(
            f"`migrate=` polygraphy {tool or 'alone'}: convert, run, surgeon, inspect, debug, check are known"
        )
    draft.running = "yes" if tool == "run" and "onnxrt" not in names else ""
    models = [file for file in files if Path(file).suffix in (".onnx", ".engine", ".plan", ".trt")]
    draft.model = next(iter(models or files), "MODEL.onnx")
    if Path(draft.model).suffix in (".engine", ".plan", ".trt"):
        draft.model, draft.engine = "", draft.model
    elif Path(draft.model).suffix != ".onnx":
        draft.lack(draft.model, "trtopt builds from ONNX; from PyTorch: trtopt export my_model.py:Net -o MODEL.onnx")
    for name, what, value in sorted(options, key=lambda option: _ROWS.get(("polygraphy", option[0])) == _FED):
        draft.take(name, what, value)
    if "tf32" not in names and draft.model:
        draft.build.append("--no-tf32")
        draft.say("polygraphy", "it leaves TF32 off unless told, so --no-tf32; trtopt by itself uses it, and is faster")
    draft.commands = draft.built()
    if "onnxrt" in names and "trt" not in names:
        draft.commands = [shlex.join(["trtopt", "check", draft.model])]
    elif "onnxrt" in names:
        samples = ("--data", draft.data) if draft.data else IMAGES
        engine = draft.engine or _with_suffix(draft.model, ".engine")
        words = ["trtopt", "verify", draft.model or "MODEL.onnx", engine, *samples, "--min-snr", "20"]
        draft.commands.append(shlex.join(words))
        draft.say(
            "polygraphy", "it fails where outputs differ; verify does with a limit alone, such as --min-snr 20 (dB)"
        )


_FED = _ROWS["polygraphy", "input-shapes"]  # is the only profile, too, where no range is given


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
            shape = re.sub(r"^([^:,]+),(?=\d+x)", r"\1:", word)  # as older versions have it
            shape = re.sub(
                r":\[([\d, ]*)\]", lambda dims: f":{'x'.join(re.findall(r'[0-9]+', dims[1])) or 'scalar'}", shape
            )
            options[-1][2].append(shape)
            free -= 1
        else:
            positional.append(word)
    return positional, [(name, what, ",".join(values)) for name, what, values in options]


# What is written -----------------------------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """Commands of trtopt that are being written."""

    line: int
    polygraphy: bool
    model: str = ""
    engine: str = ""
    build: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    output: str = ""
    precisions: set[str] = field(default_factory=set)
    cache: str = ""
    data: str = ""
    profiles: list[dict[str, str]] = field(default_factory=lambda: [{}])  # "min", "opt", "max" → spec
    running: str = "yes"
    inspecting: str = ""
    commands: list[str] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)

    def take(self, name: str, what: str, value: str) -> None:
        row = _ROWS.get(("polygraphy" if self.polygraphy else "trtexec", name))
        if row is None:
            self.lack(what, "trtopt has nothing for it")
            return
        if value == "disable":  # of --sparsity, as it is by itself
            return
        value = _VALUES.get(value, value.replace("'", ""))
        words = [word.replace("{}", value) for word in row.words.split()]
        for place in (self.build,) * ("build" in row.action) + (self.bench,) * ("bench" in row.action):
            place += [] if words[:1] and words[0] in place else words  # two options may have one counterpart
        if row.action == "set":
            for name, _, text in (word.partition("=") for word in words):
                setattr(self, name, text)
        elif row.action in _ACTIONS:
            _ACTIONS[row.action](self, what, value, row)
        if row.said:
            self.say(what, row.said.replace("{}", value), row.gone, row.action == "none")

    def say(self, what: str, instead: str, gone: str = "", lacking: bool = False) -> None:
        self.replaced.append(Replacement(what, self.line, gone, instead, lacking))

    def lack(self, what: str, why: str) -> None:
        self.say(what, why, lacking=True)

    def built(self) -> list[str]:
        if self.engine.endswith(".onnx"):  # of Polygraphy's --fp-to-fp16
            self.build, self.engine = [*self.build, "--save-onnx", self.engine], ""
        engine = self.engine or (_with_suffix(self.model, ".engine") if self.model else "MODEL.engine")
        lines = []
        if self.engine and not self.model:
            why = "a plan that trtopt didn't build has no manifest: add --trust, if you know where it is from"
            self.say(self.engine, why)
        if self.model:
            lines.append(
                ["trtopt", "build", self.model, *self._precision(), *self._shapes(), *self.build, "-o", engine]
            )
        if self.inspecting:
            lines.append(["trtopt", "inspect", engine])
        if self.inputs or self.output:
            inputs = [word for item in self.inputs or ["X.npy"] for word in ("--input", item)]
            lines.append(
                ["trtopt", "run", engine, *inputs, *(["-o", _with_suffix(self.output, "")] if self.output else [])]
            )
        elif self.running:
            lines.append(["trtopt", "bench", engine, *self.bench])
        return list(map(shlex.join, lines))

    def _precision(self) -> list[str]:
        names = [name for name in ("best", "int8", "fp8", "fp16", "bf16") if name in self.precisions]
        words = [f"--{name}" for name in names[:1]]
        if names[:1] and names[0] in ("best", "int8", "fp8"):
            words += ["--bf16"] if names[0] != "best" and "bf16" in names and "fp16" not in names else []
            cache = self.cache if names[0] != "best" else ""  # it is read in place of data
            words += ["--calib", cache] if cache else ["--data", self.data] if self.data else IMAGES
        return words

    def _shapes(self) -> Iterator[str]:
        for specs in filter(None, self.profiles):
            one = specs.get("opt") or next(iter(specs.values()))
            ranges = [parse_profile(specs.get(which, one)) for which in ("min", "opt", "max")]
            texts = []
            for name in ranges[1]:
                dims = [x(range_.get(name, ranges[1][name]).opt) for range_ in ranges]
                texts.append(f"{name}:{dims[0] if len(set(dims)) == 1 else ','.join(dims)}")
            yield from ("--shapes", ";".join(texts))


def _with_suffix(name: str, suffix: str) -> str:
    return str(Path(name).with_suffix(suffix)) if Path(name).name else f"OUT{suffix}"


# Options that do more than to add words --------------------------------------------------------------------------------------


def _precision(draft: _Draft, what: str, value: str, row: _Row) -> None:
    draft.precisions.add(row.words)


def _layers(draft: _Draft, what: str, value: str, row: _Row) -> None:
    for part in filter(None, value.split(",")):
        node, _, precision = part.rpartition(":")
        precision = {"float32": "fp32", "float16": "fp16"}.get(precision, precision)
        if precision in ("fp32", "fp16", "bf16", "int8", "fp8"):
            draft.build += ["--precision-override", f"{node}={precision}"]
        else:
            draft.lack(f"{what}={part}", f"trtopt builds no layer in {precision}")


def _range(draft: _Draft, what: str, value: str, row: _Row) -> None:
    if draft.polygraphy and row.action == "min" and row.action in draft.profiles[-1]:  # again: another profile
        draft.profiles.append({})
    places = draft.profiles if draft.polygraphy else draft.profiles[-1:]
    next((place for place in places if row.action not in place), places[-1])[row.action] = value


def _fed(draft: _Draft, what: str, value: str, row: _Row) -> None:
    """Shapes of an inference; of a build without a range, the range, too."""
    for ranges in parse_profile(value).values() if not draft.polygraphy else ():
        draft.bench += ["--batch", str(ranges.opt[0])] if ranges.opt and "--batch" not in draft.bench else []
    if not draft.profiles[-1]:
        draft.profiles[-1]["opt"] = value


def _profile(draft: _Draft, what: str, value: str, row: _Row) -> None:
    draft.profiles += [{}] if draft.profiles[-1] else []


def _pools(draft: _Draft, what: str, value: str, row: _Row) -> None:
    for part in filter(None, value.split(",")):
        pool, _, size = part.partition(":")
        match = re.fullmatch(r"([\d.]+)([BKMG]?)(?:iB)?", size)
        if pool == "workspace" and match:
            unit = match[2] or ("B" if draft.polygraphy else "M")
            draft.build += ["--workspace", match[1] + {"B": "", "K": "KiB", "G": "GiB"}.get(unit, "MiB")]
        else:
            draft.lack(f"{what}={part}", "trtopt sets no memory pool but the workspace; it has no DLA")


def _inputs(draft: _Draft, what: str, value: str, row: _Row) -> None:
    for part in filter(None, value.split(",")):
        name, _, file = part.rpartition(":")
        draft.inputs.append(f"{name}={_with_suffix(file, '.npy')}")


_ACTIONS: dict[str, Callable[[_Draft, str, str, _Row], None]] = {
    **dict.fromkeys(("min", "opt", "max"), _range),
    "fed": _fed,
    "inputs": _inputs,
    "layers": _layers,
    "pools": _pools,
    "precision": _precision,
    "profile": _profile,
}
