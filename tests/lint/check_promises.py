#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/develop/promises.md: each promise names tests that exist, and each claim of the pages that make promises has an entry.

An entry is a row of a table of that page: the promise, and the tests that hold it, each in `backquotes`:
  `name`           a test of CTest, registered by a CMakeLists.txt of tests/
  `name: a, b`     functions of that test's Python script
  `Suite.A, B`     cases of GoogleTest
Under "Held by no test" the second cell says why there is none.

A claim is a row of a table or a bullet of the pages in CLAIMS. The first cell of its entry quotes its beginning, without
the marks of Markdown, in "straight quotes". A quotation that begins no claim, or several, is refused. Names come from the text of the
sources: nothing is built or run.
"""

import itertools
import re

from lint_support import Case, main, without_comments

PAGE = "docs/develop/promises.md"
MAX_BYTES = 19_000
UNHELD = "Held by no test"
# Pages, and the headings whose claims need an entry; none: all.
CLAIMS = {"README.md": {"Status"}, "docs/operate/operations.md": None, "docs/operate/failures.md": None,
          "docs/operate/kubernetes.md": None}

GTEST = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", re.MULTILINE)
QUOTED = re.compile(r'"([^"]+)"')
SPAN = re.compile(r"`([^`]*)`")


# Markdown.

def _plain(text):
    return re.sub(r'[`*"]', "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)).replace("\\|", "|").strip()


def _rows(text):
    """(line, heading, cells) of each row of a table, and ("- ..." as one cell) of each bullet."""
    heading, in_code, lines = "", False, text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            in_code = not in_code
        elif in_code:
            continue
        elif line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("- "):
            yield number, heading, [line[2:]]
        elif line.startswith("|") and not re.match(r"\|[\s:|-]+$", line):
            if not (number < len(lines) and re.match(r"\|[\s:|-]+$", lines[number])):  # the line of a header
                yield number, heading, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# CMake, as far as the registration of tests needs it.

def _commands(text):
    """(name, [(argument, quoted)]) of each command."""
    token = re.compile(r'#[^\n]*|"((?:\\.|[^"\\])*)"|([()])|([^\s()"#]+)')
    name, depth, arguments = None, 0, []
    for match in token.finditer(text):
        quoted, bracket, word = match.groups()
        if depth == 0:
            if bracket == "(":
                depth, arguments = 1, []
            elif word:
                name = word.lower()
        elif bracket:
            depth += 1 if bracket == "(" else -1
            if depth == 0:
                yield name, arguments
        elif quoted is not None:
            arguments.append((quoted, True))
        elif word:
            arguments.append((word, False))


class _Registrations:
    """The tests that CMake files register, with the Python scripts in their commands."""

    def __init__(self):
        self.tests = {}
        self._functions = {}

    def run(self, commands, variables):
        commands = list(commands)
        position = 0
        while position < len(commands):
            name, arguments = commands[position]
            position += 1
            if name in ("function", "foreach", "if"):
                length = self._block(commands[position:], name)
                body, position = commands[position:position + length], position + length + 1
                if name == "if":  # one that compares text counts; all branches of others are taken
                    if self._holds(self._expand(arguments, variables), variables):
                        self.run(body, variables)
                elif name == "function":
                    self._functions[arguments[0][0].lower()] = ([a for a, _ in arguments[1:]], body)
                else:
                    for item in self._expand(arguments[1:], variables):
                        self.run(body, {**variables, arguments[0][0]: item})
                continue
            values = self._expand(arguments, variables)
            if name == "set" and values:
                variables[values[0]] = ";".join(values[1:])
            elif name == "string" and values[:1] == ["REPLACE"] and len(values) == 5:
                variables[values[3]] = values[4].replace(values[1], values[2])
            elif name == "add_test" and values[:1] == ["NAME"]:
                self.tests.setdefault(values[1], set()).update(v for v in values if v.endswith(".py"))
            elif name in self._functions:
                parameters, body = self._functions[name]
                local = {**variables, **dict(zip(parameters, values)), "ARGN": ";".join(values[len(parameters):])}
                self.run(body, local)

    @staticmethod
    def _holds(words, variables):
        negated = words[:1] == ["NOT"]
        words = words[negated:]
        if len(words) != 3 or words[1] != "STREQUAL":
            return True
        return (variables.get(words[0], words[0]) == words[2]) != negated

    @staticmethod
    def _block(commands, kind):
        depth = 1
        for length, (name, _) in enumerate(commands):
            depth += (name == kind) - (name == "end" + kind)
            if depth == 0:
                return length
        return len(commands)

    @staticmethod
    def _expand(arguments, variables):
        values = []
        for text, quoted in arguments:
            text = re.sub(r"\$\{(\w+)\}", lambda m: variables.get(m.group(1), ""), text)
            values += [text] if quoted else [part for part in text.split(";") if part]
        return values


def _registered(tree):
    """Scripts by the name of the test that runs them."""
    registrations = _Registrations()
    files = tree.paths("CMakeLists.txt", ".cmake")
    for path in sorted(files, key=lambda p: not p.endswith(".cmake")):  # which define functions for the others
        if path.startswith(("tests/", "deploy/cmake/")):
            folder = path.rpartition("/")[0]
            registrations.run(_commands(tree.read(path)),
                              {"CMAKE_CURRENT_SOURCE_DIR": folder, "PROJECT_SOURCE_DIR": "."})
    return {name: {s.removeprefix("./") for s in scripts} for name, scripts in registrations.tests.items()}


def _unknown(name, registered, cases, functions):
    """Returns the parts of a name in backquotes that do not exist."""
    if re.fullmatch(r"\w+", name):
        if name not in registered:
            yield f"no test {name} in CTest"
        return
    if match := re.fullmatch(r"(\w+): (\w+(?:, \w+)*)", name):
        test, known = match.group(1), functions
        if test not in registered:
            yield f"no test {test} in CTest"
            return
        missing = [c for c in match.group(2).split(", ") if not any(c in known(s) for s in registered[test])]
        yield from (f"no function {c} in the script of {test}" for c in missing)
    elif match := re.fullmatch(r"(\w+)\.(\w+(?:, \w+)*)", name):
        for case in match.group(2).split(", "):
            if (match.group(1), case) not in cases:
                yield f"no case {match.group(1)}.{case}"
    else:
        yield f"`{name}` has none of the forms of a test's name"


def check(tree):
    if missing := [page for page in (PAGE, *CLAIMS) if not tree.has(page)]:
        return [f"{page} is missing" for page in missing]
    text = tree.read(PAGE)
    findings = []
    if len(text.encode()) > MAX_BYTES:
        findings.append(f"{PAGE}: {len(text.encode())} bytes, at most {MAX_BYTES}")
    registered = _registered(tree)
    cases = set(itertools.chain.from_iterable(
        GTEST.findall(without_comments(tree.read(p))) for p in tree.paths(".cc", ".h") if p.startswith("tests/")))
    read = {}

    def functions(script):
        if script not in read:
            source = tree.read(script) if tree.has(script) else ""
            read[script] = set(re.findall(r"^\s*def (\w+)\(", source, re.MULTILINE))
        return read[script]

    claims = [(page, number, _plain(" ".join(cells)))
              for page, headings in CLAIMS.items()
              for number, heading, cells in _rows(tree.read(page)) if headings is None or heading in headings]
    matched = set()
    for number, heading, cells in _rows(text):
        where = f"{PAGE}:{number}"
        if len(cells) != 2:
            findings.append(f"{where}: an entry is a row of two cells: the promise, and what holds it")
            continue
        for quotation in QUOTED.findall(SPAN.sub("", cells[0])):
            begun = [claim for claim in claims if claim[2].startswith(_plain(quotation))]
            matched.update(begun)
            if len(begun) != 1:
                findings.append(f'{where}: "{quotation}" begins {len(begun)} claims, expected one')
        if heading == UNHELD:
            if not cells[1]:
                findings.append(f"{where}: no reason")
            continue
        names = SPAN.findall(cells[1])
        if not names or SPAN.sub("", cells[1]).strip(", "):
            findings.append(f"{where}: expected names of tests in backquotes, and no more, in the second cell")
        findings += [f"{where}: {what}" for name in names for what in _unknown(name, registered, cases, functions)]
    findings += [f'{page}:{number}: no entry in {PAGE} quotes the beginning of "{claim[:60]}"'
                 for page, number, claim in claims if (page, number, claim) not in matched]
    return findings


_HEAD = "| promise | held by |\n|---|---|\n"
_SOURCES = {
    "deploy/cmake/A.cmake": "function(test_of name)\n  cmake_parse_arguments(ARG \"\" \"\" \"SRCS\" ${ARGN})\n"
                            "  add_test(NAME ${name} COMMAND ${name})\nendfunction()\n",
    "tests/CMakeLists.txt": "test_of(core_test SRCS a_test.cc)  # add_test(NAME commented COMMAND a)\n"
                            "foreach(name faults \"restart\")\n  add_test(NAME python_${name}\n"
                            "    COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/${name}_test.py)\nendforeach()\n"
                            "function(suite name filter)\n  if(NOT filter STREQUAL \"*\")\n    add_test(NAME ${name}_all COMMAND a)\n"
                            "  endif()\nendfunction()\nsuite(one \"*\")\nsuite(two A*)\n",
    "tests/a_test.cc": "TEST_F(ShardTest, Restarts) {}\n// TEST(ShardTest, Sleeps) {}\nTEST(ShardTest,\n     Refuses) {}\n",
    "tests/faults_test.py": "class A:\n    def test_a(self):\n        pass\n    def test_b(self):\n        pass\n",
    "docs/operate/operations.md": "",
    "docs/operate/failures.md": "# Failures\n## Workers\n| failure | what |\n|---|---|\n| a `shard` ends | exact |\n| a shard is lost | not |\n"
                          "```\n| no | row |\n```\n- A **full** disk\n",
    "docs/operate/kubernetes.md": "",
    "README.md": "| a table | of |\n|---|---|\n| no | claim |\n## Status\n| part | state |\n|---|---|\n| methods | six |\n",
}
_HELD = '| "methods", "a shard ends", "a shard is lost", "A full disk" | `core_test` |\n'


def _case(name, page, findings):
    return Case(name, {**_SOURCES, PAGE: page}, findings)


CASES = [
    _case("each form of a name", _HEAD + _HELD + "| It lasts | `python_faults: test_a, test_b`, `python_restart`, `two_all`, "
          "`ShardTest.Restarts, Refuses` |\n", []),
    Case("no page", {"README.md": "", "docs/operate/operations.md": "", "docs/operate/failures.md": ""}, ["docs/develop/promises.md is missing", "docs/operate/kubernetes.md is missing"]),
    _case("a claim without a test", _HEAD + _HELD + "| It lasts | |\n", ["promises.md:4: expected names of tests"]),
    _case("words in place of a test", _HEAD + _HELD + "| It lasts | `core_test`, mostly |\n", ["expected names of tests"]),
    _case("an unknown CTest", _HEAD + _HELD + "| It lasts | `soak_test`, `commented`, `one_all`, `none: test_a` |\n",
          ["promises.md:4: no test soak_test", "no test commented", "no test one_all", "no test none"]),
    _case("unknown cases", _HEAD + _HELD + "| It lasts | `python_faults: test_a, test_c`, `core_test: Restarts`, `python_restart: test_a` |\n",
          ["no function test_c in the script of python_faults", "no function Restarts in the script of core_test", "no function test_a"]),
    _case("unknown cases of GoogleTest", _HEAD + _HELD + "| It lasts | `ShardTest.Restarts, Stays`, `ShardTest.Sleeps` |\n",
          ["no case ShardTest.Stays", "no case ShardTest.Sleeps"]),
    _case("no form of a name", _HEAD + _HELD + "| It lasts | `tests/faults_test.py` |\n", ["none of the forms"]),
    _case("claims without an entry", _HEAD + '| "a shard ends" | `core_test` |\n',
          ['README.md:7: no entry in .* quotes the beginning of "methods six"', 'failures.md:6: .*"a shard is lost not"',
           'failures.md:10: .*"A full disk"']),
    _case("a quotation of nothing", _HEAD + _HELD + '| "a shard begins" | `core_test` |\n', ['"a shard begins" begins 0 claims']),
    _case("a quotation of several", _HEAD + _HELD + '| "a shard" | `core_test` |\n', ['"a shard" begins 2 claims']),
    _case("held by none", _HEAD + _HELD + f"## {UNHELD}\n| claim | reason |\n|---|---|\n| It lasts | too long |\n| It is fast | |\n",
          ["promises.md:8: no reason"]),
    _case("another form of an entry", _HEAD + _HELD + "- It lasts: `core_test`\n", ["promises.md:4: an entry is a row"]),
    _case("a page that is too long", _HEAD + _HELD + "a" * MAX_BYTES + "\n", ["bytes, at most"]),
]


if __name__ == "__main__":
    main(check, CASES)
