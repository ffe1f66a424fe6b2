"""FP8 scales of a target and its drafter: measured, checked and written. The scripts beside this folder call it."""
