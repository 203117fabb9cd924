"""Everything that can be wrong with a source: one code, one reason for the caller, one sentence."""

from types import MappingProxyType

# code: (reason of services.shared.errors, what is wrong)
FAULTS = MappingProxyType(
    {
        # what was named
        "SCHEME": ("SOURCE_NOT_ALLOWED", "only https addresses are fetched"),
        "CHARACTER": ("SOURCE_NOT_ALLOWED", "it holds a character that no address may hold"),
        "TOO_LONG": ("SOURCE_NOT_ALLOWED", "it is longer than an address may be"),
        "USERINFO": ("SOURCE_NOT_ALLOWED", "an address must not hold a user or a password"),
        "PORT": ("SOURCE_NOT_ALLOWED", "only port 443 is used"),
        "IP_LITERAL": ("SOURCE_NOT_ALLOWED", "a host is given by its name, not by its number"),
        "HOST": ("SOURCE_NOT_ALLOWED", "the host is not a fully qualified name"),
        "PATH": ("SOURCE_NOT_ALLOWED", "the path is missing, or holds dot segments or broken escapes"),
        "FRAGMENT": ("SOURCE_NOT_ALLOWED", "an address of a file has no fragment"),
        "REPOSITORY": ("SOURCE_NOT_ALLOWED", "a repository is written owner/name"),
        "COMMIT": ("SOURCE_NOT_ALLOWED", "a commit is 40 hex digits; branches and tags move"),
        "KEY": ("SOURCE_NOT_ALLOWED", "the key is empty, too long, or holds dot segments or control characters"),
        "STORE_NOT_ALLOWED": (
            "SOURCE_NOT_ALLOWED",
            "a tenant reads from the object stores and buckets, and below the prefix, that are listed for it",
        ),
        "NO_HUB": ("SOURCE_NOT_ALLOWED", "no model hub is allowed"),
        "HOST_NOT_ALLOWED": ("SOURCE_NOT_ALLOWED", "the host is not on the allow-list"),
        # where it leads
        "ADDRESS": ("SOURCE_NOT_ALLOWED", "the host has an address that is not public"),
        "REDIRECT": ("SOURCE_NOT_ALLOWED", "it redirects, or redirects too often"),
        # what comes
        "WRONG_COMMIT": ("SOURCE_UNUSABLE", "the hub answers for another commit than the pinned one"),
        "MISSING": ("SOURCE_UNUSABLE", "there is no such file"),
        "DENIED": ("SOURCE_UNUSABLE", "the source does not give the file to this loader"),
        "STATUS": ("SOURCE_UNUSABLE", "the source answers with a status that means no file"),
        "HEADERS": ("SOURCE_UNUSABLE", "the answer is not well-formed HTTP/1.1"),
        "ENCODED": ("SOURCE_UNUSABLE", "the source sends an encoded body although only plain bytes were asked for"),
        "LENGTH": ("SOURCE_UNUSABLE", "the source does not say exactly how long the body is"),
        "SIZE": ("SOURCE_UNUSABLE", "the file has another size than was signed, or is too large"),
        "RANGE": ("SOURCE_UNUSABLE", "the source answers with another range than was asked for"),
        "CHANGED": ("SOURCE_UNUSABLE", "the file changed while it was fetched"),
        # what does not come
        "RESOLVE": ("SOURCE_UNAVAILABLE", "the host's name cannot be resolved"),
        "CONNECT": ("SOURCE_UNAVAILABLE", "the host cannot be reached"),
        "TLS": ("SOURCE_UNAVAILABLE", "the host does not prove that it is the one named"),
        "BUSY": ("SOURCE_UNAVAILABLE", "the source asks to come again later"),
        "BROKEN": ("SOURCE_UNAVAILABLE", "the connection broke"),
        "SHORT": ("SOURCE_UNAVAILABLE", "the body ended early"),
        "SLOW": ("SOURCE_UNAVAILABLE", "the source is slower than the least rate"),
        "STOPPED": ("SOURCE_UNAVAILABLE", "nobody waits for the file any more"),
    }
)
# After these, what is already here can be kept and the rest asked for again.
RESUMABLE = frozenset({"CONNECT", "BUSY", "BROKEN", "SHORT"})


class FetchFault(Exception):
    """A source is not allowed, or does not give what was asked for. `meaning` goes by the code alone; `detail` says
    more and may name the source's host: whoever did not name that is not told."""

    def __init__(self, code: str, detail: str = "") -> None:
        self.code = code
        self.reason, self.meaning = FAULTS[code]
        self.detail = f"{self.meaning} ({detail})" if detail else self.meaning
        super().__init__(f"{code}: {self.detail}")

    @property
    def resumable(self) -> bool:
        """Whether asking again may help."""
        return self.code in RESUMABLE
