#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the README's C++ client to a file, so that the build compiles what the README shows."""

import pathlib
import re
import sys


def main():
    readme, out = (pathlib.Path(p) for p in sys.argv[1:3])
    blocks = re.findall(r"^```cpp\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if len(blocks) != 1 or "int main" not in blocks[0]:
        sys.exit(f"{readme}: expected one C++ block with a main, found {len(blocks)} block(s)")
    out.write_text(blocks[0], encoding="utf-8")


if __name__ == "__main__":
    main()
