"""The commands of `driftgym sandbox`: images, live boxes, boxes of dead owners, figures.

News for people go to standard error, with a spinner or a bar on a terminal. Results go to standard output; with
`--json` they are one JSON object, and nothing else is written there.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from driftgym.errors import ConfigError, SandboxError

_ENGINE_TIMEOUT_S = 10.0
_T = TypeVar("_T")
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

app = typer.Typer(
    help="Sandboxes: build images, list boxes, remove orphans, measure.", no_args_is_help=True, add_completion=False
)


@app.command("build", epilog="Example: driftgym sandbox build my-box/ --json")
def sandbox_build(
    folder: Annotated[Path | None, typer.Argument(help="A folder with a Dockerfile; none is the base image.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build it also when it is there.")] = False,
    mirror: Annotated[str | None, typer.Option(help="Debian's packages are taken from this URL.")] = None,
    pull: Annotated[bool, typer.Option("--pull", help="Pull the images that FOLDER begins with.")] = False,
    as_json: _Json = False,
) -> None:
    """Build the image of a Dockerfile, or the base image, which needs no registry. Does nothing when it is there."""
    if folder is not None and mirror is not None:
        raise ConfigError("sandbox build: --mirror is for the base image, not for a FOLDER with a Dockerfile")
    if folder is None and pull:
        raise ConfigError("sandbox build: --pull is for a FOLDER with a Dockerfile; the base image needs no registry")
    _require_docker()
    from driftgym.sandboxes.images import BASE_IMAGE, build_base_image, build_folder

    async def build(engine: Any) -> str:
        with _news() as say:
            if folder is not None:
                return await build_folder(engine, str(folder), say=say, may_pull=pull, rebuild=rebuild)
            await build_base_image(engine, say=say, mirror=mirror, rebuild=rebuild)
            return BASE_IMAGE

    name = _with_engine(build)
    _print({"image": name}, text=name, as_json=as_json)


@app.command("list", epilog="Example: driftgym sandbox list --json")
def sandbox_list(as_json: _Json = False) -> None:
    """List driftgym's boxes on this machine's Docker engine, in any state, of any owner."""
    _require_docker()
    from driftgym.sandboxes.reaper import list_boxes

    boxes = _with_engine(list_boxes)
    lines = (
        f"{box.sandbox_id[:12]}  {box.state:10}  {box.age_s:8.0f} s  owner {box.owner} "
        f"({'alive' if box.owner_is_alive else 'dead'})"
        for box in boxes
    )
    if not boxes:
        typer.echo("no boxes of driftgym's on this Docker engine", err=True)
    _print({"boxes": [dataclasses.asdict(box) for box in boxes]}, text="\n".join(lines), as_json=as_json)


@app.command("reap", epilog="Example: driftgym sandbox reap")
def sandbox_reap(as_json: _Json = False) -> None:
    """Remove the boxes whose owner's process is gone, and the folders that it left; never those of a living one."""
    from driftgym.sandboxes.owned_folders import sweep_folders

    num_folders = sweep_folders()
    if num_folders:
        typer.echo(f"{num_folders} folders of boxes that were processes removed", err=True)
    _require_docker()
    from driftgym.sandboxes.reaper import is_left_over, list_boxes, sweep

    async def reap(engine: Any) -> tuple[int, list[str]]:
        orphans = {box.sandbox_id for box in await list_boxes(engine) if is_left_over(box)}
        num_removed = await sweep(engine)
        return num_removed, [box.sandbox_id[:12] for box in await list_boxes(engine) if box.sandbox_id in orphans]

    num_removed, left = _with_engine(reap)
    counts = {"num_removed": num_removed, "num_left": len(left), "num_folders_removed": num_folders}
    _print(counts, text=f"{num_removed} boxes removed", as_json=as_json)
    if left:
        raise SandboxError(f"{len(left)} are still there ({', '.join(left)}): try again, or docker rm -f ID")


@app.command("bench", epilog="Example: driftgym sandbox bench --quick --runtime runsc --json")
def sandbox_bench(
    image: Annotated[str | None, typer.Option(help="An image that the engine has; none is the base image.")] = None,
    runtime: Annotated[str | None, typer.Option(help="The engine's runtime, as runsc (gVisor).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer calls: half a minute in the place of two.")] = False,
    as_json: _Json = False,
) -> None:
    """Measure what a box costs here: commands, the warm pool, resets, starts, and the engine's own rate beside."""
    _require_docker()
    from driftgym.sandboxes.base import SandboxSpec
    from driftgym.sandboxes.bench import FULL, QUICK, measure

    spec = SandboxSpec(image=image, runtime=runtime)
    with _bar("measuring") as advance:
        figures = asyncio.run(measure(spec, plan=QUICK if quick else FULL, on_progress=advance))
    _print(figures.as_dict(), text=figures.describe(), as_json=as_json)


def _print(result: Mapping[str, Any], *, text: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
    elif text:
        typer.echo(text)


@contextlib.contextmanager
def _news() -> Iterator[Callable[[str], None]]:
    """Takes lines for people; below them a spinner turns where standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(text, err=True)
        return
    with console.status("working"):
        yield lambda text: console.print(text, markup=False)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Takes what is being done and the share (0 to 1) of the whole that is behind: a bar on a terminal, else lines."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines()
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda text, share: progress.update(task, description=text, completed=share)


def _lines() -> Callable[[str, float], None]:
    last = ""

    def advance(text: str, share: float) -> None:
        nonlocal last
        if text != last:
            typer.echo(f"{share:4.0%} {text}", err=True)
        last = text

    return advance


def _require_docker() -> None:
    import importlib.util

    if importlib.util.find_spec("docker") is None:
        raise ConfigError("the Docker SDK is missing: pip install 'driftgym[docker]'")


def _with_engine(work: Callable[[Any], Coroutine[Any, Any, _T]]) -> _T:
    from driftgym.sandboxes.docker_engine import Engine

    async def run() -> _T:
        engine = await Engine.connect(timeout_s=_ENGINE_TIMEOUT_S)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())
