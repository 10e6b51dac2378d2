#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Licences and software bills of materials (CycloneDX 1.5) of what Precondor ships beside its own code.

  sbom.py bundle --licences DIR [--components FILE] [--static PACKAGE]... OBJECT...
      The Debian packages of the shared libraries that the programs OBJECT need, and those given with --static, whose
      archives or headers are in the programs: copies each copyright file to DIR/PACKAGE, and lists them in FILE. Licences
      are named there relative to the folder that DIR is in, which is where the bill that FILE goes into belongs.
  sbom.py image --name NAME --version VERSION --root DIR [--site-packages DIR] [--components FILE]...
      Prints the bill of an image: the Debian packages in DIR/var/lib/dpkg, the Python packages in site-packages, what
      their own bills name, and the components of each FILE.
"""

import argparse
import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse


def debian_component(name, version, architecture, licence, distribution="debian"):
    purl = f"pkg:deb/{distribution}/{urllib.parse.quote(name)}@{urllib.parse.quote(version)}?arch={architecture}"
    return {"type": "library", "name": name, "version": version, "purl": purl,
            "licenses": [{"license": {"name": f"file:{licence}"}}]}


def bill(subject, components):
    """The JSON of a bill. Of components with the same purl, but for qualifiers, the first counts."""
    known = {}
    for component in components:
        key = component["purl"].split("?")[0]
        known.setdefault(key, {**component, "bom-ref": key})
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": subject},
                       "components": [known[key] for key in sorted(known)]}, indent=1) + "\n"


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


def bundle(arguments):
    arguments.licences.mkdir(parents=True, exist_ok=True)
    components = []
    for package in bundled_packages(arguments.objects, arguments.static):
        query = subprocess.run(["dpkg-query", "-W", "-f", "${Version} ${Architecture}", package],
                               capture_output=True, text=True, check=False)
        if query.returncode != 0:  # one of --static that the build did without
            continue
        version, architecture = query.stdout.split()
        shutil.copy(f"/usr/share/doc/{package}/copyright", arguments.licences / package)
        components.append(debian_component(package, version, architecture, f"{arguments.licences.name}/{package}"))
    if arguments.components:
        arguments.components.parent.mkdir(parents=True, exist_ok=True)
        arguments.components.write_text(bill({"type": "library", "name": "precondor"}, components))


def installed_debian_packages(root):
    distribution = re.search(r"^ID=\"?(\w+)", (root / "etc/os-release").read_text(), re.MULTILINE)[1]
    for entry in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name = fields["Package"]
            yield debian_component(name, fields["Version"], fields["Architecture"],
                                   f"/usr/share/doc/{name}/copyright", distribution)


def components_of(file):
    """What another bill names by purl."""
    return [component for component in json.loads(file.read_text())["components"] if component.get("purl")]


def python_packages(site_packages):
    for distribution in importlib.metadata.distributions(path=[str(site_packages)]):
        name, version = distribution.metadata["Name"].lower(), distribution.version
        yield {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    # Our own first, since it knows where the licences are.
    for nested in sorted(site_packages.glob("*.dist-info/sboms/*.json"), key=lambda path: path.name != "precondor.cdx.json"):
        yield from components_of(nested)


def image(arguments):
    components = list(installed_debian_packages(arguments.root))
    if arguments.site_packages:
        components += python_packages(arguments.site_packages)
    for file in arguments.components:
        components += components_of(file)
    sys.stdout.write(bill({"type": "container", "name": arguments.name, "version": arguments.version,
                           "licenses": [{"license": {"id": "Apache-2.0"}}]}, components))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("bundle")
    one.add_argument("--licences", type=pathlib.Path, required=True)
    one.add_argument("--components", type=pathlib.Path)
    one.add_argument("--static", action="append", default=[])
    one.add_argument("objects", nargs="+")
    one.set_defaults(run=bundle)
    one = commands.add_parser("image")
    one.add_argument("--name", required=True)
    one.add_argument("--version", required=True)
    one.add_argument("--root", type=pathlib.Path, required=True)
    one.add_argument("--site-packages", type=pathlib.Path)
    one.add_argument("--components", type=pathlib.Path, action="append", default=[])
    one.set_defaults(run=image)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
