#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Copies the licences of the Debian packages that Precondor's programs bring, and writes a bill of materials (CycloneDX 1.5).

These are the packages of the shared libraries that OBJECT need, and those given with --static, whose archives or headers
are in the programs. DIR/PACKAGE is a package's copyright file. The bill names licences relative to the folder of DIR, which
is where the bill belongs.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import urllib.parse


def component(name, version, architecture, licence):
    key = f"pkg:deb/debian/{urllib.parse.quote(name)}@{urllib.parse.quote(version)}"
    return {"type": "library", "bom-ref": key, "name": name, "version": version, "purl": f"{key}?arch={architecture}",
            "licenses": [{"license": {"name": f"file:{licence}"}}]}


def bundled_packages(objects, static):
    """The names of the packages, sorted. Libraries that no package owns are the project's own."""
    ldd = subprocess.run(["ldd", *objects], check=True, capture_output=True, text=True).stdout
    packages = set(static)
    for path in sorted(set(re.findall(r"=> (/\S+)", ldd))):
        real = str(pathlib.Path(path).resolve())
        # dpkg knows a file of /usr/lib by either name.
        owner = subprocess.run(["dpkg", "-S", real, real.removeprefix("/usr")], capture_output=True, text=True, check=False)
        if owner.stdout:
            packages.add(owner.stdout.split(":")[0])
    return sorted(packages)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--licences", metavar="DIR", type=pathlib.Path, required=True)
    parser.add_argument("--bill", metavar="FILE", type=pathlib.Path, required=True)
    parser.add_argument("--static", metavar="PACKAGE", action="append", default=[])
    parser.add_argument("objects", metavar="OBJECT", nargs="+")
    arguments = parser.parse_args()
    arguments.licences.mkdir(parents=True, exist_ok=True)
    components = []
    for package in bundled_packages(arguments.objects, arguments.static):
        query = subprocess.run(["dpkg-query", "-W", "-f", "${Version} ${Architecture}", package],
                               capture_output=True, text=True, check=False)
        if query.returncode != 0:  # one of --static that the build did without
            continue
        version, architecture = query.stdout.split()
        shutil.copy(f"/usr/share/doc/{package}/copyright", arguments.licences / package)
        components.append(component(package, version, architecture, f"{arguments.licences.name}/{package}"))
    arguments.bill.parent.mkdir(parents=True, exist_ok=True)
    arguments.bill.write_text(json.dumps({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {"type": "library", "name": "precondor"}}, "components": components}, indent=1) + "\n")


if __name__ == "__main__":
    main()
