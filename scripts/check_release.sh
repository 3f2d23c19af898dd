#!/usr/bin/env bash
# Refuse a release whose tag is not its version: scripts/check_release.sh v1.2.3 dist
set -euo pipefail
tag=$1 folder=$2
version=${tag#v}
fail() { echo "release $tag: $1" >&2; exit 1; }

[ "$tag" = "v$version" ] || fail "a tag is v and a version, as v1.2.3"
for file in "mhc_ops-$version-py3-none-any.whl" "mhc_ops-$version.tar.gz"; do
    [ -f "$folder/$file" ] || fail "$folder has no $file: set __version__ in mhc_ops/__init__.py"
done
grep -q -E "^## ${version//./\\.} – [0-9]{4}-[0-9]{2}-[0-9]{2}$" "$(dirname "$0")/../CHANGELOG.md" ||
    fail "CHANGELOG.md has no line '## $version – <year-month-day>'"
