"""Page tokens open for the list that sealed them, and for nothing else."""

import base64

import pytest

from services.shared.errors import LoraportError
from services.shared.paging import MAX_PAGE, PageTokens, page_size

TOKENS = PageTokens(b"p" * 32, purpose="registry")


def refused(token: str, *, scope: tuple[str, ...] = ("keys", "acme"), kinds: tuple[type, ...] = (int, str)) -> bool:
    with pytest.raises(LoraportError) as caught:
        TOKENS.open(token, scope=scope, kinds=kinds)
    return caught.value.reason == "INVALID_PAGE_TOKEN"


def test_a_token_opens_for_its_list() -> None:
    token = TOKENS.seal((5, "key"), scope=("keys", "acme"))
    assert TOKENS.open(token, scope=("keys", "acme"), kinds=(int, str)) == (5, "key")
    assert TOKENS.open("", scope=("keys", "acme"), kinds=(int, str)) is None


def test_a_token_hides_what_it_holds() -> None:
    token = TOKENS.seal(("secret-name",), scope=("x",))
    assert b"secret" not in base64.urlsafe_b64decode(token + "==")


@pytest.mark.parametrize("scope", [("keys", "globex"), ("signers", "acme"), ("keysacme",), ("keys", "acme", "")])
def test_another_list_refuses_it(scope: tuple[str, ...]) -> None:
    assert refused(TOKENS.seal((5, "key"), scope=("keys", "acme")), scope=scope)


def test_every_changed_character_is_noticed() -> None:
    token = TOKENS.seal((5, "key"), scope=("keys", "acme"))
    for index, character in enumerate(token[:-1]):
        other = "A" if character != "A" else "B"
        assert refused(token[:index] + other + token[index + 1 :])


def test_another_fleets_or_services_token_and_another_shape_are_refused() -> None:
    assert refused(PageTokens(b"p" * 32, purpose="router").seal((5, "key"), scope=("keys", "acme")))
    assert refused(PageTokens(b"q" * 32, purpose="registry").seal((5, "key"), scope=("keys", "acme")))
    assert refused(TOKENS.seal(("key", 5), scope=("keys", "acme")))
    assert refused(TOKENS.seal((5,), scope=("keys", "acme")))
    for junk in ("x", "=", "ä", "A" * 5000, "\n", "+/+/"):
        assert refused(junk)


@pytest.mark.parametrize(("asked", "given"), [(0, 50), (1, 1), (500, 500), (501, MAX_PAGE), (2**31 - 1, MAX_PAGE)])
def test_page_sizes(asked: int, given: int) -> None:
    assert page_size(asked) == given


def test_a_negative_page_size_is_refused() -> None:
    with pytest.raises(LoraportError, match="page_size"):
        page_size(-1)
