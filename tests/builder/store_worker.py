"""What processes do to one store in test_store_builds.py: `python store_worker.py MODE STORE OUT MODEL…`.

once   build each model by way of the store, and print what was built here.
ever   build, fetch, verify and prune in random order until killed; exit status 9 if an engine isn't what its manifest says.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
import traceback
from pathlib import Path

from trtopt.builder import construction
from trtopt.core.errors import EngineError
from trtopt.engine.manifest import load_manifest
from trtopt.engine.store import Store


def _whole(engine: Path) -> bool:
    manifest = load_manifest(engine)
    return manifest is not None and hashlib.sha256(engine.read_bytes()).hexdigest() == manifest.plan["sha256"]


def main(mode: str, where: str, out: str, *models: str) -> int:
    output, rng = Path(out), random.Random(os.getpid())
    output.mkdir(exist_ok=True)

    def built(model: str, name: str, **options: bool) -> bool:
        result = construction.build(model, output / name, target="sm89", store=where, **options)
        if not _whole(output / name):
            print("corrupted", name, flush=True)
            sys.exit(9)
        return not result.cached

    if mode == "once":
        print(
            "built",
            *(
                Path(model).name
                for model in rng.sample(models, len(models))
                if built(model, f"{Path(model).stem}.engine")
            ),
        )
        return 0
    construction.build(models[0], output / "first.engine", target="sm89", store="none")  # what is slow the first time
    print("ready", flush=True)
    while True:
        kind, model = rng.random(), rng.choice(models)
        if kind < 0.75:
            built(model, f"{rng.randrange(1 << 30)}.engine", force=rng.random() < 0.3)
        elif kind < 0.9:
            store = Store(where)
            for folder in store.folders():
                if problem := store.fault(folder.name):
                    print("corrupted", folder.name, problem, flush=True)
                    return 9
        else:
            Store(where).prune(rng.choice([0, 500_000]))
        for path in output.iterdir():
            if time.time() - path.stat().st_mtime > 1:
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except EngineError as error:
        print("corrupted", error, flush=True)
        sys.exit(9)
    except Exception:
        traceback.print_exc(file=sys.stdout)  # for the assertion to show
        sys.exit(1)
