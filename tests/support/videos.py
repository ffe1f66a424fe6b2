"""Video files."""

from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np


def video(width: int = 84, height: int = 56, frames: int = 4, fps: int = 4) -> bytes:
    """Return an AVI of noise with JPEG frames. With 0 or 1 `frames` none of them can be decoded."""
    noise = np.random.default_rng(width * frames)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.avi"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), fps, (width, height))
        assert writer.isOpened()
        for _ in range(frames):
            writer.write(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        writer.release()
        return path.read_bytes()
