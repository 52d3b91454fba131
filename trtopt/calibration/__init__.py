"""INT8 calibration: one exact pass over real inputs, then a threshold per tensor."""
