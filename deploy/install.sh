#!/bin/sh
# Installs loraport with some extras into /opt/loraport: install.sh EXTRAS. Part of deploy/Dockerfile.
set -eu
wheel=$(ls /dist/loraport-*.whl)
# shellcheck disable=SC2086
/opt/loraport/bin/pip install -q ${PIP_ARGS:-} -c /src/constraints.txt "loraport[$1] @ file://$wheel"
