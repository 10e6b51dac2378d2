# SPDX-License-Identifier: Apache-2.0
"""Programs of the examples, with or without torch: their arguments, reports and exits."""

import argparse
import json
import pathlib
import sys

import precondor


class ExampleError(Exception):
    """Something that the user can mend; shown without a traceback."""


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def positive_number(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def open_json(place):
    """Opens the file in which write_json will write, so that a wrong name ends a run at its beginning."""
    if place and place != "-":
        with open(place, "a", encoding="utf-8"):
            pass


def write_json(place, value):
    """`place`: a file, or - for standard output."""
    text = json.dumps(value, indent=1) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(place).write_text(text, encoding="utf-8")


def run(main):
    """Runs main() and exits: 0 when done, 1 with one line when something failed, 2 for wrong arguments, 130 at Ctrl-C."""
    name = pathlib.Path(sys.argv[0]).name
    try:
        main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ExampleError, precondor.PrecondorError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
