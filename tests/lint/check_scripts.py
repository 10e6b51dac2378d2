#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shell scripts parse, are executable, stop at errors and pass shellcheck; Python files compile."""

import ast
import os
import subprocess
import tempfile

from lint_support import ROOT, Case, main


def _is_shell(path, text):
    return path.endswith(".sh") or text.startswith(("#!/usr/bin/env bash", "#!/bin/bash", "#!/bin/sh"))


def _check_shell(tree, path, text):
    if "set -euo pipefail" not in text and text.startswith("#!"):
        yield f"{path}: no 'set -euo pipefail'"
    if text.startswith("#!") and tree.on_disk and not os.access(ROOT / path, os.X_OK):
        yield f"{path}: has #! but no run bit"
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as copy:
        copy.write(text)
        copy.flush()
        for command in (["bash", "-n", copy.name], ["shellcheck", "--shell=bash", "--format=gcc", copy.name]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = (done.stdout + done.stderr).replace(copy.name, path).strip().split("\n")
            if done.returncode != 0:
                yield f"{command[0]}: {lines[0]}" + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")


def check(tree):
    findings = []
    for path in tree.paths():
        if path.endswith((".csv", ".svg", ".md", ".cc", ".h", ".cu", ".proto", ".bin", ".json", ".png")):
            continue
        text = tree.read(path)
        if path.endswith(".py"):
            try:
                ast.parse(text, path)
            except SyntaxError as error:
                findings.append(f"{path}:{error.lineno}: {error.msg}")
        elif _is_shell(path, text):
            findings += _check_shell(tree, path, text)
    return findings


_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"
CASES = [
    Case("clean", {"a.sh": _HEAD + 'echo "$1"\n', "a.py": "x = 1\n"}, []),
    Case("does not parse", {"a.sh": _HEAD + "if true; then\n"}, ["^bash: a.sh", "^shellcheck: a.sh"]),
    Case("shellcheck finds it", {"a.sh": _HEAD + "rm $1\n"}, ["^shellcheck: a.sh:3"]),
    Case("goes on after errors", {"a.sh": "#!/usr/bin/env bash\necho x\n"}, ["pipefail"]),
    Case("no suffix", {"hook": "#!/usr/bin/env bash\nset -euo pipefail\nrm $1\n"}, ["^shellcheck: hook:3"]),
    Case("Python does not parse", {"a.py": "def f(:\n"}, ["a.py:1"]),
]

if __name__ == "__main__":
    main(check, CASES)
