"""The only room that makes ONNX Runtime sessions."""
