#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plain sentences: their length, the size of table cells, and constructions that hide the subject of a sentence.

A sentence of the pages, of the HELP of a metric and of a program's --help has at most 30 words, and a table cell at most 200
characters. HIDING lists constructions that no document and no source may have, and HIDING_IN_PROSE those that prose may not have.
check_docs.py runs prose_findings over the programs' --help.
"""

import re

from lint_support import Case, line_of, main

MOST_WORDS = 30
MOST_CELL = 200  # characters
PAGES = ("docs/", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NAMES = "docs/develop/promises.md"  # lists names of tests
CATALOG = "server/metrics/catalog.h"
ENTRY = re.compile(r'\{"(precondor_\w+)", MetricType::k\w+, "[^"]*",\s*((?:"[^"]*"\s*)+)[,}]')
HISTORY = ("docs/develop/adr/", "docs/develop/lab/", "CHANGELOG.md", "tests/lint/check_sentences.py", "tests/lint/check_docs.py")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto", ".cmake", "CMakeLists.txt", ".yaml", ".yml", ".md")
BEGIN = r"(?:^|[.:;(]\s+|//+\s+|#\s+|[\"`] ?)"  # of a sentence
# A construction, and what to write in its place.
HIDING = [
    (BEGIN + r"[Ww]ho (?:may|can|must|has|reaches|connects|begins|gets|holds|is given)\b(?![^.]*(?:\?|\bwhat\b))", "name the subject: 'each client that', 'a rank that'"),
    (r",\s+and un\w+ as\b", "a sentence with a subject"),
    (r",\s+(?:and )?by what\b", "name it: 'by decision', 'by the cost'"),
    (r"\b[Ww]here that is not\b", "'otherwise', or a sentence with the condition"),
    (r"\bas (?:it|they) (?:come|go)(?:es|s)?\b", "'at once', 'line by line', or a sentence with a subject"),
    (r"\bthat there (?:is|are)\b(?=\s*(?:not\b|[.,;:)\"']))", "leave it out, or say where it exists"),
    (r"\bthat (?:is|are) there\b(?! (?:a|an|no)\b)", "'that exists', 'existing'"),
    (r"\b(?:for want of|without measure|to the brim|in whatever way)\b", "'without', 'unlimited', 'full', 'for any reason'"),
    (r"\bhowever (?:it|they) (?:do|does|ends?)\b", "'for any reason'"),
]
# A clause that stands for a noun at the beginning of a sentence: "What is left of it waits."
HIDING_IN_PROSE = [
    (r"(?:^|[.:;(]\s+)(?:What|Whatever|Who) (?:is|are|was|has|have|comes?|does|may|can|it|the|a|they|no|of)\b[^.?:]*(?:[.]|$)", "begin with the subject"),
]
# The same, or a part of a sentence, at the beginning of a comment of the tests.
OPENING = [(r'^[ \t]*(?://+|#|""") ?(?:What|Whatever|Who|Of|Where) [^\n?]*$', "begin with the subject")]
FENCE = re.compile(r"^```.*?^```|^ {4}.*?$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"``[^`].*?``|`[^`\n]*`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?:])[\")]*\s+|(?<=[.!?:])$")
WORD = re.compile(r"[A-Za-z][\w'/-]+")  # a letter alone and a sign are of a formula
MARK = re.compile(r"^\s*(?:[-*#>]+|\d+\.)\s+")  # of a list item, a heading or a quotation


def _found(constructions, text):
    for pattern, instead in constructions:
        for match in re.finditer(pattern, text, re.MULTILINE):
            yield match.start(), f"'{' '.join(match.group(0).split())[:60]}': write {instead}"


def _sentences(text):
    """Each sentence with its place. Blank lines, list items, headings and rows of tables end a sentence."""
    for block in re.finditer(r"(?:(?!\n\s*(?:\n|[-*|#]|\d+\. )).)+.?", text, re.DOTALL):
        start = block.start()
        for sentence in END.split(block.group(0)):
            start = text.find(sentence, start)
            yield start + len(sentence) - len(sentence.lstrip()), MARK.sub("", sentence)


def prose_findings(where, text):
    """Returns the findings in a text of plain sentences. `where` has a line or a name."""
    for place, sentence in _sentences(text):
        if (words := len(WORD.findall(sentence))) > MOST_WORDS:
            yield place, f"{where}: a sentence of {words} words, at most {MOST_WORDS}: {' '.join(sentence.split()[:8])} ..."
    for place, finding in (*_found(HIDING, text), *_found(HIDING_IN_PROSE, text)):
        yield place, f"{where}: {finding}"


def _blank(match):
    return re.sub(r"[^\n]", "x", match.group(0))


def _page(path, text):
    text = QUOTED.sub(_blank, FENCE.sub(lambda m: "\n" * m.group(0).count("\n"), text))
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"^#+ .*$", lambda m: m.group(0) + ".", text, flags=re.MULTILINE)
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.startswith("|")]
    for number, row in rows:
        for cell in row.strip("|").split("|"):
            cell = LINK.sub(r"\1", cell.strip())
            if len(cell) > MOST_CELL:
                yield f"{path}:{number}: a cell of {len(cell)} characters, at most {MOST_CELL}: {cell[:40]} ..."
            yield from (finding for _, finding in prose_findings(f"{path}:{number}", cell))
    prose = LINK.sub(r"\1", re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))
    for place, finding in prose_findings("", prose):
        yield f"{path}:{line_of(prose, place)}{finding}"


def check(tree):
    findings = []
    for path in tree.paths(".md"):
        if path.startswith(PAGES) and path != NAMES:
            findings += _page(path, tree.read(path))
    for name, texts in ENTRY.findall(tree.read(CATALOG)) if tree.has(CATALOG) else ():
        text = "".join(re.findall(r'"([^"]*)"', texts))
        findings += [finding for _, finding in prose_findings(f"{CATALOG}: {name}", text)]
    for path in tree.paths(*SOURCES):
        text = "" if path.startswith(HISTORY) else tree.read(path)
        rules = HIDING + OPENING if path.startswith("tests/") else HIDING
        findings += [f"{path}:{line_of(text, place)}: {finding}" for place, finding in _found(rules, text)]
    return findings


LONG = "The server " + "really " * 28 + "waits"
METRIC = '{"precondor_a_total", MetricType::kCounter, "train_job",\n "%s"},'
CASES = [
    Case("clean", {"docs/use/a.md": f"# A\n\nThe shard waits. [It]({'a' * 300}) {'sees ' * 20}.\n\n- {'one ' * 20}\n## Formula\n{'x + ' * 40}{'two ' * 28}\n- {'two ' * 20}\n\n| {'x' * 200} |\n",
                   NAMES: LONG + ".\n", "docs/develop/a.md": f"# A\n\n    {LONG}\n", CATALOG: METRIC % "Bytes of answers"}, []),
    Case("long", {"docs/use/a.md": f"# A\n\n{LONG}.\n\n```\n{LONG}.\n```\n- {LONG}\n", "README.md": f"| `{'x' * 201}` |\n| {LONG} |\n"},
         ["README.md:1: a cell of 203", "README.md:2: a cell of 212", "README.md:2: a sentence of 31", "a.md:3: a sentence of 31 words", "a.md:8: a sentence of 31"]),
    Case("help of a metric", {CATALOG: METRIC % (LONG + '"\n " always')}, ["catalog.h: precondor_a_total: a sentence of 32"]),
    Case("who as a subject", {"server/a.h": "// Empty: who may connect may call everything.\n// Who gets a path.\n"}, ["a.h:1: ': who may'", "a.h:2: .*Who gets"]),
    Case("questions", {"README.md": "Who can call it? What is a layer? The clients who can connect.\n"}, []),
    Case("clauses without a subject", {"a.cc": 'Help("in parts as they come, and unread as they go")'}, ["and unread as", "'as they come", "'as they go"]),
    Case("metric in dialect", {CATALOG: METRIC % "Steps, by what ranks get and, where that is not preconditioned, why"},
         ["precondor_a_total: ', by what'", "total: 'where that is not'", "catalog.h:2: ', by what'", "catalog.h:2: 'where that is not'"]),
    Case("existence", {"a.py": "# Rows that there are not; it says that there are none, and one that is there, for\n# want of room.\n"}, ["'that there are", "that is there"]),
    Case("a clause in place of a noun", {"docs/operate/a.md": "The log is full. What is left of a step waits.\n"}, ["a.md:1: '. What is left"]),
    Case("a comment that begins with a clause", {"tests/e2e/a.py": 'x = 1\n# What is left.\n"""What waits."""\n# What is it?\n', "tests/sim/a.h": "  // Of all ranks.\n// Often.\n",
                                                     "server/a.cc": "// What is left.\n"},
         ["a.py:2: '# What is left", "a.py:3: '\"\"\"What waits", "a.h:1: '// Of all"]),
    Case("history", {"docs/develop/adr/0001-a.md": "By what it costs.\n"}, []),
]

if __name__ == "__main__":
    main(check, CASES)
