"""Tell what a file of weights holds and what to type for it, without unpickling anything."""

from __future__ import annotations

import contextlib
import pickletools
import zipfile
from pathlib import Path

ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pt2", ".safetensors")
_MOST = 1 << 20  # bytes of the pickle that are read; the model's own class stands at its beginning
_HARMLESS = ("torch", "torch._utils", "torch.storage", "torch.serialization", "collections", "builtins", "__builtin__")


def advice(path: Path) -> str:
    """One sentence on what `path` is, and how to get a model out of it; for a missing or foreign file, as for weights."""
    ultralytics = next((name for name in _classes(path) if name.startswith(("ultralytics.", "models.yolo."))), None)
    if ultralytics:
        return (
            f"{path} is a pickled Ultralytics model ({ultralytics}), which trtopt doesn't unpickle: let Ultralytics' own "
            f"exporter write it (yolo export model={path} format=onnx), then go on with trtopt check {path.stem}.onnx"
        )
    if path.suffix == ".pt2" or is_script(path):
        kind, end = ("export", "") if path.suffix == ".pt2" else ("jit", "()")
        what = "a program of torch.export" if kind == "export" else "TorchScript, which torch's exporter doesn't read"
        return (
            f"{path} is {what}: export the Python module that it was made from, trtopt export my_model.py:Net; its weights: "
            f"torch.save(torch.{kind}.load({str(path)!r}).state_dict{end}, 'state.pth')"
        )
    if pickled := model_class(path):
        module, _, name = pickled.rpartition(".")
        source = f"my_model.py:{name}" if module == "__main__" else f"{module}:{name}"
        if module.startswith("torch.nn."):
            source = "my_model.py:Net"
        return (
            f"{path} is a whole pickled model ({pickled}), which trtopt doesn't unpickle, because that runs any code that the "
            "file brings. If you trust it, save its weights alone, in Python where its class can be imported: model = "
            f"torch.load({str(path)!r}, weights_only=False); torch.save(model.state_dict(), '{path.stem}.state.pth'); then: "
            f"trtopt export {source} --weights {path.stem}.state.pth"
        )
    return (
        f"{path} holds weights, not a model: name the class or function that makes the model, and give the weights: "
        f"trtopt export my_model.py:Net --weights {path} (torchvision's: trtopt export torchvision:resnet50 --weights {path})"
    )


def model_class(path: Path) -> str | None:
    """The first class of the pickle that isn't torch's storage or a container: usually the model's own."""
    return next((name for name in _classes(path) if name.rpartition(".")[0] not in _HARMLESS), None)


def _classes(path: Path) -> list[str]:
    """Names of the classes and functions that the pickle in a torch.save file calls for, in its order."""
    classes: list[str] = []
    with contextlib.suppress(Exception):  # truncated, encrypted, no zip file, no pickle: then nothing is known
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(name) as stream:
                content = stream.read(_MOST)
        for code, argument, _ in pickletools.genops(content):
            if code.name == "GLOBAL":
                classes.append(str(argument).replace(" ", "."))
    return classes


def is_script(path: Path) -> bool:
    """Return True if torch.jit wrote it."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        return any(name.endswith("constants.pkl") for name in archive.namelist())
    return False
