"""API keys, page tokens, text rules and configuration: the small rooms at the router's door."""

import hashlib
import hmac
import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.router.auth import bearer, check_key
from services.router.config import RouterConfig
from services.router.text import BaseText, TextError
from services.router.validate import Message
from services.shared.catalog import CatalogView, KeyItem, TenantItem
from services.shared.config import ConfigError, from_mapping
from services.shared.errors import LoraportError
from tests.contract.router_world import write_tokenizer

PEPPER = b"p" * 32
SECRET = "lk_abcdefghij_" + "S" * 43


def view(**changes: object) -> CatalogView:
    fields: dict = {
        "key_id": "abcdefghij", "tenant": "acme", "expires": None, "revoked": False, "scopes": frozenset({"list"}),
        "secret_hmac": hmac.new(PEPPER, SECRET.encode(), hashlib.sha256).digest(),
    }  # fmt: skip
    view = CatalogView()
    view.apply([TenantItem("acme", 1.0, True), KeyItem(**{**fields, **changes})], epoch=1, synced=True)
    return view


def test_a_key_speaks_for_its_tenant_with_its_scopes() -> None:
    principal = check_key(view(expires=101.0), SECRET, pepper=PEPPER, now=100.0)
    assert principal is not None
    assert (principal.plane, principal.role, principal.scopes) == ("user", "acme", {"list"})
    assert principal.label == "tenants/acme/keys/abcdefghij"


@pytest.mark.parametrize(
    "secret", ["", "lk_", SECRET[:-1], SECRET + "S", SECRET.upper(), SECRET[:-1] + "T", "lk_abcdefghix_" + "S" * 43]
)
def test_keys_that_are_not_it(secret: str) -> None:
    assert check_key(view(), secret, pepper=PEPPER, now=100.0) is None


@pytest.mark.parametrize("changes", [{"revoked": True}, {"expires": 100.0}, {"tenant": "gone"}, {"secret_hmac": b""}])
def test_keys_that_no_longer_open(changes: dict) -> None:
    assert check_key(view(**changes), SECRET, pepper=PEPPER, now=100.0) is None


def test_another_pepper_opens_nothing() -> None:
    assert check_key(view(), SECRET, pepper=b"q" * 32, now=100.0) is None


def test_bearer() -> None:
    assert bearer({"authorization": f"Bearer {SECRET}"}) == SECRET
    assert bearer({"authorization": f"bearer  {SECRET} "}) == SECRET
    assert bearer({"authorization": f"Basic {SECRET}"}) == bearer({"authorization": SECRET}) == bearer({}) == ""


def test_the_chat_template_writes_the_conversation(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = BaseText.load(tmp_path)
    assert text.render([Message("user", "{{ 1 + 1 }}")]) == "<|user|>{{ 1 + 1 }}<|assistant|>"


def test_the_template_is_sandboxed_and_may_refuse(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for template, detail in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "cannot take"),
        ("{{ messages[7]['content'].x.y }}", "cannot take"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(LoraportError, match=detail) as caught:
            BaseText.load(tmp_path).encode_messages([Message("user", "hi")])
        assert caught.value.reason == "INVALID_REQUEST"


def test_a_named_template_and_a_template_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert BaseText.load(tmp_path).render([Message("user", "x")]) == "<s>yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert BaseText.load(tmp_path).render([Message("user", "x")]) == "file"


def test_a_tokenizer_without_a_length_limit_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": int(1e30)}))
    assert BaseText.load(tmp_path).render([Message("user", "x")])


def test_a_base_without_a_template_takes_prompts_only(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    text = BaseText.load(tmp_path)
    assert text.encode("fox")
    with pytest.raises(LoraportError, match="no chat template"):
        text.encode_messages([Message("user", "hi")])


def test_directories_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="cannot read"):
        BaseText.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="is no tokenizer"):
        BaseText.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    with pytest.raises(TextError, match="chat template"):
        BaseText.load(tmp_path)


CONFIG: dict = {
    "user_address": "127.0.0.1:7400", "admin_address": "127.0.0.1:7410", "registry_address": "127.0.0.1:7401",
    "executors": [{"name": "tiny-0", "address": "127.0.0.1:7403", "base_model": "tiny"}], "tokenizers": {"tiny": "/bases/tiny"},
    "tls": {"certificate": "c", "key": "k", "service_ca": "s", "admin_ca": "a"}, "trust_dir": "t", "signing_key": "r",
    "pepper_file": "p",
}  # fmt: skip


def test_config() -> None:
    assert from_mapping(RouterConfig, CONFIG, where="x").executors[0].name == "tiny-0"
    twice = CONFIG["executors"] * 2
    for changes, why in (
        ({"executors": twice}, "same name"),
        ({"tokenizers": {}}, "no tokenizer directory"),
        ({"max_queued": 0}, "max_queued"),
        ({"poll_interval_s": 0}, "poll_interval_s"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ):
        with pytest.raises(ConfigError, match=why):
            from_mapping(RouterConfig, {**CONFIG, **changes}, where="x")


def test_the_router_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, services.router.service\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=60)
