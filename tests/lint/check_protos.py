#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The .proto files are clean under buf's STANDARD and COMMENTS rules, as proto/buf.yaml says.

buf comes from PyPI (buf-bin) into a virtual environment in the build folder, whose path CTest gives; it is installed
once. Where that fails, the check exits with 77, which CTest shows as skipped.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from lint_support import ROOT, Case, main

BUF = "buf-bin==1.75.0"
SKIPPED = 77
FOLDER = "proto/"


def _buf(venv):
    """Path of the buf program, installed on first use; beside the final place first, so that two runs may race."""
    program = venv / "bin" / "buf"
    if program.exists():
        return program
    venv.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=venv.parent) as fresh:
        place = pathlib.Path(fresh) / "venv"
        for command in ([sys.executable, "-m", "venv", str(place)],
                        [str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", BUF]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"check_protos.py: skipped: cannot install {BUF}: {' '.join(command)}: "
                      f"{(done.stdout + done.stderr).strip()}")
                sys.exit(SKIPPED)
        try:
            os.rename(place, venv)
        except OSError:
            if not program.exists():
                raise
    return program


def check(tree, venv):
    """buf's findings, one a line, with paths from the root."""
    program = _buf(pathlib.Path(venv).absolute())
    with tempfile.TemporaryDirectory() as folder:
        tree.write(folder, [path for path in tree.paths(".proto", "buf.yaml") if path.startswith(FOLDER)])
        where = pathlib.Path(folder) / FOLDER
        if not list(where.rglob("*.proto")):
            return [f"no .proto file below {FOLDER}"]
        home = {**os.environ, "BUF_CACHE_DIR": folder, "HOME": folder}
        done = subprocess.run([str(program), "lint"], cwd=where, env=home, capture_output=True, text=True, check=False)
    lines = [FOLDER + line for line in done.stdout.splitlines()]
    if done.returncode != 0 and not lines:
        lines = [f"buf: exit status {done.returncode}: {done.stderr.strip()}"]
    return lines


_RULES = (ROOT / "proto/buf.yaml").read_text(encoding="utf-8")
_HEAD = '// A file.\nsyntax = "proto3";\npackage precondor.v1;\n'


def _proto(text):
    return {"proto/buf.yaml": _RULES, "proto/precondor/v1/a.proto": _HEAD + text}


CASES = [
    Case("clean", _proto("// M.\nmessage M {\n  // F.\n  string f = 1;\n}\n"), []),
    Case("a field without a comment", _proto("// M.\nmessage M {\n  string f = 1;\n}\n"), ["^proto/.*a.proto:6:.*comment"]),
    Case("a message without a comment", _proto("message M {}\n"), ["comment"]),
    Case("another style of names", _proto("// M.\nmessage M {\n  // F.\n  string fooBar = 1;\n}\n"), ["lower_snake_case"]),
    Case("an enumeration without a zero that says so",
         _proto("// E.\nenum Color {\n  // Red.\n  COLOR_RED = 0;\n}\n"), ["UNSPECIFIED"]),
    Case("does not parse", _proto("// M.\nmessage M {\n  string = 1;\n}\n"), ["a.proto:6"]),
    Case("no protos", {"proto/buf.yaml": _RULES}, ["no .proto file"]),
]

if __name__ == "__main__":
    main(check, CASES, "--venv")
