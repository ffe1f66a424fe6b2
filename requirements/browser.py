"""Make sure that there is a Chromium, for the test that looks at the page of `gaudi-spec report`.

python3 requirements/browser.py    prints its path, after installing Debian's package where there is none

Debian's, because it comes with the libraries it needs, is mended when Chromium is, and is verified by apt. Packages for
Python bring no browser, they download one from elsewhere; those of npm need Node.js first, and libraries all the same.
Only the standard library is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_HOW = "install the package chromium (Debian: apt-get install chromium), or name one in CHROMIUM"
_APT = ("apt-get", "-y", "-qq", "-o", "Dpkg::Use-Pty=0")


def find() -> str | None:
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


def install() -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), ("install", "--no-install-recommends", "chromium")):
        subprocess.run([*_APT, *words], env=environment, stdout=subprocess.PIPE, check=True)


def main() -> int:
    if (found := find()) is None:
        if os.environ.get("CHROMIUM") or os.geteuid() != 0 or shutil.which("apt-get") is None:
            print(f"error: the test of the report's page needs a Chromium: {_HOW}", file=sys.stderr)
            return 1
        print("      installing chromium, once, for the test of the report's page", file=sys.stderr, flush=True)
        try:
            install()
        except subprocess.CalledProcessError as error:
            print(f"error: {' '.join(error.cmd)} failed with {error.returncode}; {_HOW}", file=sys.stderr)
            return 1
        found = find()
    if found is None:  # Ubuntu's package is only a door to snap
        print(f"error: its package brought no Chromium: {_HOW}", file=sys.stderr)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
