"""Commands in folders of a user's files: what was there before is there afterwards, whatever was typed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.world import RTX, World
from trtopt.core.errors import OutputError
from trtopt.core.locks import alone


@pytest.fixture
def mine(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a recipe, arrays called as the model's output is, and folders of usual names."""
    monkeypatch.chdir(world.folder)
    shutil.copy("model.onnx", "k.onnx")
    np.save("y.npy", np.load("data.npz")["x"])
    Path("k.toml").write_text('description = "k"\nsource = "k.onnx"\ndata = "data.npz"\nprecision = "fp16"\n')
    Path("j.toml").write_text('[data.d]\ndata = "data.npz"\n[[job]]\nmodel = "k.onnx"\ndata = "d"\n')
    for name in ("shards/train/0001.tar", "scratch/notes.txt", f"shards/{'a' * 32}/train.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("mine")
    Path("links").mkdir()
    Path("links/k.onnx").symlink_to("../k.onnx")
    Path("links/pipeline.json").symlink_to("../k.toml")
    onnx.save(onnx.load("k.onnx"), "e.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    Path("c.txt").write_text("\n".join(map(str, range(16))))
    return world.folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


# What is typed, and what the refusal says; {RTX} is the target.
TRIES = """
build k.onnx --fp16 {RTX} -o a.engine --log k.onnx => --log
pipeline k.toml {RTX} -o out --log k.toml => --log
pipeline k.toml {RTX} -o out --report k.onnx => --report
pipeline k.toml {RTX} -o . => -o/--output would overwrite k.onnx
pipeline k.toml {RTX} -o links => -o/--output would overwrite k.onnx
check k.onnx --fix k.onnx => --fix
check k.onnx --images photos --preprocess imagenet --fix photos/0.jpg => --fix
run k.onnx --backend onnxruntime --input x=y.npy -o . => y.npy
jobs run j.toml --state k.onnx => --state
init k.onnx -o k.onnx --force => --output
build e.onnx --fp16 {RTX} --classes c.txt -o w.bin => give another name
build e.onnx --fp16 {RTX} --classes c.txt -o a.engine --save-onnx c.txt => give another name
calibrate e.onnx --data data.npz -o w.bin => give another name
"""


@pytest.mark.parametrize("row", TRIES.split("\n")[1:-1])
def test_what_is_the_users_own_stays(world: World, mine: Path, row: str) -> None:
    """Nothing of it is written over: not the models, weights beside them, class names, recipes, samples or folders' files."""
    typed, said = row.replace("{RTX}", " ".join(RTX)).split(" => ")
    before = contents(mine)
    found = world.run(*typed.split())
    assert found.status == 2 and said in found.err, found
    assert contents(mine) == before


def test_a_job_lists_outputs_are_none_of_its_inputs(world: World, mine: Path) -> None:
    Path("engines").mkdir()
    shutil.copy("k.onnx", "engines/k.fp16.sm89.engine")
    named, kept = ("engines/k.fp16.sm89.engine", 'name = "k"'), ("k.onnx", 'save_onnx = "k.onnx"')
    for model, more in (named, kept, ("k.onnx", 'classes = "c.txt"\nsave_onnx = "c.txt"')):
        Path("l.toml").write_text(
            f'[[job]]\nkind = "build"\nmodel = "{model}"\nprecision = "fp16"\nbackend = "rtx"\ntarget = "sm89"\n{more}\n'
        )
        before = contents(mine)
        found = world.run("jobs", "run", "l.toml")
        assert found.status == 2 and "would overwrite" in found.err, found
        assert contents(mine) == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.lock").symlink_to("precious")
    with pytest.raises(OutputError, match="can't lock"), alone(tmp_path / "a.lock"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (f"[inputs.x]\nshape = {[1] * 1000}", "a list of at most 32 is needed"),
        ('preprocess = "../../evil"', "neither a preset"),
        ('weights = "fifo"', "fifo can't be read: it is a pipe"),
        ("opset = 99", "the recipe's opset is 99; allowed: 16 to 23"),
    ],
)
def test_what_a_recipe_says_in_vain_is_refused(world: World, mine: Path, more: str, said: str) -> None:
    os.mkfifo("fifo")
    recipe = Path("k.toml").read_text()
    if more.startswith(("weights", "opset")):
        pytest.importorskip("torch")
        Path("net.py").write_text("import torch\n\n\ndef net():\n    return torch.nn.Conv2d(3, 4, 3)\n")
        recipe = recipe.replace("k.onnx", "net.py:net")
    Path("v.toml").write_text(f"{recipe}{more}\n")
    found = world.run("pipeline", "v.toml", "-o", "out", *RTX)
    assert found.status == 2
    assert re.search(said, found.err), found.err
