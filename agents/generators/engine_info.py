"""What an engine says of itself: its weights, its vocabulary, its load, and which forms of weights it takes."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.http import EngineHttp, EngineRefusedError
from driftgym.agents.generators.vocabulary import read_vocab_size
from driftgym.errors import GeneratorError
from driftgym.types import WeightUpdate

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """The load that an engine reports.

    >>> ReportedLoad(num_running=3, num_queued=0, busy_s=None).busy_s is None
    True
    """

    num_running: int
    """Requests that are being decoded; 0 when it does not say."""
    num_queued: int
    """Requests that wait for a place; 0 when it does not say."""
    busy_s: float | None
    """Seconds in which at least one request was being decoded; None when it does not say."""


class EngineInfo:
    """Asks one engine what it is. Every method raises GeneratorError when the engine is gone or makes no sense.

    Real SGLang servers and the embedded one differ here: the former reports its load at `/v1/loads` and not its
    vocabulary, the latter at `/server_info`, and takes more kinds of weights.
    """

    def __init__(self, http: EngineHttp, *, vocab_size: int | None) -> None:
        """`vocab_size`: when it is known already."""
        self._http = http
        self._vocab_size = vocab_size
        self._knows_vocabulary = vocab_size is not None
        self._learning = asyncio.Lock()
        self._has_loads = True
        self._decodes_ahead: bool | None = None  # a server's schedule stays as it was started

    async def vocab_size(self) -> int | None:
        """The model's vocabulary; None when nobody says. Asks once."""
        if not self._knows_vocabulary:
            async with self._learning:
                await self._learn_vocab_size()
        return self._vocab_size

    async def _learn_vocab_size(self) -> None:
        if self._knows_vocabulary:
            return
        model = await self._model()
        size = model.get("vocab_size")
        if isinstance(size, int):
            self._vocab_size = size
        elif isinstance(model.get("model_path"), str):
            await self.learn_from(model["model_path"])
        self._knows_vocabulary = True

    async def learn_from(self, model_folder: str) -> None:
        """Takes the vocabulary from the model in a folder, unless it is known."""
        if self._vocab_size is None:
            self._vocab_size = await asyncio.to_thread(read_vocab_size, model_folder)
            self._knows_vocabulary = self._vocab_size is not None

    async def version(self) -> WeightVersion:
        """The weights that it has."""
        reported = await self.reported_version()
        try:
            return WeightVersion.parse(reported)  # TypeError for what is no text
        except (TypeError, ValueError):
            raise GeneratorError(
                f"{self._http.url}: reports weights {reported!r}, which no run published: update it first, or start "
                f"the server with a weight version of the form incarnation:version"
            ) from None

    async def reported_version(self) -> Any:
        """What it calls the weights that it has, whatever that is."""
        return (await self._model()).get("weight_version")

    async def version_to_keep(self, incarnation: int) -> WeightVersion | None:
        """The weights whose KV cache can be kept over an update; None for those that no run, or another, published.

        Raises:
            GeneratorError: the engine decodes one step ahead of what it reports, so that an update which keeps the
                KV cache makes the version of one token of each running request wrong.
        """
        if self._decodes_ahead is None:
            server = await self._http.get("/server_info")
            self._decodes_ahead = server.get("disable_overlap_schedule") is False
        if self._decodes_ahead:
            raise GeneratorError(
                f"{self._http.url}: cannot keep the KV cache over an update: it decodes one step ahead of what it "
                f"reports; start it with --disable-overlap-schedule, or set generator.keep_kv to false"
            )
        try:
            version = await self.version()
        except GeneratorError:
            return None
        return version if version.incarnation == incarnation else None

    async def update_body(self, update: WeightUpdate, version: WeightVersion) -> Mapping[str, Any]:
        """The body that asks for `update`, but for what becomes of the cache.

        Raises:
            GeneratorError: the engine does not take weights of that kind, or by that way.
        """
        body = {"model_path": update.location, "weight_version": str(version)}
        if update.transport != "disk":
            await self._check_transport(update)
            return body
        kinds = (await self._model()).get("weight_kinds") if update.kind != "full" else ("full",)
        if update.kind not in (kinds or ()):
            raise GeneratorError(f"{self._http.url}: takes full weights alone, not {update.kind}")
        if update.kind == "full":
            return body
        base = WeightVersion(incarnation=update.incarnation, policy_version=update.base_policy_version or 0)
        return {**body, "kind": update.kind, "base_weight_version": str(base), "checksum": update.checksum}

    async def _check_transport(self, update: WeightUpdate) -> None:
        taken = (await self._model()).get("weight_transports") if update.transport == "tensor" else ()
        if update.transport not in (taken or ()):
            raise GeneratorError(f"{self._http.url}: takes weights from disk alone, not by {update.transport}")

    async def load(self) -> ReportedLoad:
        """How much it has to do."""
        if self._has_loads:
            try:
                return _sum_of_loads(await self._http.get("/v1/loads"), url=self._http.url)
            except EngineRefusedError as error:
                if error.status != _NOT_FOUND:
                    raise
                self._has_loads = False
        server = await self._http.get("/server_info")
        return _load(server, ("num_running", "num_queued"), url=self._http.url)

    async def _model(self) -> Mapping[str, Any]:
        return await self._http.get("/model_info")


def _sum_of_loads(reply: Mapping[str, Any], *, url: str) -> ReportedLoad:
    """Over the replicas that the server divides its requests among."""
    loads = reply.get("loads")
    if not isinstance(loads, list) or not all(isinstance(each, dict) for each in loads):
        return _load(reply, ("num_running", "num_queued"), url=url)
    each = [_load(load, ("num_running_reqs", "num_waiting_reqs"), url=url) for load in loads]
    busy_s = [load.busy_s for load in each if load.busy_s is not None]
    return ReportedLoad(
        num_running=sum(load.num_running for load in each),
        num_queued=sum(load.num_queued for load in each),
        busy_s=max(busy_s, default=None),
    )


def _load(figures: Mapping[str, Any], keys: tuple[str, str], *, url: str) -> ReportedLoad:
    try:
        busy_s = None if figures.get("busy_s") is None else float(figures["busy_s"])
        return ReportedLoad(
            num_running=int(figures.get(keys[0]) or 0),
            num_queued=int(figures.get(keys[1]) or 0),
            busy_s=busy_s if busy_s is not None and 0.0 <= busy_s < math.inf else None,
        )
    except (TypeError, ValueError, OverflowError):
        raise GeneratorError(f"{url}: reports a load that makes no sense") from None
