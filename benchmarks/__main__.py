"""Run one benchmark: `python -m benchmarks NAME [options]`."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from vllm_gaudi_spec.tools.io.command_line import Parser

PROGRAMS = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m benchmarks",
        description="Run one benchmark. `NAME --help` lists its options.",
        epilog="benchmarks:\n" + "\n".join(f"  {path.stem:<18}{summarize(path)}" for path in PROGRAMS),
    )
    parser.add_argument("name", metavar="NAME", choices=[path.stem for path in PROGRAMS], help="which one")
    name = parser.parse_args(arguments[:1]).name
    sys.argv = [f"python -m benchmarks {name}", *arguments[1:]]
    return int(import_module(f"benchmarks.{name}").main() or 0)


def summarize(program: Path) -> str:
    """Return the first line of a program's docstring without importing the program, which would take seconds."""
    return (ast.get_docstring(ast.parse(program.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
