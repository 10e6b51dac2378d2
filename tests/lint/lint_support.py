# SPDX-License-Identifier: Apache-2.0
"""The frame of every lint: the tree it looks at, and a command line with a self-test.

A lint is a function check(tree) -> list of findings, and a list of Case: small trees with what must be found in
them. A lint whose self-test cannot make it fail is worth nothing, so CTest runs both.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Tree:
    """Files by path relative to the root. In self-tests `files` gives their text and there is no disk."""

    def __init__(self, files=None):
        self._files = files
        self.on_disk = files is None

    def paths(self, *suffixes):
        if not self.on_disk:
            names = sorted(self._files)
        else:
            # Untracked files count as well, unless ignored: they are about to be committed.
            listed = subprocess.run(
                ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                check=True, capture_output=True, text=True).stdout
            names = sorted(n for n in set(listed.split("\0")) if n and (ROOT / n).is_file())
        return [n for n in names if not suffixes or n.endswith(suffixes)]

    def read(self, path):
        if not self.on_disk:
            return self._files[path]
        return (ROOT / path).read_text(encoding="utf-8")

    def has(self, path):
        return path in self._files if not self.on_disk else (ROOT / path).is_file()

    def write(self, folder, paths):
        """Writes copies of the files into a folder, for a tool that reads files."""
        for path in paths:
            copy = pathlib.Path(folder) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(self.read(path), encoding="utf-8")


@dataclasses.dataclass
class Case:
    """A tree and, in order, a regular expression for each finding that it must give; none: it must be clean."""

    name: str
    files: dict
    findings: list


def without_comments(text):
    """C++ text with comments and the inside of string literals blanked; lines keep their numbers."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)

    def blank(match):
        found = match.group(0)
        if found[0] == '"':
            return '""'
        if found[0] == "'":
            return "' '"
        return "\n" * found.count("\n")

    return pattern.sub(blank, text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def compile_cuda(nvcc, flags, source, object_file):
    """The finished run of nvcc. ccache, where it is installed, keeps the object and what ptxas says."""
    ccache = shutil.which("ccache")
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    command = [*([ccache] if ccache else []), str(nvcc), "-std=c++20", "--extended-lambda", "--expt-relaxed-constexpr", "-c", f"-I{ROOT}",
               "-Xptxas", "-v", *flags, "-o", str(object_file), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def self_test(check, cases):
    failures = []
    if not any(case.findings for case in cases):
        failures.append("the self-test has no case that must be refused")
    for case in cases:
        found = check(Tree(case.files))
        expected = list(case.findings)
        if len(found) != len(expected) or not all(re.search(e, f) for e, f in zip(expected, found)):
            failures.append(f"case '{case.name}': expected {expected}, found {found}")
    return failures


def main(check, cases, *required):
    """The command line of a lint. `check` gets the values of the `required` options behind the tree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true", help="check the lint itself")
    for option in required:
        parser.add_argument(option, required=True)
    arguments = vars(parser.parse_args())
    tests_itself = arguments.pop("self_test")

    def check_with(tree):
        return check(tree, *arguments.values())

    report(self_test(check_with, cases) if tests_itself else check_with(Tree()))


def report(findings):
    """Prints the findings, and ends the program."""
    for finding in findings:
        print(finding)
    print(f"{pathlib.Path(sys.argv[0]).name}: {len(findings)} finding(s)")
    sys.exit(1 if findings else 0)
