# SPDX-License-Identifier: Apache-2.0
"""deploy/compose/compose.yaml as docker-compose reads it, with its variables' defaults."""

import os

from deploy_tools import ROOT, run

import yaml

FILE = ROOT / "deploy/compose/compose.yaml"


def services(file=FILE, folder=FILE.parent, **variables):
    """By name; an AssertionError with what docker-compose says where it refuses the file. Mounts are absolute."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PRECONDOR_", "COMPOSE_"))}
    done = run("docker-compose", f"--project-directory={folder}", f"--file={file}", "config", env={**environment, **variables})
    return yaml.safe_load(done.stdout)["services"]
