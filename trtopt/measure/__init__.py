"""Measuring what came out: agreement with the original model."""
