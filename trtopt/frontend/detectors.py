"""torchvision's one-stage detectors without their end: what a network computes before boxes are decoded and selected."""

from __future__ import annotations

from typing import Any


def heads(torch: Any, detector: Any) -> Any:
    """A module of what comes before NMS (non-maximum suppression): images → raw box regressions and class scores.

    NMS gives as many boxes as there are, which torch's exporter can't follow. Resizing and normalizing, which the detector does
    by itself, come before this: see `preparation`. Weights of the whole detector fit.

    Args:
        detector: of torchvision's SSD, SSDlite, RetinaNet or FCOS.
    """

    class Heads(torch.nn.Module):  # type: ignore[misc]  # torch is imported where it is needed
        def __init__(self) -> None:
            super().__init__()
            self.model = detector

        def forward(self, images: Any) -> Any:
            features = self.model.backbone(images)
            return self.model.head([features] if isinstance(features, torch.Tensor) else list(features.values()))

    return Heads()


def preparation(detector: Any) -> tuple[tuple[int, int], dict[str, Any]]:
    """Height and width of the images, and the keys of a `Preprocess` that does what the detector's own transform does."""
    transform = detector.transform
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        resize = "stretch"
    else:  # the shorter side of any image; a network of one size takes it for both
        height = width = int(transform.min_size[0])
        resize = "letterbox"
    mean, std = ([float(value) for value in values] for values in (transform.image_mean, transform.image_std))
    size = (int(height), int(width))
    return size, {"resize": resize, "size": list(size), "scale": 1 / 255, "mean": mean, "std": std}
