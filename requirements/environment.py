"""Make an environment of its own for what cannot stand beside the rest, with progress; nothing if it is there.

python requirements/environment.py card|docs|kubernetes|vllm-ascend|vllm-gaudi|optimum-habana FOLDER

Made with the running Python, by requirements/install.py. It is made again when what would be installed has changed, and
only where this script made it: a folder with anything else in it stays, and the command ends.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECTS = [HERE.parent / "pyproject.toml", HERE.parent / "card_emulator" / "pyproject.toml"]
# On top of a card's image: it sees the image's torch, and pip cannot change that from there. The image has a pip, and
# may lack what would install another.
ON_TOP = {"card": ["--system-site-packages", "--without-pip"]}


def contents(what: str) -> str:
    """A hash over all that decides what such an environment has."""
    digest = hashlib.sha256(f"{sys.version}\0{HERE}\0".encode())
    for path in [*sorted(HERE.glob(f"{what}*.txt")), HERE / "torch.txt", HERE / "install.py", *PROJECTS]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["card", "docs", "kubernetes", "vllm-ascend", "vllm-gaudi", "optimum-habana"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    # Held until this process ends: two that make the same one would remove each other's work.
    fcntl.flock(os.open(options.folder.parent, os.O_RDONLY), fcntl.LOCK_EX)
    return make(options.what, options.folder)


def make(what: str, folder: Path) -> int:
    stamp, wanted = folder / "made-of", contents(what)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    if not stamp.is_file() and folder.exists() and not is_empty_folder(folder):
        print(
            f"error: {folder} was not created by this script, so it is kept; name another folder, or remove it",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder}: an environment for {what}, once; needs a package index", flush=True)
    # First of all, so that what an interrupted run leaves is known as this script's.
    folder.mkdir(parents=True)
    stamp.write_text("unfinished")
    subprocess.run([sys.executable, "-m", "venv", *ON_TOP.get(what, []), str(folder)], check=True)
    python = str(folder / "bin" / "python")
    status = subprocess.run([python, str(HERE / "install.py"), what], check=False).returncode
    if status == 0:
        stamp.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
