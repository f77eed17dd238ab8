"""What a name may be, a tenant's above all: one rule for the gateway and the admin API. Pure."""

from collections.abc import Iterable
from typing import Final

from kilburn.limits import MAX_NAME_CHARACTERS
from kilburn.reasons import quoted

#: Whose calls are those without a tenant.
DEFAULT_TENANT: Final = "default"

#: The metadata that names one.
TENANT_KEY: Final = "kilburn-tenant"


def fault_of_name(text: str) -> str:
    """Return what is wrong with a name, as "is …" or "has …"; empty where nothing is."""
    if not 1 <= len(text) <= MAX_NAME_CHARACTERS:
        return f"has {len(text)} characters; it must have 1 to {MAX_NAME_CHARACTERS}"
    if not (text.isascii() and text.isprintable()):
        return f"is {quoted(text)}; only printable ASCII is taken"
    if text.isspace():
        return "has only blanks"
    return ""


def tenant_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """Return the tenant that a call's metadata names, else the default one, and what is wrong with it, as a sentence."""
    named = [value for key, value in metadata or () if key == TENANT_KEY]
    if not named:
        return DEFAULT_TENANT, ""
    if len(named) > 1:
        return DEFAULT_TENANT, f"the metadata names {len(named)} tenants; name one"
    tenant = named[0] if isinstance(named[0], str) else named[0].decode("latin-1")
    fault = fault_of_name(tenant)
    return tenant, f"{TENANT_KEY} {fault}" if fault else ""
