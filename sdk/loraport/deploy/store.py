"""Prepares an object store: the loader's buckets, and a user that may do with them what a loader does and no more."""

from pathlib import Path
from typing import Any

QUARANTINE, VERIFIED = "loraport-quarantine", "loraport-verified"
POLICY = "loraport-loader"
REGION = "us-east-1"


def loader_policy() -> dict[str, Any]:
    """Returns the policy: verified bytes are written and read, never deleted; no bucket is made, listed or changed."""

    def allow(actions: list[str], resources: list[str]) -> dict[str, Any]:
        arns = [f"arn:aws:s3:::{resource}" for resource in resources]
        return {"Effect": "Allow", "Action": actions, "Resource": arns}

    return {
        "Version": "2012-10-17",
        "Statement": [
            # A loader looks whether its buckets are there, and sweeps its own part of quarantine. Who may not list a
            # bucket is not told either that an object is missing from it: that would look like a store that fails.
            allow(["s3:ListBucket"], [QUARANTINE, VERIFIED]),
            allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], [f"{QUARANTINE}/*"]),
            allow(["s3:GetObject", "s3:PutObject"], [f"{VERIFIED}/*"]),
            allow(["s3:AbortMultipartUpload"], [f"{QUARANTINE}/*", f"{VERIFIED}/*"]),
        ],
    }


def prepare(endpoint: str, keys: Path, *, users: bool, secure: bool = False) -> list[str]:
    """Makes what is missing and returns what was made. `keys` holds `root-user`, `root-password` and `loader`.

    With `users`, the server is asked over MinIO's admin interface to know the loader's user and policy. A store whose
    users are managed elsewhere is prepared without.

    Raises:
        minio.error.MinioException, OSError: the store does not do it.
    """
    from minio import Minio

    user, password = ((keys / name).read_text().strip() for name in ("root-user", "root-password"))
    client = Minio(endpoint, user, password, secure=secure, region=REGION)
    made = []
    for bucket in (QUARANTINE, VERIFIED):
        if not client.bucket_exists(bucket):
            client.make_bucket(bucket)
            made.append(f"bucket {bucket}")
    if users:
        access, secret = (keys / "loader").read_text().split()
        _make_user(endpoint, user, password, access, secret, secure=secure)
        made.append(f"user {access}")
    return made


def _make_user(endpoint: str, user: str, password: str, access: str, secret: str, *, secure: bool) -> None:
    from minio import MinioAdmin
    from minio.credentials import StaticProvider

    admin = MinioAdmin(endpoint=endpoint, credentials=StaticProvider(user, password), region=REGION, secure=secure)
    admin.policy_add(POLICY, policy=loader_policy())
    admin.user_add(access, secret)
    # Unlike an attachment, which fails when it is there already.
    admin.policy_set(POLICY, user=access)
