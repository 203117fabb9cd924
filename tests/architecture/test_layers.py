"""The walls of the house (docs/architecture.md): who may import what, and how large a room may be."""

import ast
import re
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, Module, modules, within

SERVICES = ("registry", "loader", "router", "executor")
DEVICE_ROOMS = ("services.executor.engine", "services.executor.model", "services.executor.kernels")

# Rules and tables: no I/O, clock, randomness, gRPC, stubs or torch.
PURE = (
    "loraport.bundle.base",
    "loraport.bundle.canonical",
    "loraport.bundle.codes",
    "loraport.bundle.digest",
    "loraport.bundle.identity",
    "loraport.bundle.manifest",
    "loraport.bundle.module_table",
    "loraport.bundle.patterns",
    "loraport.bundle.peft_config",
    "loraport.bundle.safetensors_header",
    "loraport.bundle.tensor_values",
    "loraport.bundle.verdict",
    "loraport.bundle.verify",
    "loraport.deploy.board",
    "loraport.deploy.site",
    "loraport.log.audit",
    "loraport.log.checkpoint",
    "loraport.log.events",
    "loraport.log.leaf",
    "loraport.log.merkle",
    "loraport.log.peers",
    "loraport.log.replay",
    "loraport.log.restrictions",
    "loraport.log.signatures",
    "loraport.patience",
    "loraport.trust.delegation",
    "loraport.trust.edit",
    "loraport.trust.root",
    "services.shared.access",
    "services.shared.catalog",
    "services.shared.errors",
    "services.shared.futures",
    "services.shared.metrics",
    "services.shared.names",
    "services.shared.paging",
    "services.shared.prefix_hash",
    "services.shared.quotas",
    "services.shared.residency",
    "services.shared.restraint",
    "services.shared.sampling",
    "services.shared.split",
    "services.shared.statements",
    "services.registry.catalog",
    "services.registry.lifecycle",
    "services.registry.records",
    "services.registry.refusals",
    "services.registry.rollout.arms",
    "services.registry.rollout.control",
    "services.registry.rollout.judge",
    "services.registry.rollout.machine",
    "services.registry.rollout.plan",
    "services.registry.rollout.sequences",
    "services.registry.rollout.settings",
    "services.registry.rollout.states",
    "services.loader.disk_tier",
    "services.loader.fetch.addresses",
    "services.loader.fetch.config",
    "services.loader.fetch.faults",
    "services.loader.fetch.limits",
    "services.loader.fetch.sources",
    "services.loader.host_tier",
    "services.loader.quota",
    "services.loader.shares",
    "services.loader.stages",
    "services.router.answers",
    "services.router.catalog_view",
    "services.router.detokenize",
    "services.router.dispatch",
    "services.router.events",
    "services.router.fair_queue",
    "services.router.fleet_view",
    "services.router.ledger",
    "services.router.locality",
    "services.router.members",
    "services.router.observations",
    "services.router.rollout_split",
    "services.router.placement",
    "services.router.capacity",
    "services.router.popularity",
    "services.router.prices",
    "services.router.quota",
    "services.router.reasons",
    "services.router.shared_work",
    "services.router.validate",
    "services.router.working_set",
    "services.executor.adapter_pool",
    "services.executor.block_tables",
    "services.executor.eviction",
    "services.executor.intake",
    "services.executor.kernels.graphs",
    "services.executor.kernels.layout",
    "services.executor.kernels.shards",
    "services.executor.kernels.variants",
    "services.executor.kernels.work",
    "services.executor.kv_blocks",
    "services.executor.model.config",
    "services.executor.model.families",
    "services.executor.plan",
    "services.executor.prefill",
    "services.executor.request",
    "services.executor.scheduler",
    "services.executor.step_meter",
    "services.executor.spec_check",
    "services.executor.stuck",
)
IMPURE = ("grpc", "torch", "time", "random", "secrets", "uuid", "os", "pathlib", "asyncio", "threading", "socket")

MAX_MODULE, MAX_FUNCTION, MAX_CLASS = 400, 60, 300
MAX_FIELDS = 25
# name: why it may be larger
LARGER: dict[str, str] = {}


def _import_faults(module: Module, forbidden: tuple[str, ...]) -> set[str]:
    return {name for name in module.imports() if within(name, forbidden)}


def test_every_pure_module_exists() -> None:
    assert set(PURE) <= {module.name for module in modules()}


@pytest.mark.parametrize("module", [m for m in modules() if m.name in PURE], ids=lambda m: m.name)
def test_pure_modules_import_nothing_impure(module: Module) -> None:
    stubs = {name for name in module.imports() if re.search(r"_pb2(_grpc)?(\.|$)", name)}
    assert not _import_faults(module, IMPURE) | stubs


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    others = tuple(f"services.{other}" for other in SERVICES if other != service)
    faults = {m.name: _import_faults(m, others) for m in modules() if within(m.name, (f"services.{service}",))}
    assert not {name: found for name, found in faults.items() if found}


def test_the_shared_rooms_and_the_sdk_import_no_service() -> None:
    services = tuple(f"services.{service}" for service in SERVICES)
    for module in modules():
        if within(module.name, ("services.shared",)):
            assert not _import_faults(module, services), module.name
        if within(module.name, ("loraport",)):
            assert not _import_faults(module, ("services",)), module.name


def test_only_the_device_rooms_import_torch() -> None:
    found = {m.name for m in modules() if _import_faults(m, ("torch", "transformers", "peft"))}
    assert {name for name in found if not within(name, DEVICE_ROOMS)} == set()


def test_init_files_are_empty() -> None:
    for module in modules():
        if module.path.name == "__init__.py" and module.name != "loraport":
            assert module.path.read_text() == "", f"{module.path.relative_to(ROOT)} must be empty"


def test_rooms_stay_small() -> None:
    faults = []
    for module in modules():
        if module.line_count > MAX_MODULE:
            faults.append((module.name, module.line_count, MAX_MODULE))
        for node in ast.walk(module.tree):
            limit = {ast.FunctionDef: MAX_FUNCTION, ast.AsyncFunctionDef: MAX_FUNCTION, ast.ClassDef: MAX_CLASS}
            if type(node) in limit:
                length = node.end_lineno - node.lineno + 1
                if length > limit[type(node)]:
                    faults.append((f"{module.name}.{node.name}", length, limit[type(node)]))
    over = [fault for fault in faults if fault[0] not in LARGER]
    assert not over, f"(name, lines, limit): {over}; split it, or list it in LARGER with the reason"
    assert set(LARGER) <= {fault[0] for fault in faults}, "an exception that is no longer needed"


def test_configurations_stay_readable() -> None:
    """A service's configuration has fewer than 25 fields; what belongs together is a group."""
    found = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if module.name.endswith(".config") and isinstance(node, ast.ClassDef):
                found[f"{module.name}.{node.name}"] = sum(isinstance(part, ast.AnnAssign) for part in node.body)
    assert "services.executor.config.ExecutorConfig" in found
    assert not {name: count for name, count in found.items() if count >= MAX_FIELDS}


def test_no_unpickler_is_reachable() -> None:
    forbidden = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
    for module in modules():
        assert not _import_faults(module, forbidden), module.name
        text = module.path.read_text()
        assert not re.search(r"torch\.load\(|trust_remote_code\s*=\s*True|allow_pickle\s*=\s*True", text), module.name


def test_nothing_listens_on_every_address() -> None:
    for module in modules():
        # In a container every address is the container's own, and compose.yaml and network.yaml say who reaches it.
        if module.name == "loraport.deploy.site":
            continue
        # "0.0.0.0/8" is a network that the loader refuses to fetch from, not an address to listen on.
        assert not re.search(r'"(0\.0\.0\.0|\[?::\]?)(:\d*)?"', module.path.read_text()), module.name


def test_every_server_is_one_with_the_guard() -> None:
    for module in modules():
        if module.name != "services.shared.rpc.server":
            text = module.path.read_text()
            assert not re.search(r"grpc\.(aio\.)?server\(|add_(in)?secure_port\(", text), module.name


def test_importing_has_no_side_effect_and_needs_no_torch() -> None:
    """Imports everything outside the device rooms in a process where torch cannot be imported."""
    # A client library that is used inside the device rooms may be missing on a router's machine; the rest must import.
    names = [
        m.name
        for m in modules()
        if not within(m.name, DEVICE_ROOMS) and not m.name.endswith("__main__") and not _imports_device_room(m)
    ]
    code = (
        "import sys, importlib, threading\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'peft'): raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "before = threading.active_count()\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "assert threading.active_count() == before, 'an import started a thread'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def _imports_device_room(module: Module) -> bool:
    return bool(_import_faults(module, DEVICE_ROOMS))
