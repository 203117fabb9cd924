"""What a loader is told at its start."""

import os
from dataclasses import dataclass, field

from services.loader.fetch.config import ImportSources
from services.loader.receive import MAX_CONFIG_BYTES
from services.shared.checkpoint import CheckpointPolicy
from services.shared.handover import MAX_PATH_BYTES
from services.shared.rpc.channels import TlsFiles
from services.shared.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What the loader's host offers beside memory; all of it is optional."""

    # Unix socket where executors of this host and user get sealed memory itself; empty: they read it by ReadBlob.
    handover_socket: str = ""
    # Directory that keeps verified weights between store and memory, for this loader alone; null for none. It may be
    # deleted at any moment.
    disk_dir: str | None = None
    # Bytes of files in it.
    disk_budget_bytes: int = 20 << 30

    def __post_init__(self) -> None:
        if self.disk_budget_bytes < 1:
            raise ValueError("disk_budget_bytes must be at least 1")
        if len(os.fsencode(self.handover_socket)) > MAX_PATH_BYTES:
            raise ValueError(f"handover_socket must have at most {MAX_PATH_BYTES} bytes")
        if self.handover_socket and not os.path.isabs(self.handover_socket):
            raise ValueError("handover_socket must be an absolute path: executors connect to it from elsewhere")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """How many things go on at a time, in all and for one tenant. Others wait for their turn."""

    # Loads from the store to host memory.
    loads: int = 4
    loads_per_tenant: int = 2
    # Uploads and imports.
    uploads: int = 4
    uploads_per_tenant: int = 2

    def __post_init__(self) -> None:
        if min(self.loads, self.loads_per_tenant, self.uploads, self.uploads_per_tenant) < 1:
            raise ValueError("counts must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """What is let in, beside the rules of the format."""

    # Largest weights file, in bytes.
    max_weights_bytes: int = 1 << 30
    # Largest scaling * |A| * |B| (Frobenius norms) of a module; 0 for no limit. See docs/adr/0012-update-norm.md.
    max_update_norm: float = 2.0**14
    # Bytes that a tenant may upload and have imported in a day, a config counted as 64 KiB; 0 for no limit. The budget
    # fills up evenly: who spends a full one and then what comes back has spent two days' bytes in a window of 24 hours.
    tenant_bytes_per_day: int = 0

    def __post_init__(self) -> None:
        if min(self.max_update_norm, self.tenant_bytes_per_day) < 0:
            raise ValueError("max_update_norm and tenant_bytes_per_day must not be negative")
        if self.max_weights_bytes < 1:
            raise ValueError("max_weights_bytes must be at least 1")
        if 0 < self.tenant_bytes_per_day < self.max_weights_bytes + MAX_CONFIG_BYTES:
            raise ValueError("tenant_bytes_per_day must be 0 or at least max_weights_bytes and 64 KiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Fields of the configuration file. Sizes in bytes, times in seconds, addresses `host:port`."""

    # Names this loader in statements and keeps its part of quarantine apart; an id (a-z, 0-9, hyphens).
    name: str = "loader"
    # Address for peers, with mTLS.
    listen: str
    # Address for uploads: TLS without a client certificate, a signed session instead.
    upload_listen: str
    # This service's certificate and key, and the two CAs.
    tls: TlsFiles
    # Directory of trust roots, where the first one is believed.
    trust_dir: str
    # Signer of verification results: a key file `<name>.key`, beside which `<name>.*.key` may hold the next key, or
    # another signer (loraport.trust.signers). The newest trust root must name the key.
    signing_key: str
    # The registry's address.
    registry_address: str
    # The object store: address, whether it speaks TLS, and a file of two lines, access key and secret key.
    s3_endpoint: str
    s3_secure: bool = False
    s3_credentials: str
    # Bucket for unverified bytes.
    s3_quarantine_bucket: str = "loraport-quarantine"
    # Bucket for verified bytes, under their digests.
    s3_verified_bucket: str = "loraport-verified"
    # Directory for the unlinked files that uploads pass through; default: the system's temporary directory.
    spool_dir: str | None = None
    # Host memory for sealed weights, which tenants share (docs/policies.md).
    host_budget_bytes: int = 2 << 30
    # The hand-over socket and the disk tier.
    node: NodeConfig = field(default_factory=NodeConfig)
    # A lease that is not read for so long is taken back; its holder is taken for gone.
    lease_ttl_s: float = 300.0
    # How the registry's checkpoints are treated: where the floor is kept, how long the grace is.
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    # What is let in.
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    # Loads, uploads and imports at a time.
    turns: TurnLimits = field(default_factory=TurnLimits)
    # Where bundles may be imported from.
    imports: ImportSources = field(default_factory=ImportSources)
    # An upload that sends nothing for so long is ended.
    upload_idle_s: float = 30.0
    # How long stored bytes that were not what was signed are not asked for again.
    bad_digest_ttl_s: float = 60.0
    # How long running calls may take to end at shutdown.
    drain_s: float = 10.0
    # Metrics and traces.
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        if self.host_budget_bytes < 1:
            raise ValueError("host_budget_bytes must be at least 1")
        if min(self.lease_ttl_s, self.upload_idle_s) <= 0 or min(self.bad_digest_ttl_s, self.drain_s) < 0:
            raise ValueError("times must be above 0 (bad_digest_ttl_s and drain_s may be 0)")
        if self.s3_quarantine_bucket == self.s3_verified_bucket:
            raise ValueError("quarantine and verified bytes need different buckets")
