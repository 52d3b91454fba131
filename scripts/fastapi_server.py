"""What people write without a server: FastAPI, Pillow, ONNX Runtime with its defaults. For scripts/bench_serve.

python scripts/fastapi_server.py MODEL.onnx PREPROCESS PORT
"""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import onnxruntime as ort
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image

from trtopt import Preprocess

app = FastAPI()
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
prepare = Preprocess.load({"preset": sys.argv[2], "size": [224, 224]})


def classes(array: np.ndarray) -> list[int]:
    [scores] = session.run(None, {session.get_inputs()[0].name: array[None]})
    return [int(index) for index in np.argsort(-scores[0])[:5]]


def predict(body: bytes) -> list[int]:
    return classes(prepare(np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))))


def predict_array(body: bytes) -> list[int]:
    return classes(np.array(json.loads(body), np.float32))


@app.post("/photos")
async def photos(request: Request) -> list[int]:
    return await run_in_threadpool(predict, await request.body())


@app.post("/arrays")
async def arrays(request: Request) -> list[int]:
    return await run_in_threadpool(predict_array, await request.body())


@app.get("/ready")
def ready() -> None:
    predict(sample)


with io.BytesIO() as file:
    Image.new("RGB", (64, 64)).save(file, "PNG")
    sample = file.getvalue()

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="warning")
