"""What PyTorch's exporter writes in a form that TensorRT can't take, in other words while a model is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def in_plain_arithmetic(torch: Any) -> Iterator[None]:
    """Replace functions that the exporter has no form for, or one that TensorRT lacks, while the context is entered."""
    functional = torch.nn.functional

    # By Gather and a sum, mean or maximum; the exporter makes it a loop over a sequence of tensors.
    def embedding_bag(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        rows = functional.embedding(input, weight, None, max_norm, norm_type)
        if input.dim() == 2 and padding_idx is None and per_sample_weights is None:
            return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)
        member = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx
        if input.dim() == 1:
            starts = offsets[:-1] if include_last_offset else offsets
            place = torch.arange(input.shape[0], device=input.device)
            bag = (place >= starts.unsqueeze(1)).sum(0) - 1  # of each row; of bags that start at one place the last
            member = (bag == torch.arange(starts.shape[0], device=input.device).unsqueeze(1)) & member
            if include_last_offset:
                member = member & (place < offsets[-1])
        if mode == "max":
            # All bags have a copy of all rows where offsets cut them: a maximum can't be taken by a product.
            largest = torch.where(member.unsqueeze(-1), rows, -65504.0).amax(-2)  # FP16's lowest
            return torch.where(member.any(-1, keepdim=True), largest, 0.0)
        shares = member.to(rows.dtype)
        if per_sample_weights is not None:
            shares = shares * per_sample_weights
        total = shares @ rows if input.dim() == 1 else (shares.unsqueeze(-1) * rows).sum(-2)
        return total if mode == "sum" else total / member.sum(-1, keepdim=True).clamp(min=1)

    # Over windows (five axes) or without heads (three) as that of samples × heads, all that the exporter knows.
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        if query.dim() == key.dim() == value.dim() == 4 or query.dim() < 3:
            return originals[functional, "scaled_dot_product_attention"](query, key, value, attn_mask, *args, **options)
        heads = 1 if query.dim() == 3 else 2  # the axes, from the last but two on, that stay
        before = torch.broadcast_shapes(*(item.shape[: -1 - heads] for item in (query, key, value)))

        def flat(item: Any) -> Any:
            item = item.expand(*before, *item.shape[-1 - heads :]).flatten(0, len(before) - 1)
            return item.unsqueeze(1) if heads == 1 else item

        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = flat(attn_mask if attn_mask.dim() > heads + 1 else attn_mask.unsqueeze(0))
        query, key, value = flat(query), flat(key), flat(value)
        result = originals[functional, "scaled_dot_product_attention"](query, key, value, attn_mask, *args, **options)
        return (result.squeeze(1) if heads == 1 else result).unflatten(0, before)

    def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "") -> Any:
        apart = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
        if p in (1.0, 2.0):
            return apart.sum(-1) if p == 1.0 else apart.square().sum(-1).sqrt()
        return apart.amax(-1) if p == float("inf") else apart.pow(p).sum(-1).pow(1 / p)

    def cosines(*weights: float) -> Any:
        def window(window_length: int, periodic: bool = True, *given: float, dtype: Any = None, **options: Any) -> Any:
            size = window_length if periodic else window_length - 1
            kind = dtype or torch.get_default_dtype()
            turn = torch.arange(window_length, dtype=kind, device=options.get("device")) * (2 * math.pi / max(size, 1))
            parts = [given[0], -given[1]] if len(given) == 2 else weights
            if window_length == 1:
                return torch.ones_like(turn)
            return sum(weight * torch.cos(place * turn) for place, weight in enumerate(parts))

        return window

    def hamming(
        window_length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any
    ) -> Any:
        return cosines()(window_length, periodic, alpha, beta, **options)

    def rrelu(
        input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Any:
        if training:
            return originals[functional, "rrelu"](input, lower, upper, training, inplace)
        return functional.leaky_relu(input, (lower + upper) / 2)

    def fold(
        input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
    ) -> Any:
        sides, kernel, dilation, padding, stride = (
            (item, item) if isinstance(item, int) else tuple(item)
            for item in (output_size, kernel_size, dilation, padding, stride)
        )
        if input.dim() != 3:
            return originals[functional, "fold"](input, output_size, kernel_size, dilation, padding, stride)
        reach = [space * (size - 1) + 1 for size, space in zip(kernel, dilation)]
        counts = [
            (side + 2 * pad - length) // step + 1 for side, pad, length, step in zip(sides, padding, reach, stride)
        ]
        area = kernel[0] * kernel[1]
        channels = input.shape[1] // area
        pixels = torch.eye(area, dtype=input.dtype, device=input.device).view(area, 1, *kernel)
        rest = [
            side + 2 * pad - length - step * (count - 1)
            for side, pad, length, step, count in zip(sides, padding, reach, stride, counts)
        ]
        blocks = input.reshape(-1, area, *counts)
        # Each place of a block goes to its own pixel, and what meets is added: a transposed convolution.
        whole = functional.conv_transpose2d(blocks, pixels, None, stride, padding, rest, 1, dilation)
        return whole.reshape(-1, channels, *sides)

    def istft(
        input: Any,
        n_fft: int,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: Any = None,
        center: bool = True,
        normalized: bool = False,
        onesided: bool | None = None,
        length: int | None = None,
        return_complex: bool = False,
    ) -> Any:
        if return_complex or onesided is False or input.shape[-2] == n_fft:
            return originals[torch, "istft"](
                input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
            )
        hop, size = hop_length or n_fft // 4, win_length or n_fft
        window = torch.ones(size, device=input.device) if window is None else window
        before = (n_fft - size) // 2
        window = functional.pad(window, (before, n_fft - size - before))

        def added(frames: Any) -> Any:
            """Frames × n_fft where they overlap, hop apart: samples × signal."""
            if n_fft % hop:
                eye = torch.eye(n_fft, dtype=frames.dtype, device=frames.device).unsqueeze(1)
                return functional.conv_transpose1d(frames.transpose(1, 2), eye, stride=hop).squeeze(1)
            parts = frames.unflatten(-1, (n_fft // hop, hop)).unbind(2)
            last = len(parts) - 1
            return sum(functional.pad(part, (0, 0, place, last - place)) for place, part in enumerate(parts)).flatten(1)

        frames = torch.fft.irfft(input, n=n_fft, dim=-2, norm="ortho" if normalized else "backward").transpose(-1, -2)
        frames = frames.unsqueeze(0) if input.dim() == 2 else frames
        weight = added(window.square().expand(1, frames.shape[1], n_fft))
        signal = added(frames * window)
        start = n_fft // 2 if center else 0
        end = n_fft + hop * (frames.shape[1] - 1) - start if length is None else start + length
        signal = signal[:, start:end] / weight[:, start:end]
        if length is not None:  # what the frames don't reach is silent
            signal = functional.pad(signal, (0, length - signal.shape[1]))
        return signal.squeeze(0) if input.dim() == 2 else signal

    def kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
        value, place = (found.select(dim, k - 1) for found in input.sort(dim))
        if keepdim:
            value, place = value.unsqueeze(dim), place.unsqueeze(dim)
        return torch.return_types.kthvalue((value, place))

    def median(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return input.flatten().sort()[0].select(0, (input.numel() - 1) // 2)
        return torch.return_types.median(tuple(kthvalue(input, (input.shape[dim] + 1) // 2, dim, keepdim)))

    def searchsorted(
        sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, **_: Any
    ) -> Any:
        numbers = input if isinstance(input, torch.Tensor) else torch.tensor(input)
        bounds = sorted_sequence.unsqueeze(-2) if sorted_sequence.dim() > 1 else sorted_sequence
        values = numbers.unsqueeze(-1)
        below = bounds <= values if right or side == "right" else bounds < values
        return below.sum(-1).to(torch.int32 if out_int32 else torch.int64)

    def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
        return searchsorted(boundaries, input, out_int32=out_int32, right=right)

    def hypot(input: Any, other: Any) -> Any:
        return (input.square() + other.square()).sqrt()

    def slices(input: Any, size: Any, count: int, dim: int) -> Any:
        """Parts of an open axis (a batch doubled for guidance, two images in one), which the exporter makes a sequence."""
        ends = [*(size * place for place in range(1, count)), input.shape[dim]]
        return tuple(input.narrow(dim, size * place, end - size * place) for place, end in enumerate(ends))

    def chunked(place: Any) -> Any:
        def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
            if isinstance(length := input.shape[dim], torch.SymInt):
                return slices(input, (length + chunks - 1) // chunks, chunks, dim)
            return originals[place, "chunk"](input, chunks, dim)

        return chunk

    def splitting(place: Any) -> Any:
        def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
            size, length = split_size_or_sections, tensor.shape[dim]
            if isinstance(size, torch.SymInt) and isinstance(length, torch.SymInt):
                return slices(tensor, size, -(-length.node.hint // size.node.hint), dim)
            return originals[place, "split"](tensor, size, dim)

        return split

    def subtracted(place: Any, name: str) -> Any:
        def rsub(input: Any, other: Any, **options: Any) -> Any:
            """`1.0 - mask` of an integer mask, whose type the exporter doesn't promote."""
            if isinstance(other, float) and not (
                input.is_floating_point() or input.is_complex() or input.dtype == torch.bool
            ):
                input = input.to(torch.get_default_dtype())
            return originals[place, name](input, other, **options)

        return rsub

    def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
        if mode != "circular" or any(isinstance(size, int) and size < 0 for size in pad):
            return originals[functional, "pad"](input, pad, mode, value)
        for place in range(len(pad) // 2):
            axis, (before, behind) = input.dim() - 1 - place, pad[2 * place : 2 * place + 2]
            start = input.narrow(axis, input.shape[axis] - before, before)
            input = torch.cat([start, input, input.narrow(axis, 0, behind)], axis)
        return input

    instead = {
        (torch, "cdist"): cdist,
        (torch, "searchsorted"): searchsorted,
        (torch, "bucketize"): bucketize,
        **{
            (place, name): made
            for place in (torch, torch.Tensor)
            for name, made in (("median", median), ("kthvalue", kthvalue), ("hypot", hypot), ("istft", istft))
        },
        **{(place, "chunk"): chunked(place) for place in (torch, torch.Tensor)},
        **{(place, "split"): splitting(place) for place in (torch, torch.Tensor)},
        **{(place, name): subtracted(place, name) for place, name in ((torch, "rsub"), (torch.Tensor, "__rsub__"))},
        (torch, "hamming_window"): hamming,
        (torch, "blackman_window"): cosines(0.42, -0.5, 0.08),
        (functional, "rrelu"): rrelu,
        (functional, "fold"): fold,
        (functional, "embedding_bag"): embedding_bag,
        (functional, "scaled_dot_product_attention"): attention,
        (functional, "pad"): pad,
    }
    originals = {(place, name): getattr(place, name) for place, name in instead}
    try:
        for (place, name), function in instead.items():
            setattr(place, name, function)
        yield
    finally:
        for (place, name), function in originals.items():
            setattr(place, name, function)
