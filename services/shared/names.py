"""Resource names: one grammar, one parser, one error.

    tenants/{tenant}                                      baseModels/{base_model}
    tenants/{tenant}/keys/{key}                           tenants/{tenant}/signers/{signer}
    tenants/{tenant}/adapters/{adapter}
    tenants/{tenant}/adapters/{adapter}/revisions/v{version}
    tenants/{tenant}/adapters/{adapter}/aliases/{alias}
    tenants/{tenant}/adapters/{adapter}/rollouts/r{number}

A name is never a path and never reaches a file system or a URL.
"""

import re
from dataclasses import dataclass

from services.shared.errors import LoraportError

_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_ROLLOUT = re.compile(r"r([1-9][0-9]{0,15})")
_VERSION = re.compile(r"v([1-9][0-9]{0,15})")
ID_RULE = "1 to 63 lower-case letters, digits and hyphens, beginning with a letter, not ending with a hyphen"


def is_id(value: str) -> bool:
    """Says whether `value` is a user-chosen id (AIP-122)."""
    return _ID.fullmatch(value) is not None


def check_id(value: str, field: str) -> str:
    """Returns `value` if it is an id.

    Raises:
        LoraportError: INVALID_NAME.
    """
    if not is_id(value):
        raise LoraportError("INVALID_NAME", f"{field} must be {ID_RULE}, not {value!r:.80}", subject=field)
    return value


@dataclass(frozen=True, slots=True)
class AdapterName:
    """`tenants/{tenant}/adapters/{adapter}`."""

    tenant: str
    adapter: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/adapters/{self.adapter}"


def tenant_name(tenant: str) -> str:
    """Returns `tenants/{tenant}`."""
    return f"tenants/{tenant}"


def base_model_name(base_model: str) -> str:
    """Returns `baseModels/{base_model}`."""
    return f"baseModels/{base_model}"


def revision_name(adapter: AdapterName, version: int) -> str:
    """Returns `tenants/{tenant}/adapters/{adapter}/revisions/v{version}`."""
    return f"{adapter}/revisions/v{version}"


def alias_name(adapter: AdapterName | str, alias: str) -> str:
    """Returns `tenants/{tenant}/adapters/{adapter}/aliases/{alias}`."""
    return f"{adapter}/aliases/{alias}"


def rollout_name(adapter: AdapterName, rollout: str) -> str:
    """Returns `tenants/{tenant}/adapters/{adapter}/rollouts/{rollout}`."""
    return f"{adapter}/rollouts/{rollout}"


def _parse(name: str, pattern: tuple[str, ...], field: str) -> list[str]:
    parts = name.split("/")
    fits = len(parts) == len(pattern) and all(
        want == "*" or part == want for part, want in zip(parts, pattern, strict=True)
    )
    if not fits:
        form = "/".join(part if part != "*" else "{id}" for part in pattern)
        raise LoraportError("INVALID_NAME", f"{field} must look like {form}, not {name!r:.120}", subject=field)
    return [part for part, want in zip(parts, pattern, strict=True) if want == "*"]


def parse_tenant(name: str, field: str = "parent") -> str:
    """Returns the tenant's id. Raises LoraportError (INVALID_NAME)."""
    return check_id(_parse(name, ("tenants", "*"), field)[0], field)


def parse_base_model(name: str, field: str = "name") -> str:
    """Returns the base model's id. Raises LoraportError (INVALID_NAME)."""
    return check_id(_parse(name, ("baseModels", "*"), field)[0], field)


def parse_adapter(name: str, field: str = "name") -> AdapterName:
    """Returns the adapter's name. Raises LoraportError (INVALID_NAME)."""
    tenant, adapter = _parse(name, ("tenants", "*", "adapters", "*"), field)
    return AdapterName(check_id(tenant, field), check_id(adapter, field))


def parse_revision(name: str, field: str = "name") -> tuple[AdapterName, int]:
    """Returns the adapter's name and the version. Raises LoraportError (INVALID_NAME)."""
    tenant, adapter, version = _parse(name, ("tenants", "*", "adapters", "*", "revisions", "*"), field)
    match = _VERSION.fullmatch(version)
    if match is None:
        raise LoraportError("INVALID_NAME", f"{field} must end in v{{number}}, not {version!r:.40}", subject=field)
    return AdapterName(check_id(tenant, field), check_id(adapter, field)), int(match.group(1))


def parse_alias(name: str, field: str = "name") -> tuple[AdapterName, str]:
    """Returns the adapter's name and the alias. Raises LoraportError (INVALID_NAME)."""
    tenant, adapter, alias = _parse(name, ("tenants", "*", "adapters", "*", "aliases", "*"), field)
    return AdapterName(check_id(tenant, field), check_id(adapter, field)), check_id(alias, field)


def parse_rollout(name: str, field: str = "name") -> tuple[AdapterName, int]:
    """Returns the adapter's name and the rollout's number. Raises LoraportError (INVALID_NAME)."""
    tenant, adapter, rollout = _parse(name, ("tenants", "*", "adapters", "*", "rollouts", "*"), field)
    match = _ROLLOUT.fullmatch(rollout)
    if match is None:
        raise LoraportError("INVALID_NAME", f"{field} must end in r{{number}}, not {rollout!r:.40}", subject=field)
    return AdapterName(check_id(tenant, field), check_id(adapter, field)), int(match.group(1))


def parse_owned(name: str, collection: str, field: str = "name") -> tuple[str, str]:
    """Returns (tenant, id) of `tenants/{tenant}/{collection}/{id}`. Raises LoraportError (INVALID_NAME)."""
    tenant, owned = _parse(name, ("tenants", "*", collection, "*"), field)
    return check_id(tenant, field), owned
