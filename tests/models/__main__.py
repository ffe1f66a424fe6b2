"""Makes the checkpoints, runs them on our platform and on upstream's, and compares: `make verify-models`.

python -m tests.models [NAME ...]

A name is one of the table, or begins some. The table goes to .verify/models/DEVICE.md, all that was found to
DEVICE.json, what each case printed to logs/. An interrupted run goes on where it was as long as the checkout is the
same; what upstream answers is kept. Exit status: 1 when a case of ours has a fault: a wrong answer, an error
after configuration that upstream does not end with, drafts that change the text, a finding of `gaudi-spec doctor` that
does not fit what happens, or memory written outside of the KV cache.
"""

import argparse
import shutil
import sys

from tests.models import comparison
from tests.models.architectures import Recipe
from tests.models.run import CASES, DEVICES, ROOT, Run

STATE = ROOT / ".verify" / "models"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these, and those that begin so with a * at the end"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="ours (default: %(default)s)")
    parser.add_argument("--no-upstream", action="store_true", help="leave out upstream's CPU platform")
    parser.add_argument("--fresh", action="store_true", help="make every checkpoint anew, and run everything again")
    parser.add_argument("--list", action="store_true", help="only print the names")
    return parser.parse_args()


def chosen(names: list[str]) -> dict[str, Recipe]:
    if not names:
        return CASES
    found = {
        case: recipe
        for case, recipe in CASES.items()
        if any(case == name or (name.endswith("*") and case.startswith(name[:-1])) for name in names)
    }
    if missing := [name for name in names if name not in found and not name.endswith("*")]:
        sys.exit(f"error: no case named {', '.join(missing)}; --list prints them")
    return found


def show(rows: list[comparison.Row], device: str) -> None:
    print(" | ".join(comparison.COLUMNS))
    for row in rows:
        print(" | ".join(comparison.cells(row, limit=70)))
    print()
    for line in comparison.summary(rows):
        print(line)
    path = STATE / f"{device}.md"
    path.write_text(comparison.markdown(rows, f"Models on {device}"))
    print(f"\n{path.relative_to(ROOT)}", flush=True)


def main() -> int:
    options = parse_options()
    cases = chosen(options.names)
    if options.list:
        print("\n".join(cases))
        return 0
    if options.fresh:
        shutil.rmtree(STATE / "checkpoints", ignore_errors=True)
    rows = Run(cases, STATE).rows(options.device, not options.no_upstream)
    show(rows, options.device)
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
