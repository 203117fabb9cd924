#!/bin/sh
# Takes away what an image does not run: strip.sh SERVICE. Part of deploy/Dockerfile.
set -eu
site=$(/opt/loraport/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for other in registry loader router executor; do
  [ "$other" = "$1" ] || rm -rf "${site:?}/services/$other"
done
/opt/loraport/bin/pip uninstall -qy pip setuptools 2>/dev/null || true
