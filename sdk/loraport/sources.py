"""Where a loader fetches a bundle from, instead of taking an upload. What is allowed, the loader's operator decides."""

from dataclasses import dataclass

from loraport.loader.v1.loader_service_pb2 import HttpsSource, HubSource, ImportRequest, S3Source


@dataclass(frozen=True, slots=True)
class Source:
    """A source: what the manifest says of it (`kind`, `uri`, nothing secret), and what the loader is asked for."""

    kind: str
    uri: str
    request: ImportRequest


def hub_source(text: str) -> Source:
    """Returns the source of `owner/repository@<commit of 40 hex digits>`. Raises ValueError."""
    repository, at, commit = text.partition("@")
    if not at or repository.count("/") != 1 or not all(repository.split("/")):
        raise ValueError(f"a hub source is owner/repository@commit, not {text!r:.120}")
    if len(commit) != 40 or set(commit) - set("0123456789abcdef"):
        raise ValueError("the commit is its 40 hex digits; branches and tags move, so they are not taken")
    return Source("hub", f"hf://{text}", ImportRequest(hub=HubSource(repository=repository, commit=commit)))


def s3_source(text: str) -> Source:
    """Returns the source of `endpoint/bucket/config-key,weights-key`; keys may hold slashes. Raises ValueError."""
    place, comma, weights_key = text.partition(",")
    parts = place.split("/", 2)
    if not comma or len(parts) != 3 or not all((*parts, weights_key)):
        raise ValueError(f"an s3 source is endpoint/bucket/config-key,weights-key, not {text!r:.120}")
    endpoint, bucket, config_key = parts
    source = S3Source(endpoint=endpoint, bucket=bucket, config_key=config_key, weights_key=weights_key)
    return Source("s3", f"s3://{place}", ImportRequest(s3=source))


def https_source(config_url: str, weights_url: str) -> Source:
    """Returns the source of two addresses. Queries, which may hold a signature, stay out of the manifest.

    Raises:
        ValueError: an address is not https, or holds a user.
    """
    for url in (config_url, weights_url):
        if not url.lower().startswith("https://") or "@" in url.split("/")[2]:
            raise ValueError("an https source is two addresses that begin with https:// and name no user")
    uri = config_url.partition("?")[0]
    return Source("https", uri, ImportRequest(https=HttpsSource(config_url=config_url, weights_url=weights_url)))
