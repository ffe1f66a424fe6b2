"""FP8 scales of a target and its drafter: measured, checked and written; the scripts in calibration/ call it."""
