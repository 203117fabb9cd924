"""`python -m loraport.deploy COMMAND`: the jobs that bring a deployment up.

init      makes keys, certificates and configurations (no network needed)
store     makes the object store's buckets, and the loader's user
base      registers the base model
install   copies a service's files to where it reads them, in a pod
"""

import argparse
import json
import os
import string
import sys
import time
from pathlib import Path

from loraport.deploy.credentials import Materials
from loraport.deploy.site import BASE, compose_site, kubernetes_site
from loraport.dev.credentials import write_private
from loraport.errors import LoraportError, UnavailableError

SERVICES = ("registry", "loader", "router", "executor")
RETRY_S = 2.0


def init(options: argparse.Namespace) -> str:
    """Makes what is missing. Raises OSError or ValueError."""
    settings = json.loads(Path(options.settings).read_bytes()) if options.settings else {}
    if not isinstance(settings, dict) or not set(settings) <= set(SERVICES):
        raise ValueError(f"{options.settings} must be an object with at most {', '.join(SERVICES)}")
    public = tuple(filter(None, options.public.split(",")))
    nodes = options.site == "kubernetes"
    if nodes:
        site = kubernetes_site(base_model=options.base, nodes=options.nodes, namespace=options.namespace, public=public)
    else:
        site = compose_site(base_model=options.base, executors=tuple(options.executors.split(",")), public=public)
    Materials(Path(options.out), site, nodes=nodes).make(settings)
    return f"keys and configurations of {', '.join(executor.name for executor in site.executors)} are there"


def store(options: argparse.Namespace) -> str:
    """Prepares the object store, which may still be starting. Raises what it says in the end."""
    from minio.error import MinioException
    from urllib3.exceptions import HTTPError

    from loraport.deploy.store import prepare

    ends = time.monotonic() + options.wait
    while True:
        try:
            made = prepare(options.endpoint, Path(options.keys), users=options.users == "minio")
            return f"made {', '.join(made)}" if made else "everything is there"
        except (MinioException, HTTPError, OSError) as error:
            if time.monotonic() > ends:
                raise ValueError(f"the store does not do it: {error!s:.200}") from None
        time.sleep(RETRY_S)


def base(options: argparse.Namespace) -> str:
    """Registers the base model with a registry that may still be starting. Raises LoraportError."""
    from loraport.admin import AdminClient
    from loraport.bundle.base_dir import read_base_dir

    spec = read_base_dir(Path(options.directory))
    ends = time.monotonic() + options.wait
    while True:
        try:
            with AdminClient.local(options.data) as admin:
                admin.create_base_model(options.base, spec)
            return f"base model {options.base} is registered"
        except UnavailableError:
            if time.monotonic() > ends:
                raise
        time.sleep(RETRY_S)


def install(options: argparse.Namespace) -> str:
    """Copies the files of a Secret, whose modes are the cluster's, and puts the pod's name into its configuration."""
    target, names = Path(options.to), []
    for path in sorted(Path(options.source).iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        data = path.read_bytes()
        if path.name == "config.json":
            data = string.Template(data.decode()).safe_substitute(POD_NAME=os.environ["POD_NAME"]).encode()
        write_private(target / path.name, data)
        names.append(path.name)
    return f"installed {len(names)} files"


def main() -> int:
    """Runs one job. Exit code 1: it could not be done, with one line why."""
    parser = argparse.ArgumentParser(prog="python -m loraport.deploy")
    jobs = parser.add_subparsers(required=True)
    env = os.environ.get
    job = jobs.add_parser("init")
    job.add_argument("--site", choices=("compose", "kubernetes"), default="compose")
    job.add_argument("--out", required=True, help="directory with one directory for each service")
    job.add_argument("--settings", help="JSON: service → fields laid over its configuration")
    job.add_argument("--base", default=env("LORAPORT_BASE_NAME", "base"), help="id of the base model")
    job.add_argument("--executors", default=env("LORAPORT_EXECUTORS", "executor-0"), help="ids, with commas")
    job.add_argument("--public", default=env("LORAPORT_PUBLIC_NAMES", ""), help="further host names, with commas")
    job.add_argument("--nodes", type=int, default=4, help="kubernetes: most pods")
    job.add_argument("--namespace", default="loraport", help="kubernetes")
    job.set_defaults(job=init)
    job = jobs.add_parser("store")
    job.add_argument("--endpoint", default="store:9000")
    job.add_argument("--keys", required=True)
    job.add_argument("--users", choices=("minio", "none"), default=env("LORAPORT_S3_USERS", "minio"))
    job.add_argument("--wait", type=float, default=120.0)
    job.set_defaults(job=store)
    job = jobs.add_parser("base")
    job.add_argument("--base", default=env("LORAPORT_BASE_NAME", "base"))
    job.add_argument("--directory", default=BASE)
    job.add_argument("--data", default=env("LORAPORT_DATA", "."))
    job.add_argument("--wait", type=float, default=120.0)
    job.set_defaults(job=base)
    job = jobs.add_parser("install")
    job.add_argument("--source", required=True)
    job.add_argument("--to", required=True)
    job.set_defaults(job=install)
    options = parser.parse_args()
    try:
        sys.stdout.write(f"{options.job(options)}\n")
    except (OSError, ValueError, KeyError, LoraportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
