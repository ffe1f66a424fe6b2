"""What a user runs before serving: FP8 scales, and how far to speculate; the scripts in calibration/ call it."""
