"""The client for asyncio. `loraport.client` has the same one for threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from loraport import wire
from loraport.completion import CompletionBuilder
from loraport.errors import error_from_rpc
from loraport.patience import Patience
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.values import Adapter, Completion, Event, Score, TokenCount
from loraport.wire import GenerateOptions, PromptOptions, ScoreOptions, Settings


class AsyncClient:
    """Generates text with the adapters of one tenant. Belongs to one event loop.

    Every call has a timeout, 60 seconds unless set otherwise, and raises `LoraportError` and nothing else.

        async with AsyncClient("127.0.0.1:7400", api_key=key, ca_certificate="ca.pem") as client:
            print((await client.generate("Hello", adapter="pirate", max_tokens=24)).text)
    """

    def __init__(
        self,
        endpoint: str,
        *,
        api_key: str | None = None,
        token: wire.Token | None = None,
        ca_certificate: str | Path | None = None,
        timeout: float | None = wire.DEFAULT_TIMEOUT_S,
        tenant: str | None = None,
        patience: float = 0.0,
    ) -> None:
        """Makes a client; nothing is sent before the first call.

        Args:
            endpoint: The router, `host:port`.
            api_key: `lk_…`; the tenant follows from it.
            token: Instead of a key: an access token of an issuer that the router knows, or a function that returns one
                that is valid now. It is called before every call in the event loop, so it must not block.
            ca_certificate: PEM file of the CA that signed the router's certificate; None for the system's CAs.
            timeout: Seconds that a call may take; None for no limit.
            tenant: The key's tenant, only needed for `get_adapter` by id.
            patience: Seconds, within the timeout, for which a call that has been told nothing yet is tried again while
                the fleet is unavailable, as in an upgrade; 0 for a first failure that is the last.

        Raises:
            InvalidArgumentError: the endpoint or the certificate file cannot be used.
            UnauthenticatedError: there is not exactly one credential, or it cannot be one.
        """
        self._open(
            wire.make_settings(
                endpoint,
                api_key=api_key,
                token=token,
                ca_certificate=ca_certificate,
                timeout=timeout,
                tenant=tenant,
                patience=patience,
            )
        )

    @classmethod
    def local(
        cls,
        data_dir: str | Path | None = None,
        *,
        tenant: str,
        token_file: str | Path | None = None,
        timeout: float | None = wire.DEFAULT_TIMEOUT_S,
        patience: float = 0.0,
    ) -> Self:
        """Returns a client of the local stack at `data_dir`, with the key that `loraport key create` kept there.

        The default is what the command line takes: `LORAPORT_DATA`, else `.loraport`. With a `token_file`, the access
        token in it is the credential, read anew for every call.

        Raises:
            UnavailableError: there is no stack.
            UnauthenticatedError: there is no key of the tenant, or no token in the file.
        """
        client = cls.__new__(cls)
        client._open(
            wire.local_settings(data_dir, tenant=tenant, token_file=token_file, timeout=timeout, patience=patience)
        )
        return client

    def _open(self, settings: Settings) -> None:
        self._settings = settings
        self._channel = grpc.aio.secure_channel(settings.endpoint, settings.credentials(), options=settings.options())
        self._stub: Any = stubs.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the answers to a prompt: `prompt`, or `messages=`, or `prompt_token_ids=`.

        Raises:
            LoraportError: see `loraport.errors`.
        """
        builder = CompletionBuilder()
        async for event in self.stream(prompt, **options):
            builder.add(event)
        return builder.result()

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncIterator[Event]:
        """Yields a Started, then Tokens as they come, and one Finished per answer.

        Leaving the iterator cancels the request. Arguments are checked at once, the rest while iterating.

        Raises:
            LoraportError: see `loraport.errors`.
        """
        timeout = options.pop("timeout", self._settings.timeout)
        return self._events(wire.generate_request(prompt, options), timeout)

    async def count_tokens(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> TokenCount:
        """Counts the tokens of a prompt, without running the model. Raises LoraportError."""
        return wire.count_from_proto(
            await self._call(self._stub.CountTokens, wire.count_request(prompt, options), self._settings.timeout)
        )

    async def score(
        self, prompt_token_ids: Sequence[int], continuation_token_ids: Sequence[int], **options: Unpack[ScoreOptions]
    ) -> Score:
        """Returns how likely the continuation is after the prompt, token by token. Raises LoraportError."""
        timeout = options.pop("timeout", self._settings.timeout)
        request = wire.score_request(prompt_token_ids, continuation_token_ids, options)
        return wire.score_from_proto(await self._call(self._stub.Score, request, timeout))

    async def report_outcome(self, request_id: str, *, accepted: bool) -> None:
        """Says whether an answer was of use, by its `Completion.request_id`; a rollout that it was part of counts it.

        The first word on an answer counts. Raises LoraportError: NotFoundError, the tenant made no such request there.
        """
        outcomes = pb.ReportOutcomeRequest.Outcome
        outcome = outcomes.OUTCOME_ACCEPTED if accepted else outcomes.OUTCOME_REJECTED
        request = pb.ReportOutcomeRequest(request_id=request_id, outcome=outcome)
        await self._call(self._stub.ReportOutcome, request, self._settings.timeout)

    async def list_adapters(self) -> list[Adapter]:
        """Returns the adapters of the key's tenant, in order of name. Raises LoraportError."""
        found: list[Adapter] = []
        request = pb.ListAdaptersRequest(page_size=wire.PAGE_SIZE)
        while True:
            page = await self._call(self._stub.ListAdapters, request, self._settings.timeout)
            found.extend(map(wire.adapter_from_proto, page.adapters))
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def get_adapter(self, adapter: str) -> Adapter:
        """Returns one adapter by resource name, or by id where the client knows the tenant. Raises LoraportError."""
        request = pb.GetAdapterRequest(name=self._settings.adapter_name(adapter))
        return wire.adapter_from_proto(await self._call(self._stub.GetAdapter, request, self._settings.timeout))

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        request_id = wire.new_request_id()
        tries = Patience(self._settings.patience, timeout, now=time.monotonic())
        while True:
            try:
                left, metadata = tries.left(time.monotonic()), self._settings.metadata(request_id)
                return await method(request, timeout=left, metadata=metadata)
            except grpc.RpcError as error:
                await asyncio.sleep(self._pause(tries, error, request_id))

    async def _events(self, request: pb.GenerateRequest, timeout: float | None) -> AsyncIterator[Event]:
        request_id = wire.new_request_id()
        tries = Patience(self._settings.patience, timeout, now=time.monotonic())
        begun = False
        while True:
            left, metadata = tries.left(time.monotonic()), self._settings.metadata(request_id)
            call = self._stub.Generate(request, timeout=left, metadata=metadata)
            try:
                async for response in call:
                    begun = True
                    for event in wire.events_from_proto(response, request_id):
                        yield event
                return
            except grpc.RpcError as error:
                pause = self._pause(tries, error, request_id, begun=begun)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    def _pause(self, tries: Patience, error: grpc.RpcError, request_id: str, *, begun: bool = False) -> float:
        """Returns how long to wait before the next try. Raises LoraportError when there is none."""
        failure = error_from_rpc(error, endpoint=self._settings.endpoint, request_id=request_id)
        pause = tries.after(failure, begun=begun, now=time.monotonic())
        if pause is None:
            raise failure from None
        return pause
