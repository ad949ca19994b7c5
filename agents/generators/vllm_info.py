"""What a vLLM server says of itself: its weights, its vocabulary, its load, and whether it reports versions."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from driftgym.agents.generators.base import WeightVersion
from driftgym.agents.generators.engine_info import EngineInfo, ReportedLoad
from driftgym.agents.generators.http import EngineHttp, EngineRefusedError
from driftgym.errors import GeneratorError

_GAUGE = r"^vllm:{name}(?:\{{[^}}]*\}})? +(\S+)$"
_RUNNING = re.compile(_GAUGE.format(name="num_requests_running"), re.MULTILINE)
_WAITING = re.compile(_GAUGE.format(name="num_requests_waiting"), re.MULTILINE)
_IS_THERE = (400, 422)  # the route finds its fields missing
_IS_NOT_THERE = (403, 404)  # switched off, or not known


class VLLMInfo(EngineInfo):
    """Asks one vLLM server what it is. Every method raises GeneratorError when it is gone or makes no sense."""

    def __init__(self, http: EngineHttp, *, vocab_size: int | None) -> None:
        """`vocab_size`: when it is known already."""
        super().__init__(http, vocab_size=vocab_size)
        self._http = http
        self._reports_spans: bool | None = None  # the routes of a server stay as it was started
        self._probing = asyncio.Lock()

    async def reports_spans(self) -> bool:
        """True where the server says which weights wrote each token. Asks once."""
        if self._reports_spans is None:
            async with self._probing:
                if self._reports_spans is None:
                    self._reports_spans = await self._has_token_route()
        return self._reports_spans

    async def _has_token_route(self) -> bool:
        try:
            await self._http.post("/inference/v1/generate", {})
        except EngineRefusedError as error:
            if error.status in (*_IS_THERE, *_IS_NOT_THERE):
                return error.status in _IS_THERE
            raise
        raise GeneratorError(f"{self._http.url}: answers a request of nothing")

    async def reported_version(self) -> Any:
        """What it calls the weights that it has, whatever that is."""
        try:
            return (await self._http.get("/weight_info")).get("weight_version")
        except EngineRefusedError as error:
            if error.status not in _IS_NOT_THERE:
                raise
            raise GeneratorError(
                f"{self._http.url}: cannot be given weights; start the server with VLLM_SERVER_DEV_MODE=1"
            ) from error

    async def version_to_keep(self, incarnation: int) -> WeightVersion | None:
        """The weights whose KV cache can be kept over an update; None for those that no run, or another, published.

        A server that is paused has reported all that it decoded, so the versions of its tokens are right.
        """
        try:
            version = WeightVersion.parse(await self.reported_version())
        except (TypeError, ValueError):
            return None
        return version if version.incarnation == incarnation else None

    async def load(self) -> ReportedLoad:
        """How much it has to do."""
        text = await self._http.get_text("/metrics")
        return ReportedLoad(num_running=self._sum(_RUNNING, text), num_queued=self._sum(_WAITING, text), busy_s=None)

    def _sum(self, gauge: re.Pattern[str], text: str) -> int:
        """Over the replicas that the server divides its requests among."""
        try:
            values = [int(float(value)) for value in gauge.findall(text)]
        except (ValueError, OverflowError):
            values = []
        if not values:
            raise GeneratorError(f"{self._http.url}: reports no load; start it without --disable-log-stats")
        return sum(values)

    async def _model(self) -> Mapping[str, Any]:
        models = (await self._http.get("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models else None
        root = first.get("root") if isinstance(first, dict) else None
        return {"model_path": root} if isinstance(root, str) else {}
