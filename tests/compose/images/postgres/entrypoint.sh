#!/bin/sh
# Makes the cluster and its database when there is none yet, then runs the command, as PostgreSQL's own image does.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  mkdir -p "$PGDATA"
  # shellcheck disable=SC2086
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" -E UTF8 $POSTGRES_INITDB_ARGS
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses=''" start
  createdb -h /var/run/postgresql -U "$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl -D "$PGDATA" -w stop
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  echo "listen_addresses = '*'" >> "$PGDATA/postgresql.conf"
fi
exec "$@"
