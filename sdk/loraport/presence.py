"""Where a revision is right now: on which devices, and in the loader's memory; every service is asked itself.

The router's residency is what executors reported some moments ago. This is what they say when asked, so it is also the
proof that a revoked revision is gone.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from loraport.dev.layout import read_endpoints
from loraport.errors import LoraportError, NotFoundError, error_from_rpc
from loraport.executor.v1 import executor_service_pb2 as executor_pb
from loraport.executor.v1 import executor_service_pb2_grpc as executor_stubs
from loraport.loader.v1 import loader_service_pb2 as loader_pb
from loraport.loader.v1 import loader_service_pb2_grpc as loader_stubs
from loraport.log.peers import Told

# A service that does not answer is told as such, and soon: the others' answers are waiting.
TIMEOUT_S = 5.0
# A mode changes when nothing runs any more, and the revision may have to be loaded first.
MODE_TIMEOUT_S = 60.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class PresenceClient:
    """Asks executors and the loader under an admin's certificate. Close it, or use it in a `with` statement."""

    def __init__(self, *, executors: Mapping[str, str], loader: str, ca: bytes, certificate: bytes, key: bytes) -> None:
        """`executors` maps names to addresses; addresses are `host:port`; `ca`, `certificate` and `key` are PEM."""
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        self._addresses = dict(executors)
        self._loader_address = loader
        self._channels = {
            address: grpc.secure_channel(address, credentials, options=_OPTIONS)
            for address in {*executors.values(), loader}
        }

    @classmethod
    def local(cls, data: str | Path = ".loraport") -> "PresenceClient":
        """Returns a client of the local stack at `data`.

        Raises:
            StackError: there is no such stack.
            OSError: its credentials cannot be read.
        """
        endpoints = read_endpoints(data)
        credentials = endpoints["credentials"]
        return cls(
            executors=endpoints.get("executors", {}),
            loader=endpoints["loader"],
            ca=Path(credentials["ca"]).read_bytes(),
            certificate=Path(credentials["admin_certificate"]).read_bytes(),
            key=Path(credentials["admin_key"]).read_bytes(),
        )

    def executors(self) -> dict[str, executor_pb.StateResponse | LoraportError]:
        """Returns what each executor holds and does, or why it did not say, by name."""
        found: dict[str, executor_pb.StateResponse | LoraportError] = {}
        for name in self._addresses:
            try:
                found[name] = self.executor(name)
            except LoraportError as error:
                found[name] = error
        return found

    def executor(self, executor: str) -> executor_pb.StateResponse:
        """Returns what one executor holds and does. Raises LoraportError, NOT_FOUND (`EXECUTOR_NOT_FOUND`) too."""
        stub, address = self._stub(executor)
        state: executor_pb.StateResponse = self._call(stub.State, executor_pb.StateRequest(), address)
        return state

    def drain(self, executor: str, *, undrain: bool = False) -> None:
        """Has an executor take no further request, or take them again, whoever sends them. What runs there goes on.

        Raises:
            LoraportError: NOT_FOUND (`EXECUTOR_NOT_FOUND`), or why it was not told.
        """
        stub, address = self._stub(executor)
        self._call(stub.Drain, executor_pb.DrainRequest(undrain=undrain, at_once=True), address)

    def inventory(self) -> loader_pb.InventoryResponse:
        """Returns what the loader holds in memory and is loading. Raises LoraportError."""
        stub: Any = loader_stubs.LoaderServiceStub(self._channels[self._loader_address])
        found: loader_pb.InventoryResponse = self._call(
            stub.Inventory, loader_pb.InventoryRequest(), self._loader_address
        )
        return found

    def set_mode(self, executor: str, revision_id: str = "") -> executor_pb.SetModeResponse:
        """Puts an executor in merged mode for a revision, or in grouped mode for an empty id; waits until it is.

        Raises:
            LoraportError: NOT_FOUND (`EXECUTOR_NOT_FOUND`), or the executor's refusal.
        """
        stub, address = self._stub(executor)
        request = executor_pb.SetModeRequest(revision_id=revision_id)
        changed: executor_pb.SetModeResponse = self._call(stub.SetMode, request, address, timeout_s=MODE_TIMEOUT_S)
        return changed

    def logs(self) -> list[Told]:
        """Returns which log the loader and each executor believe, or why they did not say."""
        answers: dict[str, Any] = {}
        try:
            answers["loader"] = self.inventory()
        except LoraportError as error:
            answers["loader"] = error
        answers |= {f"executor/{name}": state for name, state in self.executors().items()}
        return [_told(peer, answer) for peer, answer in answers.items()]

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stub(self, executor: str) -> tuple[Any, str]:
        if executor not in self._addresses:
            names = ", ".join(sorted(self._addresses)) or "none"
            raise NotFoundError(f"no executor {executor:.100}; there are: {names}", reason="EXECUTOR_NOT_FOUND")
        address = self._addresses[executor]
        stub: Any = executor_stubs.ExecutorServiceStub(self._channels[address])
        return stub, address

    def _call(self, method: Any, request: Any, address: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=address) from None


def _told(peer: str, answer: Any) -> Told:
    if isinstance(answer, LoraportError):
        return Told(peer=peer, fault=str(answer))
    seen = answer.checkpoint
    return Told(peer=peer, tree_size=seen.tree_size, root_hash=seen.root_hash, envelope=seen.envelope)
