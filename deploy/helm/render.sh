#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Renders the chart with its defaults for kustomize, as deploy/kustomize/base/precondor.yaml, which git does not keep.
# Needs helm (deploy/install.sh --deploy).
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/helm/render.sh [--help]
Run it before `kubectl apply -k` of deploy/kustomize/base or an overlay, and after a change to deploy/helm/precondor.
HELP
}

case "${1:-}" in
  "") ;;
  --help | -h) usage; exit 0 ;;
  *) echo "deploy/helm/render.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
esac

deploy=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=${XDG_CACHE_HOME:-$HOME/.cache}/precondor/deploy-tools/bin:$PATH
made=$(mktemp)
trap 'rm -f "$made"' EXIT

# Without what is true of a Helm release alone.
helm template precondor "$deploy/helm/precondor" --skip-tests |
  sed -e '/helm\.sh\/chart:/d' -e '/app\.kubernetes\.io\/managed-by:/d' >"$made"
cat "$made" >"$deploy/kustomize/base/precondor.yaml"  # cp would copy the mode 0600 of mktemp
