"""Pixels, and every kind of preprocessing that may be embedded, for tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from trtopt.data.preprocess import Preprocess

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)


def preprocessings() -> st.SearchStrategy[Preprocess]:
    """Any that may be embedded, of images of 5 × 7."""

    def made(channels: str, layout: str, dtype: str, scale: float, seed: int, count: int) -> Preprocess:
        random = np.random.default_rng(seed)
        count = 1 if channels == "gray" else count
        mean, std = random.uniform(-1, 1, count) * 255 * scale, random.uniform(0.1, 2, count) * 255 * scale
        return Preprocess(
            size=(5, 7), channels=channels, layout=layout, dtype=dtype, scale=scale, mean=tuple(mean), std=tuple(std)
        )  # fmt: skip

    return st.builds(
        made,
        st.sampled_from(["rgb", "bgr", "gray"]),
        st.sampled_from(["nchw", "nhwc"]),
        st.sampled_from(["float32", "float16"]),
        st.sampled_from([1.0, 1 / 255, 2 / 255, 0.017]),
        st.integers(0, 1000),
        st.sampled_from([1, 3]),
    )
