"""How a command line names an adapter or a revision.

NAME --tenant T          TENANT/NAME          tenants/T/adapters/NAME          an adapter
the same with @vN, or with --version N; or sha256:<64 hex>                      a revision
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraport.cli.views import wrong_use

if TYPE_CHECKING:
    from loraport.admin import AdminClient
    from loraport.registry.v1.adapter_service_pb2 import Revision

_REVISION_ID = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(
    r"(?:tenants/(?P<long_tenant>[^/@]+)/adapters/|(?P<tenant>[^/@]+)/)?(?P<adapter>[^/@]+)"
    r"(?:(?:@|/revisions/)v?(?P<version>[1-9][0-9]{0,15}))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """An adapter, and the version of one revision where it was given."""

    tenant: str
    adapter: str
    version: int | None


def is_revision_id(text: str) -> bool:
    """Says whether `text` is a full revision id."""
    return _REVISION_ID.fullmatch(text) is not None


def parse_reference(text: str, *, tenant: str | None, version: int | None = None) -> Reference:
    """Reads an adapter's or revision's name.

    Raises:
        An error of exit code 2: the name has no tenant, or contradicts an option.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise wrong_use(f"{text!r:.100} names no adapter; write NAME, TENANT/NAME or TENANT/NAME@vN")
    named = match["long_tenant"] or match["tenant"]
    if named is None and tenant is None:
        raise wrong_use(f"whose {text}? Write TENANT/{text} or add --tenant TENANT")
    if named is not None and tenant not in (None, named):
        raise wrong_use(f"{text} is of {named}, but --tenant says {tenant}")
    number = int(match["version"]) if match["version"] else None
    if number is not None and version not in (None, number):
        raise wrong_use(f"{text} is v{number}, but --version says {version}")
    return Reference(named or tenant or "", match["adapter"], version if version is not None else number)


def find_revision(
    admin: "AdminClient", text: str, *, tenant: str | None, version: int | None, state: str | None = None
) -> "Revision":
    """Returns the revision that `text` names: by id, by version, or else the newest (in `state`, if given).

    Raises:
        LoraportError: it is not there.
    """
    from loraport.errors import NotFoundError
    from loraport.publish import state_name

    if is_revision_id(text):
        return admin.get_revision(text)
    reference = parse_reference(text, tenant=tenant, version=version)
    name = f"tenants/{reference.tenant}/adapters/{reference.adapter}"
    if reference.version is not None:
        return admin.get_revision(f"{name}/revisions/v{reference.version}")
    for revision in admin.list_revisions(reference.tenant, reference.adapter):
        if state is None or state_name(revision) == state:
            return revision
    which = f"{state} revision" if state else "revision"
    raise NotFoundError(f"{reference.tenant}/{reference.adapter} has no {which}", reason="REVISION_NOT_FOUND")
