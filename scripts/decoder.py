"""A small text decoder as two engines, prefill and step, which feed their caches back.

    python scripts/decoder.py make FOLDER                   # with PyTorch
    python scripts/decoder.py run FOLDER [--target sm89]    # on a GPU; with --target the FP16 graphs, in ONNX Runtime

`make` exports a decoder with random weights (grouped queries and rotary positions, as in Llama) and writes prompts of every
length with PyTorch's greedy tokens. `run` builds FP16 engines, generates the same, and says token for token what differs; where
PyTorch has a GPU, PyTorch's own FP16 there stands beside it.

Two logits that FP16 can't tell apart have no right order. So of DRAWN prompts of each length those are kept whose least margin
between the two best logits is largest; `make` says how that compares with what FP16 changes in PyTorch.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import trtopt

try:
    import torch
    from torch import nn
except ImportError:  # `run` does without
    torch = nn = None  # type: ignore[assignment]

HIDDEN, LAYERS, HEADS, GROUPS, INNER, VOCABULARY = 256, 4, 8, 2, 688, 1000
SIDE = HIDDEN // HEADS  # of a head
LONGEST, NEW, PROMPTS, DRAWN, BATCHES = 64, 34, 200, 32, (1, 4)
PAST = LONGEST + NEW - 2  # tokens in the largest cache that a step takes
CACHES = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
SHAPES = {"prefill": f"batch:1,1,4;length:1,32,{LONGEST}", "step": f"batch:1,1,4;past:1,64,{PAST}"}
Named = Mapping[str, Any]
Part = Callable[[Named], Named]
Module: Any = object if torch is None else nn.Module

# The decoder -------------------------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int) -> Any:
    return nn.Linear(inputs, outputs, bias=False)


def heads(x: Any) -> Any:
    return x.view(*x.shape[:2], -1, SIDE).transpose(1, 2)


def turned(x: Any, turn: Any) -> Any:
    one, other = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-other, one), -1) * turn[1]


def repeated(x: Any) -> Any:
    batch, groups, length, side = x.shape
    return x[:, :, None].expand(batch, groups, HEADS // groups, length, side).reshape(batch, HEADS, length, side)


class Norm(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Any) -> Any:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = linear(HIDDEN, HIDDEN), linear(HIDDEN, GROUPS * SIDE)
        self.v_proj, self.o_proj = linear(HIDDEN, GROUPS * SIDE), linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, turn: Any, past: Any) -> tuple[Any, Any, Any]:
        q, k, v = turned(heads(self.q_proj(x)), turn), turned(heads(self.k_proj(x)), turn), heads(self.v_proj(x))
        if past:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        found = nn.functional.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=not past)
        return self.o_proj(found.transpose(1, 2).flatten(2)), k, v


class Mlp(Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = *(linear(HIDDEN, INNER) for _ in range(2)), linear(INNER, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, x: Any, turn: Any, past: Any) -> tuple[Any, Any, Any]:
        y, k, v = self.self_attn(self.input_layernorm(x), turn, past)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Decoder(Module):
    """Tokens (batch × length, int64) and caches of what came before → logits (batch × vocabulary) and all caches (batch ×
    groups × length so far × side). Its state dict is that of transformers' LlamaForCausalLM."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Module(), linear(HIDDEN, VOCABULARY)
        self.model.embed_tokens, self.model.norm = nn.Embedding(VOCABULARY, HIDDEN), Norm()
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def states(self, tokens: Any, past: Any) -> tuple[Any, list[Any]]:
        x, before, caches = self.model.embed_tokens(tokens), past[0].shape[2] if past else 0, list[Any]()
        places = torch.arange(before, before + tokens.shape[1], device=x.device).float()
        rates = 10000.0 ** (-torch.arange(0, SIDE, 2, device=x.device).float() / SIDE)
        angles = torch.cat([places[:, None] * rates] * 2, -1)  # FP32 in a half module, too
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer, part in enumerate(self.model.layers):
            x, *made = part(x, turn, past[2 * layer : 2 * layer + 2])
            caches += made
        return self.model.norm(x), caches

    def forward(self, tokens: Any, *past: Any) -> dict[str, Any]:
        x, caches = self.states(tokens, past)
        return {"logits": self.lm_head(x[:, -1]), **dict(zip(CACHES, caches))}


def decoder() -> Any:
    """A decoder with random weights that FP16 holds exactly, and in which every part weighs as much as the word itself."""
    torch.manual_seed(0)
    made = Decoder().eval().requires_grad_(False)
    for name, weight in made.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
    return made.half().float()


def in_pytorch(module: Any) -> tuple[Part, Part]:
    def step(given: Named) -> Named:
        return module(given["tokens"], *(given[f"past_{name}"] for name in CACHES))  # type: ignore[no-any-return]

    return (lambda given: module(given["tokens"])), step


def generate(prefill: Part, step: Part, prompt: Any, count: int) -> list[Any]:
    """The `count` tokens that are the likeliest after `prompt` (batch × length), each batch × 1. All stays where it is made."""
    found = prefill({"tokens": prompt})
    tokens = [found["logits"].argmax(-1)[:, None]]
    while len(tokens) < count:
        found = step({"tokens": tokens[-1], **{f"past_{name}": found[name] for name in CACHES}})
        tokens.append(found["logits"].argmax(-1)[:, None])
    return tokens


# make --------------------------------------------------------------------------------------------------------------------


def make(folder: Path, prompts: int = PROMPTS, drawn: int = DRAWN) -> None:
    """Write prefill and step, each .onnx and samples to calibrate on, .npz; weights.pt; and prompts.npz."""
    module = decoder()
    past = [f"past_{name}:batchx{GROUPS}xpastx{SIDE}" for name in CACHES]
    trtopt.export(module, folder / "prefill.onnx", inputs=["tokens:batchxlength:int64"])
    trtopt.export(module, folder / "step.onnx", inputs=["tokens:batchx1:int64", *past])
    torch.save(module.state_dict(), folder / "weights.pt")
    with torch.no_grad():
        prompt = torch.randint(VOCABULARY, (64, 24), generator=torch.Generator().manual_seed(0))
        found = {name: value.numpy() for name, value in module(prompt).items()}
    np.savez_compressed(folder / "prefill.npz", tokens=prompt.numpy())
    states = {f"past_{name}": found[name] for name in CACHES}
    np.savez_compressed(folder / "step.npz", tokens=found["logits"].argmax(-1)[:, None], **states)
    half, rows, changes = copy.deepcopy(module).half(), list[tuple[Any, ...]](), list[Any]()
    with torch.no_grad():
        for length in range(1, min(prompts, LONGEST) + 1):
            count = len(range(length - 1, prompts, LONGEST))
            random = torch.Generator().manual_seed(length)
            prompt = torch.randint(VOCABULARY, (drawn, length), generator=random)
            tokens = torch.cat(generate(*in_pytorch(module), prompt, NEW), 1)
            whole = torch.cat((prompt, tokens[:, :-1]), 1)
            exact, rough = (item.lm_head(item.states(whole, ())[0][:, length - 1 :]) for item in (module, half))
            (best, second), places = exact.topk(2).values.unbind(-1), exact.topk(2).indices
            margins, (one, other) = best - second, (rough.float() - exact).gather(-1, places).unbind(-1)
            changes.append((one - other).flatten())
            assert torch.equal(places[..., 0], tokens)  # the caches' tokens are those of the whole
            for row in margins.amin(1).argsort(descending=True)[:count].tolist():
                padded = nn.functional.pad(prompt[row], (0, LONGEST - length))
                rows.append(
                    (padded, length, tokens[row], margins[row], torch.equal(rough[row].argmax(-1), tokens[row]))
                )
    kept = dict(zip(("tokens", "lengths", "answers", "margins", "same"), map(np.array, zip(*rows))))
    np.savez_compressed(folder / "prompts.npz", **kept)
    change = torch.cat(changes)
    print(
        f"{len(rows)} prompts of 1 to {kept['lengths'].max()} tokens, the widest of {drawn} of each length; "
        f"{len(np.unique(kept['answers']))} different tokens among {kept['answers'].size}\n"
        f"least margin of the two best logits {kept['margins'].min():.4f} (mean {kept['margins'].mean():.3f}); FP16 in PyTorch "
        f"changes it by {change.square().mean().sqrt():.4f} (rms), {change.abs().max():.4f} at most\n"
        f"PyTorch's FP16 on the CPU says the same for {kept['same'].sum()} of {len(rows)} prompts"
    )


# run ---------------------------------------------------------------------------------------------------------------------


def run(folder: Path, target: str | None = None) -> Iterator[list[str]]:
    """Build both engines, generate for all prompts, and yield a row for each way to do so."""
    kept = dict(np.load(folder / "prompts.npz"))
    gpu = target is None and torch is not None and torch.cuda.is_available()
    with ExitStack() as stack:
        parts = list[trtopt.Session]()
        for name, shapes in SHAPES.items():
            engine = folder / f"{name}.engine"
            options: Any = {"fp16": True, "fp32_io": False, "target": target or ()}
            graph = folder / f"{name}.fp16.onnx"
            built = trtopt.build(folder / f"{name}.onnx", engine, shapes=shapes, save_onnx=graph, **options)
            print(f"{name}: {built.precision}")
            parts.append(stack.enter_context(trtopt.Session(engine, backend="onnxruntime" if target else "auto")))
        host, what = [part.run for part in parts], "graphs in ONNX Runtime" if target else "engines"
        for batch in BATCHES:
            yield compared(f"{what}, arrays on the host", host, kept, batch)[0]
        if gpu:
            stream = torch.cuda.Stream()
            module = Decoder().eval().requires_grad_(False)
            module.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
            ours = [lambda given, run=run: run(given, stream=stream) for run in host]
            theirs = in_pytorch(module.cuda().half())
            with torch.no_grad(), torch.cuda.stream(stream):
                for batch in BATCHES:
                    row, found = compared("engines, arrays on the GPU", ours, kept, batch, "cuda")
                    beside, wanted = compared("PyTorch FP16 on the GPU", theirs, kept, batch, "cuda")
                    yield from (row, beside)
                    same = (found == wanted).all(1).sum()
                    print(f"batch {batch}: engines say what PyTorch says in FP16 for {same} of {len(found)} prompts")


def compared(label: str, ways: Sequence[Part], kept: Named, batch: int, device: Any = None) -> tuple[list[str], Any]:
    """Return a row and all tokens: what generates, how much of it PyTorch says in FP32, milliseconds a step, differences."""
    answers, found = kept["answers"], np.zeros_like(kept["answers"])
    seconds, steps = 0.0, 0
    for length in np.unique(kept["lengths"]).tolist():
        [same] = np.nonzero(kept["lengths"] == length)
        for rows in np.split(same, range(batch, len(same), batch)):
            prompt = kept["tokens"][rows, :length]
            given = prompt if device is None else torch.from_numpy(prompt).to(device)
            if not steps:
                generate(*ways, given, 4)
            start = time.perf_counter()
            tokens = generate(*ways, given, answers.shape[1])
            tokens = tokens if device is None else [item.cpu().numpy() for item in tokens]
            seconds, steps = seconds + time.perf_counter() - start, steps + len(tokens)
            found[rows] = np.concatenate(tokens, 1)
    equal = found == answers
    places = np.stack((np.nonzero(~equal.all(1))[0], equal[~equal.all(1)].argmin(1)), 1)
    first = [f"{kept['lengths'][r]}+{p} (margin {kept['margins'][r, p]:.4f})" for r, p in places]
    share = f"{equal.all(1).sum()} of {len(equal)}", f"{equal.sum()} of {equal.size}"
    return [f"{label}, batch {batch}", *share, f"{seconds / steps * 1000:.2f}", ", ".join(first[:4]) or "-"], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.action == "run":
        heading = "", "prompts", "tokens", "ms a step", "first differences: length+place"
        print("  ".join(heading))
        for row in run(given.folder, given.target):
            print("  ".join(row), flush=True)
        return
    make(given.folder)


if __name__ == "__main__":
    main()
