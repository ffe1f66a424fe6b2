"""Make an environment of its own for what cannot stand beside the rest, with progress; nothing if it is there.

python requirements/environment.py docs|vllm-ascend FOLDER

Made with the running Python, by requirements/install.py. It is made anew when what would be installed has changed.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent / "pyproject.toml"


def contents(what: str) -> str:
    """A hash over all that decides what such an environment has."""
    digest = hashlib.sha256(f"{sys.version}\0{HERE}\0".encode())
    for path in [*sorted(HERE.glob(f"{what}*.txt")), HERE / "torch.txt", HERE / "install.py", PROJECT]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["docs", "vllm-ascend"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    stamp, wanted = options.folder / "made-of", contents(options.what)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    shutil.rmtree(options.folder, ignore_errors=True)
    print(f"{options.folder}: an environment for {options.what}, once; needs a package index", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(options.folder)], check=True)
    python = str(options.folder / "bin" / "python")
    status = subprocess.run([python, str(HERE / "install.py"), options.what], check=False).returncode
    if status == 0:
        stamp.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
