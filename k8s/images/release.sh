#!/bin/sh
# Builds the images reproducibly, publishes and signs them, and publishes the chart, which then names them by their digests.
# Without an audit of their packages that found nothing there is no release: its status is then that of k8s.images.audit, 1 or 69.
#
#   k8s/images/release.sh REGISTRY/NAMESPACE VERSION
#
# Needs make, docker with buildx, cosign and helm, all logged in to the registry.
# The same commit gives images of the same digest: times are those of the commit, packages those of the locks.
set -eu
registry=${1:?k8s/images/release.sh REGISTRY/NAMESPACE VERSION}
version=${2:?k8s/images/release.sh REGISTRY/NAMESPACE VERSION}
cd "$(dirname "$0")/../.."
case $version in
*[!0-9A-Za-z.-]* | -* | .*)
  echo "release.sh: $version is not a version, such as 0.2.0" >&2
  exit 2
  ;;
esac
if [ -n "$(git status --porcelain)" ]; then
  echo "release.sh: the working tree has changes; a release is of a commit" >&2
  exit 1
fi
make install
.venv/bin/python -m k8s.images.audit
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

publish() { # IMAGE TAG BUILD-ARGUMENTS…
  name=$registry/$1
  file=k8s/images/${1#outrider-}.Dockerfile
  tag=$2
  shift 2
  docker buildx build --file "$file" "$@" --platform linux/amd64 \
    --provenance mode=max --sbom true \
    --output "type=image,name=$name:$tag,push=true,rewrite-timestamp=true" \
    --metadata-file "$work/metadata.json" .
  digest=$(sed -n 's/.*"containerimage.digest": *"\(sha256:[0-9a-f]*\)".*/\1/p' "$work/metadata.json")
  cosign sign --yes "$name@${digest:?docker reported no digest of $name:$tag}"
  echo "    ${name##*/}${tag#"$version"}: $digest" >>"$work/digests"
  echo "published $name:$tag ($digest)"
}

publish outrider-worker "$version-cuda" --build-arg VARIANT=cuda
publish outrider-worker "$version-cpu"
publish outrider-worker "$version-demo" --build-arg MODELS=demo
publish outrider-vllm "$version" --target files
publish outrider-coordinator "$version"
publish outrider-coordinator "$version-demo" --build-arg MODELS=demo

cp -r k8s/helm/outrider "$work/outrider"
sed -i "s|^  registry: \"\"|  registry: \"$registry\"|; /^  digests: {}/ {
s/ {}//
r $work/digests
}" "$work/outrider/values.yaml"
helm package "$work/outrider" --version "$version" --app-version "$version" --destination "$work"
helm push "$work/outrider-$version.tgz" "oci://$registry/charts"
echo "published oci://$registry/charts/outrider $version"
