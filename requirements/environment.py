"""Make an environment of its own for what cannot stand beside the rest, with progress; nothing if it is there.

python requirements/environment.py card|clients|docs|vllm-ascend|vllm-gaudi|optimum-habana FOLDER

Made with the running Python, by requirements/install.py. It is made again when what would be installed has changed, and
only where this script made it: a folder with anything else in it stays, and the command ends.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "pyproject.toml"
# On top of a card's image: it sees the image's torch, and pip cannot change that from there. The image has a pip, and
# may lack what would install another.
ON_TOP = {"card": ["--system-site-packages", "--without-pip"]}


def contents(what: str) -> str:
    """A hash over all that decides what such an environment has."""
    digest = hashlib.sha256(f"{sys.version}\0{HERE}\0".encode())
    for path in [*sorted(HERE.glob(f"{what}*.txt")), HERE / "torch.txt", HERE / "install.py", PROJECT]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["card", "clients", "docs", "vllm-ascend", "vllm-gaudi", "optimum-habana"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    stamp, wanted = options.folder / "made-of", contents(options.what)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    if not stamp.is_file() and options.folder.exists() and not is_empty_folder(options.folder):
        print(
            f"error: {options.folder} was not made by this script, so it stays; name another folder, or remove it",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(options.folder, ignore_errors=True)
    print(f"{options.folder}: an environment for {options.what}, once; needs a package index", flush=True)
    # First of all, so that what an interrupted run leaves is known as this script's.
    options.folder.mkdir(parents=True)
    stamp.write_text("unfinished")
    subprocess.run([sys.executable, "-m", "venv", *ON_TOP.get(options.what, []), str(options.folder)], check=True)
    python = str(options.folder / "bin" / "python")
    status = subprocess.run([python, str(HERE / "install.py"), options.what], check=False).returncode
    if status == 0:
        stamp.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
