#!/usr/bin/env bash
# Builds the images named as arguments, which are targets of the Dockerfile, labels them with the packages in them, and says how large
# they are.
#
#   CONTAINER   podman or docker; default: the one that is there and works
#   IMAGE_ARGS  passed on to the build, for example --build-arg PIP_ARGS="--extra-index-url URL"
#   REGISTRY    put before the names, for example registry.example.com/tandem/
#   TANDEM_CHECK_SUFFIX  put behind the names, for example -a: two runs on one machine that have different ones leave each other's images alone
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
base=$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)
if [ -z "${CONTAINER:-}" ]; then
  for candidate in podman docker; do
    if "$candidate" info >/dev/null 2>&1; then CONTAINER=$candidate; break; fi
  done
fi
if [ -z "${CONTAINER:-}" ]; then
  echo "neither podman nor docker works here: install one, or name it with CONTAINER" >&2
  exit 1
fi

instead=$("$CONTAINER" image inspect --format '{{index .Config.Labels "tandem.stand-in"}}' "$base" 2>/dev/null) || instead=""
if [ -n "$instead" ]; then
  echo "note: $base is a stand-in on this machine, $instead; remove it (rmi $base) to build on the real one" >&2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What is in it can only be known once it is built: what the label tandem.packages names becomes the label tandem.pip-list. Nothing is run.
label() {
  local container packages
  container=$("$CONTAINER" create "$1")
  "$CONTAINER" cp "$container:/opt/tandem/packages.txt" "$scratch/packages.txt" >/dev/null
  "$CONTAINER" rm "$container" >/dev/null
  packages=$(tr '\n' ' ' <"$scratch/packages.txt")
  echo "FROM $1" >"$scratch/Dockerfile"
  "$CONTAINER" build --label "tandem.pip-list=${packages% }" --tag "$1" "$scratch" >/dev/null
}

mib() { echo $(($("$CONTAINER" image inspect --format '{{.Size}}' "$1") / 1048576)); }

for target in "$@"; do
  case $target in # tandem-orchestrator:0.1.0[-demo], tandem-worker:0.1.0-cpu[-demo]
    orchestrator) name=tandem-orchestrator${TANDEM_CHECK_SUFFIX:-}:$version ;;
    *) name=tandem-${target%%-*}${TANDEM_CHECK_SUFFIX:-}:$version-${target#*-} ;;
  esac
  name=${REGISTRY:-}${name}
  echo "building $name"
  # IMAGE_ARGS is split into words, with quotes as in a shell.
  eval "arguments=(${IMAGE_ARGS:-})"
  "$CONTAINER" build "${arguments[@]}" --target "$target" --tag "$name" .
  label "$name"
  over=""
  if "$CONTAINER" image inspect "$base" >/dev/null 2>&1; then over=", $(($(mib "$name") - $(mib "$base"))) MiB over its base"; fi
  echo "$name: $(mib "$name") MiB$over"
done
