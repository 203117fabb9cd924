#!/bin/sh
# Called as MinIO is: server DIRECTORY --address ADDRESS.
set -eu
mkdir -p "$2"
keys=/run/loraport
RCLONE_AUTH_KEY="\"$(cat "$MINIO_ROOT_USER_FILE"),$(cat "$MINIO_ROOT_PASSWORD_FILE")\",\"$(sed -n 1p $keys/loader),$(sed -n 2p $keys/loader)\""
export RCLONE_AUTH_KEY
exec rclone serve s3 "$2" --addr "$4" --config "" --vfs-cache-mode off --dir-cache-time 1s \
  --etag-hash= --no-checksum --buffer-size 1M
