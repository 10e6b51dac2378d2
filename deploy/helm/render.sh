#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes what is derived from the chart and what the chart is derived from: its copies of rules and dashboards, and
# deploy/kustomize/base/precondor.yaml. Needs helm (deploy/install.sh --deploy).
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/helm/render.sh [--check] [--help]
  --check  write nothing; show what differs, and fail if anything does
  --help   this text
Run it after a change to deploy/helm/precondor, deploy/prometheus/*.rules.yaml or deploy/grafana/*.json.
HELP
}

check=no
case "${1:-}" in
  "") ;;
  --check) check=yes ;;
  --help | -h) usage; exit 0 ;;
  *) echo "deploy/helm/render.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
esac

deploy=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=${XDG_CACHE_HOME:-$HOME/.cache}/precondor/deploy-tools/bin:$PATH
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# Helm reads no file outside a chart.
mkdir -p "$made/files/prometheus" "$made/files/grafana"
shopt -s nullglob
for file in "$deploy"/prometheus/*.rules.yaml; do cp "$file" "$made/files/prometheus/"; done
for file in "$deploy"/grafana/*.json; do cp "$file" "$made/files/grafana/"; done

# Without what is true of a Helm release alone.
{
  echo "# SPDX-License-Identifier: Apache-2.0"
  echo "# Made by deploy/helm/render.sh; change deploy/helm/precondor."
  helm template precondor "$deploy/helm/precondor" --skip-tests |
    sed -e '/helm\.sh\/chart:/d' -e '/app\.kubernetes\.io\/managed-by:/d'
} >"$made/precondor.yaml"

status=0
publish() {  # publish MADE PLACE
  if [[ "$check" == yes ]]; then
    diff -ruN "$2" "$1" || status=1
  else
    rm -rf "$2"
    cp -R "$1" "$2"
  fi
}
find "$made/files" -type d -empty -delete
mkdir -p "$made/files"
publish "$made/files" "$deploy/helm/precondor/files"
publish "$made/precondor.yaml" "$deploy/kustomize/base/precondor.yaml"
if (( status != 0 )); then echo "deploy/helm/render.sh: differs; run it without --check" >&2; fi
exit "$status"
