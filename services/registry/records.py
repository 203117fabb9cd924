"""What the registry keeps, as plain values. Times are microseconds since the Unix epoch.

`epoch` is the catalog epoch of a row's last change; an etag is made from it. They are tuples because a page has
hundreds of them and a frozen dataclass takes four times as long to make; fields are given by name all the same.
"""

from typing import NamedTuple

from services.registry.lifecycle import State
from services.registry.rollout.machine import Position
from services.registry.rollout.settings import Settings
from services.shared.names import AdapterName, alias_name, revision_name, rollout_name
from services.shared.quotas import Quota

# Rows of (code, detail, subject).
Findings = tuple[tuple[str, str, str], ...]


def etag_of(epoch: int) -> str:
    """Returns the etag of a row whose last change has this epoch; two states of one resource never share one."""
    return f"e{epoch}"


class TenantRow(NamedTuple):
    """A tenant."""

    tenant: str
    display_name: str
    weight: float
    base_allowed: bool
    quota: Quota
    create_us: int
    epoch: int


class ApiKeyRow(NamedTuple):
    """An API key: a keyed hash of its secret, never the secret."""

    key_id: str
    tenant: str
    secret_hmac: bytes
    scopes: tuple[str, ...]
    create_us: int
    expire_us: int | None
    revoke_us: int | None
    epoch: int


class SignerRow(NamedTuple):
    """A publisher's public key (PEM). What it announced at log index `since_log_index` or later does not count."""

    tenant: str
    signer: str
    key_id: str
    public_key_pem: str
    create_us: int
    revoke_us: int | None
    since_log_index: int | None


class BaseRow(NamedTuple):
    """A base model; `spec_json` is empty where a list left it out."""

    base_model: str
    base_id: str
    spec_json: bytes
    create_us: int
    epoch: int


class AdapterRow(NamedTuple):
    """A tenant's named product. `base_model` is that of its newest revision."""

    adapter_id: int
    tenant: str
    adapter: str
    base_model: str
    latest_version: int
    shared_tenants: tuple[str, ...]
    create_us: int

    @property
    def name(self) -> AdapterName:
        return AdapterName(self.tenant, self.adapter)


class RevisionRow(NamedTuple):
    """A revision.

    `current` is true for the newest announcement of its content: one row per revision id. `config_digest` goes into
    upload sessions, `manifest_digest` tells whether an announcement is the same one. `record_leaf` is the index of the
    record's leaf in the log, 0 without a record.
    """

    adapter_id: int
    tenant: str
    adapter: str
    version: int
    revision_id: str
    current: bool
    state: State
    base_model: str
    base_id: str
    weights_digest: str
    size_bytes: int
    config_digest: str
    manifest_digest: str
    max_rank: int
    module_count: int
    reasons: Findings
    warnings: Findings
    record_envelope: bytes
    record_leaf: int
    create_us: int
    update_us: int
    epoch: int

    @property
    def name(self) -> str:
        return revision_name(AdapterName(self.tenant, self.adapter), self.version)

    @property
    def etag(self) -> str:
        return etag_of(self.epoch)


class AliasRow(NamedTuple):
    """A pointer. A removed alias keeps its last target and stays as a tombstone, so that watchers hear of it."""

    adapter_id: int
    tenant: str
    adapter: str
    alias: str
    revision_id: str
    version: int
    removed: bool
    update_us: int
    epoch: int

    @property
    def name(self) -> str:
        return alias_name(AdapterName(self.tenant, self.adapter), self.alias)

    @property
    def etag(self) -> str:
        return etag_of(self.epoch)


class RolloutRow(NamedTuple):
    """A rollout. `generation` counts its moves; `running` is true until it has ended."""

    rollout_row: int
    adapter_id: int
    number: int
    tenant: str
    adapter: str
    alias: str
    base_model: str
    from_revision_id: str
    from_version: int
    to_revision_id: str
    to_version: int
    salt: bytes
    settings: Settings
    position: Position
    generation: int
    running: bool
    create_us: int
    update_us: int
    epoch: int

    @property
    def adapter_name(self) -> AdapterName:
        return AdapterName(self.tenant, self.adapter)

    @property
    def name(self) -> str:
        return rollout_name(self.adapter_name, f"r{self.number}")

    @property
    def etag(self) -> str:
        return f"g{self.generation}"

    @property
    def share(self) -> int:
        """The new revision's share in parts of ten thousand."""
        return self.position.share(self.settings)


class StoryRow(NamedTuple):
    """One decision about a rollout. `phase` is the state after it, `actor` a SPIFFE id or `registry`."""

    generation: int
    event_us: int
    phase: str
    actor: str
    sentence: str


class AuditRow(NamedTuple):
    """One thing that somebody did or was refused; `hash` is as in `loraport.log.events`."""

    sequence: int
    event_us: int
    principal: str
    method: str
    tenant: str
    resource: str
    decision: str
    reason: str
    request_id: str
    hash: bytes
