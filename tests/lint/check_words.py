#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plain English: words and phrases that documents and sources must not use.

The lint reads all documents and sources of the tree, but not docs/develop/adr and docs/develop/lab, which are history. In documents, text
in code blocks and in `backquotes` is exempt, because it quotes programs.

RETIRED lists names that a standard term has replaced. No file but those of history has one, code included.

identifier_parts.txt has the words from which the product's types (classes, structs, enums, messages, services) are named.
"""

import re

from lint_support import Case, line_of, main

# A word or a phrase, and what to write in its place. A phrase also matches across the end of a line.
BANNED = [
    ("somebody", "name the worker, the shard, the process or the operator"),
    ("someone", "name the worker, the shard, the process or the operator"),
    ("anybody", "name the worker, the shard, the process or the operator"),
    ("everybody", "name the workers, the ranks or the shards"),
    ("nobody", "'no worker', 'no rank', 'no process'"),
    ("whoever", "'each worker that', 'a process that'"),
    ("whosoever", "'each worker that', 'a process that'"),
    ("his", "'its', or the name"),
    ("him", "'it', or the name"),
    ("himself", "'itself', or the name"),
    ("such a one", "repeat the name"),
    ("as ever", "'as before', or leave it out"),
    ("in vain", "'without effect', or say what failed"),
    ("is not there", "'is missing', 'does not exist'"),
    ("puts? off", "'defer', 'deferred'"),
    ("whomever", "'any thread', 'any process'"),
    ("what is there", "'what exists', 'the features'"),
    ("what comes of it", "'the result', 'the error'"),
    ("the same for", "repeat what holds"),
    ("for good", "'permanently'"),
    ("for ever", "'without limit', 'forever'"),
    ("thereby", "'so', 'which'"),
    ("whereby", "'by which', 'where'"),
    ("wherein", "'in which'"),
    ("therein", "'in it', or the name"),
    ("in the meantime", "'meanwhile', 'until then'"),
    ("needless", "'already answered', 'unnecessary'"),
    ("homeless", "'unplaced'"),
    ("keepsakes?", "'retransmit buffer'"),
    ("laggards?", "'straggler'"),
    ("culprit", "'failing rank'"),
    ("heirs?", "'takeover target'"),
    ("went back", "'rolled back', 'returned'"),
    ("gone by then", "say what ended"),
    ("without a word", "'without closing its connections'"),
]
HISTORY = ("docs/develop/adr/", "docs/develop/lab/")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto", ".cmake", "CMakeLists.txt", ".yaml", ".yml", ".md")
EXEMPT = ("tests/lint/check_words.py",)
# A part of an identifier, and the name in its place.
RETIRED = {
    "Keepsakes": "RetransmitBuffer",
    "HandedFactors": "FactorUpdate",
    "DeviceCourier": "DeviceSendQueue",
    "Parcel": "PendingSend (client), PackedUpload (kernels/cuda)",
    "went_back": "rollback_epoch, rollback_step",
    "goes_back_to": "rollback_step",
    "memory_id": "shard_generation",
    "MEMORY_LOST": "STATE_LOST",
    "MemoryLost": "StateLost",
    "Laggard": "Straggler",
    "PromiseRecord": "LeaseRecord",
    "Namesake": "SameNameSession",
    "KnowsProducts": "SupportsPrecision",
    "CheckHeader": "AdmitContribution",
    "CutBefore": "SnapshotStepBefore",
    "LeadRecord": "LeaderRecord",
    "SettleOnce": "MarkAnsweredOnce",
    "SettlesBy": "RetryRefusalsUntil",
    "SettledStep": "StepOutcome",
    "SettleFactors": "ReconcileFactors",
    "SettleQuarantine": "CompleteQuarantine",
    "SettleSnapshots": "CompleteSnapshots",
    "TakeLead": "BecomeLeader",
    "coordinator_turn": "session_lock",
    "place_freed_": "entry_freed_",
    "stands_by": "standby",
}
PARTS = "tests/lint/identifier_parts.txt"
PRODUCT = ("server/", "client/", "kernels/", "proto/")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]+")
# Patterns of a type's definition, by the end of its file's name.
TYPE = {
    (".h", ".cc", ".cu", ".cuh"): re.compile(
        r"\b(?:class|struct|union|enum(?: class)?)\s+(?:[A-Z_]+(?:\([^)]*\))?\s+|alignas\([^)]*\)\s*)*([A-Z][\w:]*)"
        r"(?:\s+final)?(?:\s*:[^;{}]*)?\s*\{"),
    (".py",): re.compile(r"^\s*class\s+(\w+)", re.MULTILINE),
    (".proto",): re.compile(r"^\s*(?:message|enum|service)\s+(\w+)", re.MULTILINE),
}
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"``[^`].*?``|`[^`\n]*`")
# Between the words of a phrase: white space, and at the end of a line what begins the next line of a comment.
GAP = r"(?:[ \t]+|[ \t]*\n[ \t]*(?://+|#+|\*|>)?[ \t]*)"


# Each phrase with the words that a text must have before it is searched: one pattern of all of them takes ten times as long.
PATTERNS = [({word for word in phrase.split(" ") if word.isalpha()}, re.compile(rf"\b{GAP.join(phrase.split(' '))}\b", re.IGNORECASE), instead)
            for phrase, instead in BANNED]
RETIRED_PATTERN = re.compile("|".join(RETIRED))


def _blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def findings_in(path, text):
    if path.endswith(".md"):
        text = QUOTED.sub(_blank, FENCE.sub(_blank, text))
    words = set(re.findall("[a-z]+", text.lower()))
    found = [(match.start(), match.group(0), instead) for needed, pattern, instead in PATTERNS if needed <= words
             for match in pattern.finditer(text)]
    for place, word, instead in sorted(found):
        yield f"{path}:{line_of(text, place)}: '{re.sub(GAP, ' ', word)}': write {instead}"


def retired_names_in(path, text):
    for match in RETIRED_PATTERN.finditer(text):
        yield f"{path}:{line_of(text, match.start())}: '{match.group(0)}': the name is {RETIRED[match.group(0)]}"


def _types(tree):
    """Each definition of a type in the product: its file, line and name."""
    for path in tree.paths(*sum(TYPE, ())):
        if path.startswith(PRODUCT):
            text = tree.read(path)
            pattern = next(pattern for ends, pattern in TYPE.items() if path.endswith(ends))
            for match in pattern.finditer(text):
                if "//" not in text[text.rfind("\n", 0, match.start()) + 1:match.start()]:
                    yield path, line_of(text, match.start(1)), match.group(1)


def _parts(tree):
    text = tree.read(PARTS) if tree.has(PARTS) else ""
    unused = allowed = set(re.sub(r"#.*", "", text).split())
    for path, line, name in _types(tree):
        parts = PART.findall(name)
        unused = unused - set(parts)
        for part in parts:
            if part not in allowed:
                yield (f"{path}:{line}: '{part}' of {name} is not in {PARTS}: use its words, or add a "
                       "standard term to it; define a word of the project's own in docs/develop/architecture.md first")
    for part in sorted(unused):
        yield f"{PARTS}: '{part}' is in no type's name: remove it"


def check(tree):
    findings = [*_parts(tree)]
    for path in tree.paths(*SOURCES):
        if path in EXEMPT or path.startswith(HISTORY):
            continue
        findings += findings_in(path, tree.read(path))
        if path != "CHANGELOG.md":  # which says what a name was before
            findings += retired_names_in(path, tree.read(path))
    return findings


CASES = [
    Case("clean", {"README.md": "A shard owns its layers. History is its own topic.\n"}, []),
    Case("banned word", {"docs/a.md": "One.\nNobody waits for\nsomebody.\n"}, ["a.md:2: 'Nobody'", "a.md:3: 'somebody'"]),
    Case("phrase over two lines", {"CHANGELOG.md": "It holds in\nvain.\n"}, ["CHANGELOG.md:1: 'in vain'"]),
    Case("code is exempt", {"docs/a.md": "Say `nobody waits`.\n```\nnobody\n```\nThat is all.\n"}, []),
    Case("text after code counts", {"docs/a.md": "```\nx\n```\nwhoever\n"}, ["a.md:4: 'whoever'"]),
    Case("history is exempt", {"docs/develop/adr/0001-a.md": "nobody\n", "docs/develop/lab/a.md": "nobody\n"}, []),
    Case("comment", {"server/metrics/a.h": "// It is the\n// same for all, for\n  // good.\n"},
         ["a.h:1: 'the same for'", "a.h:2: 'for good'"]),
    Case("retired name", {"elsewhere/a.h": "int a;\nvoid OnLaggards();\n"}, ["a.h:2: 'Laggard': the name is Straggler"]),
    Case("history keeps retired names", {"docs/develop/adr/0001-a.md": "`memory_id`\n"}, []),
    Case("known parts", {PARTS: "# Words.\nBf16 D Half Type KV\n", "kernels/a.h": "enum class DType : int {};\nclass Unknown;\n",
                         "proto/a.proto": "message KV {}\n", "client/a.py": "class _HalfBf16:\n", "tests/a.h": "class B {};\n"}, []),
    Case("unknown part", {PARTS: "Half\n", "kernels/a.cu": "// class B {};\nstruct A_B(8) Half::Ticket final : Base<Half> {\n",
                          "server/a.py": "class Guest(Half):\n", "proto/a.proto": "enum Half {}\n  service Turn {}\n"},
         ["a.cu:2: 'Ticket' of Half::Ticket", "a.proto:2: 'Turn'", "a.py:1: 'Guest' of Guest is not in"]),
    Case("unused part", {PARTS: "Half Whole\n", "server/a.h": "class Half {};\n"}, ["'Whole' is in no type's name"]),
    Case("every folder counts", {"elsewhere/a.cc": "// nobody\n"}, ["elsewhere/a.cc:1: 'nobody'"]),
]

if __name__ == "__main__":
    main(check, CASES)
