"""PyTorch to ONNX: export()."""
