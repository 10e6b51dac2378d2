#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Interfaces stay small: public methods of Worker in C++ and Python and of each class of server/core, arguments of Preconditioner.

Overloads count one by one. Constructors, the destructor, friends, names that begin with an underscore and attributes do not
count. A class of server/core also has few fields that can change. Locks do not count, nor do parts, which are objects of
other classes of server/core.
"""

import ast
import re

from lint_support import Case, main, without_comments

CPP = "client/cpp/include/precondor/client.h"
CLIENT = "client/python/precondor/_client.py"
PRECONDITIONER = "client/python/precondor/torch/_preconditioner.py"
MOST_METHODS = 16
CORE = "server/core/"
MOST_CORE_METHODS = 20
MOST_CORE_FIELDS = 8
MOST_ARGUMENTS = 18


def _cpp_classes(text):
    """Name and body of each class of C++ that begins and ends at the margin."""
    return re.findall(r"^class (\w+)\b[^;{]*{\n(.*?)^};", without_comments(text), re.DOTALL | re.MULTILINE)


def _public_methods(name, body):
    public = "".join(part for access, part in re.findall(r"^ (public|private|protected):\n(.*?)(?=^ \w+:\n|\Z)", body,
                                                         re.DOTALL | re.MULTILINE) if access == "public")
    while "{" in public:  # bodies end a declaration as `;` does
        shorter = re.sub(r"{[^{}]*}", ";", public)
        if shorter == public:
            break
        public = shorter
    names = [re.search(r"(~?\w+)\s*\(", one) for one in public.split(";") if not re.search(r"\bfriend\b", one)]
    return [one.group(1) for one in names if one and one.group(1).lstrip("~") != name]


def _cpp_methods(text, name):
    """Names of the public methods of a class of C++; None if there is no such class."""
    return next((_public_methods(name, body) for found, body in _cpp_classes(text) if found == name), None)


def _changing_fields(body, parts):
    """Names of a class's fields that are no constants, references, locks or objects of one of the classes `parts`."""
    while (shorter := re.sub(r"{[^{}]*}", "", body)) != body:
        body = shorter
    for declared in re.sub(r"\bABSL_\w+\([^()]*\)|\b\w+:(?!:)", "", body).split(";"):
        field = re.fullmatch(r"\s*((?!static|using|friend|return)[^=]*?)\b(\w+_)\s*(?:=.*|\[.*\])?\s*", declared, re.DOTALL)
        kind = field and re.sub(r"<.*>|\bmutable\b", "", field.group(1), flags=re.DOTALL).strip()
        constant = kind and ("(" in kind or re.search(r"&$|^const\b[^*]*$|\bconst$", kind))
        if kind and not constant and kind not in parts:
            yield field.group(2)


def _check_core(tree):
    classes = [(path, name, body) for path in tree.paths(".h") if path.startswith(CORE) for name, body in _cpp_classes(tree.read(path))]
    parts = {"Mutex", "CondVar", *(name for _, name, _ in classes)}
    for path, name, body in classes:
        for what, most, names in (("public methods", MOST_CORE_METHODS, _public_methods(name, body)),
                                  ("fields that can change", MOST_CORE_FIELDS, [*_changing_fields(body, parts)])):
            if len(names) > most:
                yield f"{path}: {name}: expected at most {most} {what}, got {len(names)}: {', '.join(names)}"


def _python_class(text, name):
    return next((one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name), None)


def _python_methods(text, name):
    found = _python_class(text, name)
    methods = {one.name: None for one in found.body if isinstance(one, ast.FunctionDef)} if found else {}  # an overload is no other
    return found and [name for name in methods if not name.startswith("_")]


def _python_arguments(text, name):
    found = _python_class(text, name)
    made = next((one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None) if found else None
    return made and [one.arg for one in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)][1:]


def check(tree):
    findings = []
    for path, name, what, most, names_of in ((CPP, "Worker", "public methods", MOST_METHODS, _cpp_methods),
                                             (CLIENT, "Worker", "public methods", MOST_METHODS, _python_methods),
                                             (PRECONDITIONER, "Preconditioner", "arguments", MOST_ARGUMENTS, _python_arguments)):
        names = names_of(tree.read(path), name)
        if names is None:
            findings.append(f"{path}: has no class {name}")
        elif len(names) > most:
            findings.append(f"{path}: {name}: expected at most {most} {what}, got {len(names)}: {', '.join(names)}")
    return findings + [*_check_core(tree)]


_GOOD = {CPP: "class Worker {\n public:\n  virtual ~Worker() = default;\n  virtual int rank() const = 0;  // One(), two();\n"
              "  bool Has(int a) const { return f(a) && (a > 0); }\n private:\n" + "  int F();\n" * 17 + "};\n",
         CLIENT: "class Worker:\n    def close(self): pass\n" + "".join(f"    def _f{i}(self): pass\n" for i in range(17)),
         PRECONDITIONER: "class Preconditioner:\n    def __init__(self, model, address, *, session=''): pass\n"}
CASES = [
    Case("small", _GOOD, []),
    Case("a method too many in C++", {**_GOOD, CPP: "class Worker {\n public:\n" + "  int F(int a);\n" * 16 + "  int G() { return 1; }\n};\n"},
         ["client.h: Worker: expected at most 16 public methods, got 17: F, .*G$"]),
    Case("a method too many in Python", {**_GOOD, CLIENT: "class Worker:\n" + "".join(f"    def f{i}(self): pass\n" for i in range(17))},
         ["_client.py: Worker: expected at most 16 public methods, got 17"]),
    Case("an argument too many", {**_GOOD, PRECONDITIONER: "class Preconditioner:\n    def __init__(self, model, *, "
                                  + ", ".join(f"a{i}=0" for i in range(18)) + "): pass\n"},
         ["_preconditioner.py: Preconditioner: expected at most 18 arguments, got 19: model, a0"]),
    Case("a class of core", {**_GOOD, "server/core/a.h": "class One {\n public:\n" + "  int F(int a);\n" * 20
                             + "  friend int H(One a) { return F(a); }\n private:\n  int G();\n};\n"}, []),
    Case("a method too many in core", {**_GOOD, "server/core/layer/a.h": "class One {\n public:\n  One();\n};\n\nclass Two final : public One {\n"
                                       " public:\n  explicit Two(int a);\n" + "  int F(int a);\n" * 20 + "  int G();\n};\n"},
         ["a.h: Two: expected at most 20 public methods, got 21: F, .*G$"]),
    Case("fields", {**_GOOD, "server/core/a.h": "class One {\n private:\n  Mutex mu_;\n  const int a_ = 1;\n  Clock& b_;\n  std::vector<int (*)(int)> h_;\n"
                    + "".join(f"  int c{i}_ ABSL_GUARDED_BY(mu_) = 0;\n" for i in range(7)) + "};\n\nclass Two {\n  One one_;\n"
                    + "".join(f"  std::map<int, int> d{i}_;\n" for i in range(8)) + "  const char* e_ = \"\";\n};\n"},
         ["a.h: Two: expected at most 8 fields that can change, got 9: d0_, .*e_$"]),
    Case("nothing to count", {**_GOOD, CPP: "struct Worker;\n"}, ["client.h: has no class Worker"]),
]

if __name__ == "__main__":
    main(check, CASES)
