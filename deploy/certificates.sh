#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes an authority and certificates of its own for the servers and clients of one deployment (docs/operate/security.md).
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: deploy/certificates.sh [--days=N] FOLDER NAME[,NAME...] ...
The script makes FOLDER/ca.pem and FOLDER/ca.key unless both exist. For each argument it makes a certificate FIRST.pem with
all NAMEs and its key FIRST.key. A NAME is a host's name, an IP address, or any other word for a client.
  --days=N  The certificates are valid for this many days; default 90. The authority is valid for ten years
  --help    this text
Example: deploy/certificates.sh certificates coordinator.example,127.0.0.1 gpu0.example gpu1.example job-a operator
HELP
}

fail() { echo "deploy/certificates.sh: $1" >&2; exit 2; }

days=90
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --days=*) days=${1#--days=} ;;
    --help) usage; exit 0 ;;
    *) echo "deploy/certificates.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
if (( $# < 2 )); then usage >&2; exit 2; fi
folder=$1
shift
if [[ ! "$days" =~ ^[1-9][0-9]*$ ]]; then fail "--days: expected a number of days, got \"$days\""; fi
for names in "$@"; do  # before anything is made
  if [[ ! "$names" =~ ^[A-Za-z0-9._:*-]+(,[A-Za-z0-9._:*-]+)*$ ]]; then
    fail "expected names of hosts, IP addresses or words with commas between them, got \"$names\""
  fi
  if [[ "${names%%,*}" == ca ]]; then fail "expected another name than ca, which is the authority's"; fi
done

umask 077  # keys are for this user alone
mkdir -p "$folder"
key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
made() { openssl "$@" 2>"$folder/log" || { cat "$folder/log" >&2; exit 1; }; }

if [[ -e "$folder/ca.pem" && ! -e "$folder/ca.key" ]]; then
  echo "deploy/certificates.sh: $folder has the authority ca.pem without its key: expected ca.key beside it" >&2
  exit 1
elif [[ ! -e "$folder/ca.key" ]]; then
  made req -x509 "${key[@]}" -days 3650 -subj "/CN=Precondor deployment" -keyout "$folder/ca.key" -out "$folder/ca.pem"
fi
for names in "$@"; do
  first=${names%%,*}
  alternatives=
  for name in ${names//,/ }; do
    kind=DNS
    if [[ "$name" =~ ^[0-9.]+$ || "$name" == *:*:* ]]; then kind=IP; fi
    alternatives+=${alternatives:+,}$kind:$name
  done
  made req "${key[@]}" -subj "/CN=$first" -keyout "$folder/$first.key.new" -out "$folder/request"
  made x509 -req -in "$folder/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial -days "$days" \
    -extfile <(echo "subjectAltName=$alternatives") -out "$folder/$first.pem.new"
  # Servers and clients read these again by themselves.
  mv "$folder/$first.key.new" "$folder/$first.key"
  mv "$folder/$first.pem.new" "$folder/$first.pem"
done
rm -f "$folder/request" "$folder/log"
