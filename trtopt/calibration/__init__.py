"""Scales from real inputs: observe once, choose thresholds, keep the histograms."""
