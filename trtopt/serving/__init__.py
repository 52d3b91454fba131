"""Engines behind Triton Inference Server: model repositories, and a server on one."""
