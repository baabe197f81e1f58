"""``python -m rose_compiler``: the command line."""

from __future__ import annotations

from rose_compiler.cli import app

if __name__ == "__main__":
    app(prog_name="rose-compiler")
