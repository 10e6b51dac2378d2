#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names in the documents exist: flags in the programs' --help, metrics in the catalog, log lines in the server's sources,
files behind links and headings behind anchors.

Flags: on a line that names one of our programs, each --flag must be in that program's help; on other lines in the help
of any of them. The help texts come from --program NAME=PATH (scripts are found by themselves); without programs that part says that
it was left out. The help is the reference of the flags: in that of the programs of REFERENCE each flag has a topic, a value with its default,
and sentences; their words and those of the scripts pass check_sentences.py.
"""

import argparse
import posixpath
import re
import subprocess

from check_sentences import prose_findings
from lint_support import ROOT, Case, Tree, line_of, report, self_test

SCRIPTS = ["deploy/quickstart.sh", "deploy/install.sh", "tests/torch2.sh", "deploy/pack-server.sh", "deploy/build-wheel.sh",
           "tests/run.sh", "tests/gpu.sh", "tests/bench/run.sh", "tests/lint/tidy.sh",
           "tests/e2e/quickstart_test.py", "tests/bench/digits.py", "tests/bench/training/run.sh", "tests/bench/gpu_targets.py"]
# Programs whose help may need packages that are not there: their flags are read in the sources of their folder.
EXAMPLES = "client/python/examples"
ADDED_FLAG = re.compile(r'add_argument\(\s*"(--[a-z][a-z0-9-]*)"')
# Flags of other people's programs that our documents use.
OTHERS = {"--preset", "--build", "--install", "--prefix", "--test-dir", "--target", "--help", "--version",
          "--nproc",  # torchrun's --nproc_per_node
          "--build-arg", "--cap-drop", "--detach", "--entrypoint", "--format", "--gpus", "--health-cmd", "--memory", "--name", "--network",
          "--no-cache-dir", "--pids-limit", "--read-only", "--rm", "--security-opt", "--stop-timeout"}  # docker's, pip's
FLAG = re.compile(r"(?<![\w-])--(?!gtest_)[a-z][a-z0-9-]*[a-z0-9]")
METRIC = re.compile(r"\bprecondor_[a-z0-9_]+")
SAMPLES = re.compile(r"_(bucket|sum|count)$")  # of a histogram
OTHERS |= {"--namespace", "--create-namespace", "--set", "--skip-tests", "--wait", "--for", "--previous"}  # helm's and kubectl's
OPENING = re.compile(r"# [^\n]+\n\nAfter this page you can ")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#{1,6} +(.*?)[ #]*$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LOG_LINE = re.compile(r"\b(?:log|log line|log says|lines?|a warning,) `[a-z][^`]*`(?: or `[^`]*`)*")
CATALOG = "server/metrics/catalog.h"
OPERATIONS = "docs/operate/operations.md"
PAGES = "docs/operate/"


def _opening(path, text):
    """A page begins with what its reader can do after it."""
    exempt = not path.startswith("docs/") or path.startswith(("docs/develop/adr/", "docs/develop/lab/")) or path == "docs/README.md"
    if not exempt and not OPENING.match(text):
        yield f"{path}:3: the first paragraph must begin with 'After this page you can'"


def _anchors(text):
    """The anchors that GitHub gives the headings of a page: "## A `b`, c" has a-b-c, and the next one a-b-c-1."""
    anchors = set()
    for heading in HEADING.findall(CODE_BLOCK.sub("", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = one = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        number = 0
        while one in anchors:
            number += 1
            one = f"{name}-{number}"
        anchors.add(one)
    return anchors


def _links(tree, path, text):
    for match in LINK.finditer(text):
        target, anchor = match.groups()
        if "://" in target:
            continue
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
        where = f"{path}:{line_of(text, match.start())}: link to {target}"
        if not tree.has(file) and not any(p.startswith(file + "/") for p in tree.paths()):
            yield f"{where}: no such file"
        elif anchor is not None and file.endswith(".md") and anchor not in _anchors(tree.read(file)):
            yield f"{where}#{anchor}: no heading of {file} has this anchor"


def _flags(path, text, helps):
    everywhere = set().union(*helps.values())
    for number, line in enumerate(text.split("\n"), 1):
        named = [name for name in helps if name in line]
        known = helps[named[0]] | OTHERS if len(named) == 1 else everywhere | OTHERS
        for flag in FLAG.findall(line):
            if flag not in known:
                where = f"the help of {named[0]}" if len(named) == 1 else "any program's help"
                yield f"{path}:{number}: {flag} is not in {where}"


def _metrics(tree, metrics):
    """A page for operators names no metric that the catalog does not have."""
    for path in (p for p in tree.paths(".md") if p.startswith(PAGES)):
        text = tree.read(path)
        for match in METRIC.finditer(text):
            if metrics and SAMPLES.sub("", match.group(0)) not in metrics and not match.group(0).endswith("_"):
                yield f"{path}:{line_of(text, match.start())}: {match.group(0)} is not in {CATALOG}"


def _log_lines(tree):
    """A log line that a page for operators quotes is one that the server writes."""
    sources = [tree.read(p) for p in tree.paths(".cc", ".h") if p.startswith("server/")]
    for path in (p for p in tree.paths(".md") if p.startswith(PAGES)):
        text = tree.read(path)
        for match in LOG_LINE.finditer(text):
            for line in re.findall("`([^`]*)`", match.group(0)):
                line = " ".join(line.split())  # a page may wrap it
                if not METRIC.match(line) and not any(f'"{line}' in source for source in sources):
                    yield f"{path}:{line_of(text, match.start())}: no source of server/ has the log line `{line}`"


HEAD = re.compile(r"  (--[a-z][a-z-]*)(=\S+)?(?:  default (.+))?")  # of a flag in a help
REFERENCE = ("precondor-server", "precondorctl", "precondor-perf")


def _reference(name, text):
    """In the help of `name` a flag has a topic, a default if it has a value, and sentences below."""
    topic, lines = "", text.split("\n")
    for line, below in zip(lines, lines[1:]):
        topic = line if re.match(r"[A-Z]", line) else topic if line else ""
        if not (flag := HEAD.match(line)):
            continue
        if HEAD.fullmatch(line) is None or bool(flag[2]) != bool(flag[3]):
            yield f"the help of {name}: expected '  {flag[1]}=VALUE  default DEFAULT', or the flag alone, got '{line}'"
        if not topic or topic.endswith("."):
            yield f"the help of {name}: {flag[1]} has no topic above it"
        if not re.match(r"      [A-Za-z0-9]", below):
            yield f"the help of {name}: {flag[1]} has no sentence below it"
        if re.fullmatch(r"\d{5,}", flag[3] or ""):
            yield f"the help of {name}: the default of {flag[1]} needs a unit, got {flag[3]}"


def _prose(text):
    """The sentences of a help: lines that are indented alike and follow each other are one text."""
    text = text.partition("\nExample")[0]
    for block in re.findall(r"(?:^ {6}\w.*\n)+", text, re.MULTILINE):
        yield block


def _help_texts(texts):
    for name, text in texts.items():
        if name in REFERENCE:
            yield from _reference(name, text)
            blocks = _prose(text)
        else:  # two columns: a flag, a topic and a blank line begin a sentence, and the usage is none
            text = re.sub(r"^(?:usage:.*\n(?: .*\n)*|.*\.\.\.\]?$)", "", text, flags=re.IGNORECASE | re.MULTILINE).partition("\nExample")[0]
            blocks = re.split(r"\n(?=  -|\n|\S)", text) if name != EXAMPLES else []
        for block in blocks:
            yield from (finding for _, finding in prose_findings(f"the help of {name}", block))


def check(tree, texts):
    helps = {name: _flags_of(text) for name, text in texts.items()}
    findings = [*_help_texts(texts)]
    documents = [p for p in tree.paths(".md") if p.startswith("docs/") or "/" not in p]
    metrics = set(re.findall(r'"(precondor_[a-z0-9_]+)"', tree.read(CATALOG))) if tree.has(CATALOG) else set()
    for path in documents:
        text = tree.read(path)
        findings += [*_opening(path, text), *_links(tree, path, text)]
        if helps and path != "docs/develop/gotchas.md":
            findings += _flags(path, text, helps)
    findings += [*_metrics(tree, metrics), *_log_lines(tree)]
    return findings


_HELPS = {"precondor-server": "Role\n  --role=ROLE  default all\n      The process has this role.\n  --help\n      The program ends.\n",
          "precondorctl": "Output\n  --json\n      The command prints JSON.\n", "run.sh": "  --list  what to do\n"}
_TOP = "# A\n\nAfter this page you can do a.\n"
CASES = [
    Case("clean", {"README.md": "[a](docs/operate/operations.md) `precondorctl --json`, [d](docs)\n",
                   CATALOG: '"precondor_updates_total"',
                   "docs/develop/adr/a.md": "# A\n", "docs/develop/lab/a.md": "# A\n", "docs/README.md": "# A\n",
                   OPERATIONS: _TOP + "`precondor-server --role`: precondor_updates_total\n"}, []),
    Case("broken link", {"README.md": "\n[a](docs/none.md)\n"}, ["README.md:2: link to docs/none.md"]),
    Case("link beside the file", {"docs/a.md": _TOP + "[b](b.md)\n", "docs/b.md": _TOP}, []),
    Case("anchors", {"docs/a.md": _TOP + "## The `b`: c-d, e_f\n## [G](b.md) h\n## G h\n[c](#the-b-c-d-e_f), [g](b.md#b), [h](#g-h-1)\n", "docs/b.md": _TOP + "### B\n"}, []),
    Case("no such anchor", {"docs/a.md": _TOP + "[b](b.md#c)\n[a](#b)\n```\n# b\n```\n[x](x.cc#L3)\n", "docs/b.md": _TOP + "## D\n", "docs/x.cc": ""},
         ["docs/a.md:4: link to b.md#c: no heading of docs/b.md", "docs/a.md:5: link to #b: no heading of docs/a.md"]),
    Case("opening", {"docs/a/b.md": "# B\n\nHistory.\n\nAfter this page you can do b.\n"}, ["docs/a/b.md:3: the first paragraph"]),
    Case("unknown flag", {"README.md": "--nonsense\n"}, ["--nonsense is not in any"]),
    Case("flag of another program", {"README.md": "precondor-server --json\n"}, ["--json is not in the help of precondor-s"]),
    Case("a log line", {OPERATIONS: _TOP + "--role: log `job\nends` or `job waits`, the log line `session lost`\n", "server/a.cc": 'Log("job ends"'},
         ["operations.md:4: .* `job waits`", "operations.md:5: .* `session lost`"]),
    Case("any page for operators", {"docs/operate/z.md": _TOP + "precondor_x_total, the log line `session lost`\n", CATALOG: '"precondor_y_seconds"'},
         ["z.md:4: precondor_x_total is not in", "z.md:4: .* `session lost`"]),
    Case("unknown metric", {OPERATIONS: _TOP + "--role precondor_y_seconds precondor_y_seconds_sum precondor_x_total\n",
                            CATALOG: '"precondor_y_seconds"'}, ["precondor_x_total is not in"]),
]


# Helps, and what must be found in them.
HELP_CASES = [
    Case("reference", {"precondor-server": "A b\n  --a=X  default 8 GiB\n      A is a\n      of b.\n  --c\n      C is 3.\n\nExamples\n  precondor-server --d\n"}, []),
    Case("no topic, no default", {"precondor-server": "  --a=X  default 1\n      A is a.\nB\n  --b=X\n      B is b.\n"}, ["--a has no topic", "expected '  --b=VALUE"]),
    Case("no sentence, no unit", {"precondorctl": "B\n  --a=X  default 8589934592\n  --b\n      B is b.\n"}, ["--a has no sentence", "--a needs a unit"]),
    Case("two columns", {"run.sh": "  --a X   one\n          two, and unread as they go\n  --b  c\n"}, ["run.sh: ', and unread as", "as they go"]),
    Case("long", {"precondor-perf": "B\n  --a\n" + "      one two three four five six\n" * 6}, ["the help of precondor-perf: a sentence of 36 words"]),
]


def _help_of(command):
    done = subprocess.run([*command, "--help"], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          timeout=60)
    return done.stdout + done.stderr


def _flags_of(text):
    return set(FLAG.findall(text)) - {"--name"}  # --name=value stands for any flag


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--program", action="append", default=[], metavar="NAME=PATH")
    arguments = parser.parse_args()
    if arguments.self_test:
        findings = self_test(lambda tree: check(tree, _HELPS), CASES)
        findings += self_test(lambda helps: [*_help_texts({name: helps.read(name) for name in helps.paths()})], HELP_CASES)
    else:
        texts = {}
        for program in arguments.program:
            name, path = program.split("=", 1)
            texts[name] = _help_of([path])
        if texts:
            texts.update({s: _help_of([str(ROOT / s)]) for s in SCRIPTS if (ROOT / s).is_file()})
            texts[EXAMPLES] = " ".join(flag for path in (ROOT / EXAMPLES).rglob("*.py")
                                       for flag in ADDED_FLAG.findall(path.read_text(encoding="utf-8")))
        else:
            print("flags were not compared: no --program given")
        findings = check(Tree(), texts)
    report(findings)


if __name__ == "__main__":
    main()
